"""The package: its version and metadata, the time to import it, and its files in clean environments."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence, Set
from importlib import metadata
from pathlib import Path
from statistics import median

import pytest
from packaging.requirements import Requirement

import millpond
from bench.imports import take_turns

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_that_of_the_package() -> None:
    assert millpond.__version__ == metadata.version("millpond") == PROJECT["version"]
    with pytest.raises(AttributeError, match="nothing"):
        millpond.nothing  # noqa: B018 - the lookup is the test


def test_the_metadata_has_no_placeholder() -> None:
    texts = [PROJECT["name"], PROJECT["description"], *PROJECT["keywords"]]
    assert not [text for text in texts if re.search(r"example\.(com|org)|TODO|FIXME|your[-_ ]", text)]
    assert (ROOT / PROJECT["readme"]).exists() and all((ROOT / name).exists() for name in PROJECT["license-files"])


def test_the_metadata_has_no_url() -> None:
    """No address of the project is known. The release that gives it one removes this test: `pip show` prints them."""
    assert "urls" not in PROJECT


def test_both_packages_are_typed() -> None:
    for package in ("millpond", "pyspark_millpond"):
        assert (ROOT / "src" / package / "py.typed").exists()


def test_the_import_takes_at_most_twice_as_long_as_its_dependencies() -> None:
    """1.6 times when this was written. CPU time, and a ratio: neither depends on the machine or its load."""
    ours, needed = take_turns(9)
    assert median(one / other for one, other in zip(ours, needed, strict=True)) < 2.2


def test_the_import_loads_no_driver_and_no_command_line() -> None:
    code = "import sys, millpond; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(run([sys.executable, "-c", code], ROOT).split())
    assert loaded.isdisjoint(
        {"asyncpg", "asyncmy", "aiosqlite", "aiormq", "sqlalchemy", "pydantic", "pyarrow", "pyspark"}
    )
    assert loaded.isdisjoint({"hashlib", "difflib", "zoneinfo", "dataclasses"})  # for few programs or for errors only
    assert loaded.isdisjoint({"typer", "click", "rich", "cronsim", "starlette", "uvicorn", "grpc", "django"})


def test_the_import_loads_no_part_that_only_some_programs_use() -> None:
    """The import was once a third slower than before these parts existed."""
    code = "import sys, millpond; print(*sys.modules)"
    loaded = set(run([sys.executable, "-c", code], ROOT).split())
    assert "millpond.pond" in loaded
    assert loaded.isdisjoint({"millpond.worker.worker", "millpond.worker.child_worker", "millpond.testing"})
    assert loaded.isdisjoint({"millpond.schedule", "millpond.seam.operations", "millpond.transports.instrumented"})
    assert loaded.isdisjoint({"urllib.parse", "pathlib"})


def run(command: Sequence[str | Path], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MILLPOND"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("packages")
    run([sys.executable, "-m", "build", "--outdir", folder, ROOT], folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def installed(folder: Path, *requirements: str | Path) -> Path:
    """A clean environment; its dependencies come from the package registry. Returns its folder of commands."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    run([sys.executable, "-m", "pip", "--python", folder, "install", "-q", *requirements], folder.parent)
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_and_sdist_work_in_clean_environments(packages: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = packages
    assert "PASSED" in run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert {"millpond/py.typed", "pyspark_millpond/py.typed"} <= set(names)
    assert any(name.endswith("schema/sqlite/0001_queue.sql") for name in names)
    assert not [name for name in names if name.startswith("tests/") or "__pycache__" in name]
    with tarfile.open(sdist) as files:
        assert any(name.endswith("/tests/conftest.py") for name in files.getnames())
    for number, package in enumerate((wheel, sdist)):
        commands = installed(tmp_path / f"env{number}", package)
        assert PROJECT["version"] in run([commands / "millpond", "--version"], tmp_path)
        (tmp_path / "shop.py").write_text(
            "from millpond import Millpond\npond = Millpond('sqlite:///shop.db')\n"
            "@pond.every(every=1, queue='ticks')\ndef tick() -> None: print('tick')\n"
        )
        run([commands / "millpond", "migrate", "sqlite:///shop.db"], tmp_path)
        run([commands / "millpond", "publish", "ticks", "null", "--url", "sqlite:///shop.db"], tmp_path)
        assert "tick" in run([commands / "millpond", "run", "shop", "--until-idle"], tmp_path)
        (tmp_path / "shop.db").unlink()


MODULES = {
    "postgres": ["millpond.transports.database.postgres.engine"],
    "mysql": ["millpond.transports.database.mysql.engine"],
    "rabbitmq": ["millpond.transports.rabbitmq.transport"],
    "opentelemetry": ["millpond.integrations.opentelemetry"],
    "prometheus": ["millpond.integrations.prometheus"],
    "sentry": ["millpond.integrations.sentry"],
    "structlog": ["millpond.integrations.structlog"],
    "reload": ["millpond.cli.reload", "watchfiles"],
    "server": ["millpond.server.mounted", "millpond.cli.serve"],
}
"""Modules that need the extra; Spark has a test of its own."""
OTHERS = {
    "django": ["millpond.integrations.django", "millpond.integrations.django.apps"],
    "fastapi": ["millpond.integrations.fastapi"],
    "pytest": ["millpond.integrations.pytest"],
}
"""Packages that a program brings along, and the modules for them."""
TOGETHER = [
    *("postgres prometheus structlog", "mysql rabbitmq opentelemetry sentry reload"),
    *("server", "django fastapi pytest"),
]
"""Installed into one environment: the packages of one do not stand in for those of another."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", TOGETHER)
def test_the_wheel_has_the_modules_of_every_extra(names: str, packages: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, _ = packages
    chosen = names.split()
    extras = ",".join(name for name in chosen if name in MODULES)
    package = f"{wheel}[{extras}]" if extras else wheel
    commands = installed(tmp_path / "env", package, *(name for name in chosen if name in OTHERS))
    modules = [module for name in chosen for module in {**MODULES, **OTHERS}[name]]
    out = run([commands / "python", "-c", f"import {', '.join(modules)}; print(millpond.__file__)"], tmp_path)
    assert out.startswith(str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_has_the_modules_of_spark(packages: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment with the packages that the extra requires, of this one: Spark takes minutes to load."""
    wheel, _ = packages
    commands = installed(tmp_path / "env", "--no-deps", wheel)
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    for package in required("millpond", {"spark"}):
        for part in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
            if not (site / part).exists():
                (site / part).symlink_to(str(package.locate_file(part)))
    out = run([commands / "python", "-c", IMPORT_ALL_OF_SPARK], tmp_path)
    assert out.startswith(str(tmp_path)) and int(out.split()[-1]) > 20


IMPORT_ALL_OF_SPARK = """
import importlib, pkgutil
import millpond.spark, pyspark_millpond, millpond.cli.lake
names = [module.name for module in pkgutil.walk_packages(millpond.spark.__path__, "millpond.spark.")]
for name in names:
    importlib.import_module(name)
print(millpond.__file__, len(names))
"""


def required(name: str, extras: Set[str]) -> list[metadata.Distribution]:
    """The packages that an extra requires, and those that they require in turn, as they are installed here."""
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    todo = [(name, frozenset(extras))]
    for one, its in todo:
        for line in metadata.requires(one) or ():
            requirement = Requirement(line)
            applies = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in its or {""}
            )
            key = requirement.name, frozenset(requirement.extras)
            if applies and key not in found:
                found[key] = metadata.distribution(requirement.name)
                assert requirement.specifier.contains(found[key].version, prereleases=True), line
                todo.append(key)
    return list(found.values())


def test_every_extra_is_tried() -> None:
    assert {name for names in TOGETHER for name in names.split()} == set(MODULES) | set(OTHERS)
    assert set(MODULES) | {"all", "dev", "spark"} == set(PROJECT["optional-dependencies"])


EXTRAS = sorted(set(PROJECT["optional-dependencies"]) - {"all", "dev", "spark"})


@pytest.mark.long  # `make slow` installs all of them, in three environments
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_can_be_installed_alone(extra: str, tmp_path: Path) -> None:
    """Resolved by pip from the package registry, without installing. Not `all` and `spark`: pip would load Spark."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    assert "Would install" in run([*pip, f"{ROOT}[{extra}]"], tmp_path)
