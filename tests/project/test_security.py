"""Known vulnerabilities, the list of packages, and scripts that change the machine."""

import asyncio
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


audit = script("audit")
pin = script("pin")


def test_no_allowed_or_pinned_version_has_a_known_vulnerability() -> None:
    known = audit.advisories()
    assert len(known) > 50
    assert audit.findings(audit.lower_bounds(PROJECT), known, "allowed") == []
    assert audit.findings(audit.pinned((ROOT / "constraints.txt").read_text()), known, "pinned") == []


def test_vulnerable_versions_are_found() -> None:
    found = audit.findings({"AsyncMy": "0.2.11", "PyMySQL": "1.1.0", "rich": "13.0"}, audit.advisories(), "pinned")
    assert [line.split(",")[0] for line in found] == [
        "pinned: AsyncMy 0.2.11 has CVE-2025-65896",
        "pinned: PyMySQL 1.1.0 has CVE-2024-36039",
    ]


def test_every_declared_package_has_a_lower_bound_and_a_pin() -> None:
    pins = {name.lower().replace("_", "-") for name in audit.pinned((ROOT / "constraints.txt").read_text())}
    bounds = audit.lower_bounds(PROJECT)
    assert [name for name, bound in bounds.items() if bound == "0"] == []
    assert {name.lower() for name in bounds} - pins == set()


def test_every_pin_has_hashes_which_are_checked_at_each_installation() -> None:
    lines = (ROOT / "constraints.txt").read_text().replace("\\\n", "").splitlines()
    assert len(lines) > 50
    assert [line for line in lines if not re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", line)] == []
    installs = re.findall(r"-m pip install.*", (ROOT / "Makefile").read_text())
    assert installs and all("--no-require-hashes --constraint constraints.txt" in line for line in installs)


@pytest.mark.parametrize("is_right", [True, False])
def test_pip_refuses_a_file_with_another_hash(tmp_path: Path, is_right: bool) -> None:
    """Though the project beside it is editable, and has no hash"""
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "")
        file.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        file.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("tiny-1.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if is_right else "0" * 64
    pins = tmp_path / "pins"
    pins.write_text(pin.pin("tiny", "1", [digest]) + "\n")
    command = ["install", "--dry-run", "--no-index", "--find-links", str(tmp_path), "--no-require-hashes"]
    result = subprocess.run(
        [sys.executable, "-m", "pip", *command, "--constraint", str(pins), "tiny"], capture_output=True, text=True
    )
    assert (result.returncode == 0) == is_right, result.stderr
    assert ("DO NOT MATCH THE HASHES" in result.stderr) != is_right


def test_hashes_of_the_files_that_may_be_installed() -> None:
    files = {
        "my_pack-1.0.tar.gz": True,
        "my_pack-1.0-py3-none-any.whl": True,
        "my.pack-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": True,
        "my_pack-1.0-cp39-abi3-musllinux_1_2_aarch64.whl": True,
        "my_pack-1.0-cp310-cp310-manylinux_2_17_x86_64.whl": False,
        "my_pack-1.0-cp313-cp313t-manylinux_2_17_x86_64.whl": False,
        "my_pack-1.0-cp311-cp311-win_amd64.whl": False,
        "my_pack-1.0.1.tar.gz": False,
        "my_pack_more-1.0.tar.gz": False,
    }
    page = "".join(f'<a href="../../files/{name}#sha256={n:064x}">{name}</a>' for n, name in enumerate(files))
    wanted = {name: f"{n:064x}" for n, (name, is_wanted) in enumerate(files.items()) if is_wanted}
    assert pin.hashes(page, "my-pack", "1.0") == wanted


def test_the_data_is_renewed_from_osv_records(tmp_path: Path) -> None:
    records = [
        {
            "id": "PYSEC-1",
            "aliases": ["CVE-1"],
            "affected": [
                {
                    "package": {"ecosystem": "PyPI", "name": "Async_My"},
                    "ranges": [
                        {"type": "GIT", "events": [{"introduced": "0"}]},
                        {
                            "type": "ECOSYSTEM",
                            "events": [{"introduced": "0"}, {"fixed": "1.2"}, {"introduced": "2.0"}],
                        },
                    ],
                },
                {"package": {"ecosystem": "npm", "name": "async-my"}, "ranges": []},
            ],
        },
        {"id": "PYSEC-2", "withdrawn": "2026-01-01T00:00:00Z", "affected": []},
    ]
    for record in records:
        (tmp_path / f"{record['id']}.json").write_text(json.dumps(record))
    written = tmp_path / "data" / "advisories.json"
    written.parent.mkdir()
    found = list(audit.from_osv(tmp_path, ["async.my", "rich"]))
    assert audit.write(found, written) == 2
    known = audit.advisories(written)
    assert known == [audit.Advisory("async-my", "CVE-1", "0", "1.2"), audit.Advisory("async-my", "CVE-1", "2.0", None)]
    affected = [version for version in ("1.1", "1.2", "2.0", "9") if any(one.affects(version) for one in known)]
    assert affected == ["1.1", "2.0", "9"]


def test_the_list_of_packages() -> None:
    run = [sys.executable, str(ROOT / "scripts" / "sbom.py")]
    first, second = (subprocess.run(run, check=True, capture_output=True, text=True).stdout for _ in range(2))
    assert first == second
    document = json.loads(first)
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "millpond")
    names = {component["name"].lower() for component in document["components"]}
    assert {"asyncpg", "asyncmy", "cryptography", "cffi", "aiormq", "pyspark", "py4j", "msgspec", "rich"} <= names
    assert not {"pytest", "django", "millpond"} & names
    refs = {component["bom-ref"] for component in document["components"]} | {
        document["metadata"]["component"]["bom-ref"]
    }
    assert {entry["ref"] for entry in document["dependencies"]} == refs
    assert all(ref in refs for entry in document["dependencies"] for ref in entry["dependsOn"])


def test_the_security_page_names_the_supported_version() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert f"({'.'.join(PROJECT['version'].split('.')[:2])})" in text
    assert "Report a vulnerability" in text
    assert "make audit" in (ROOT / ".ci" / "run").read_text()


# --- scripts/debian-packages ------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment whose apt-get waits for the file `go`, and with a private place for the policy file."""
    programs = tmp_path / "bin"
    programs.mkdir()
    apt = programs / "apt-get"
    apt.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.05; done\n")
    sudo = programs / "sudo"
    sudo.write_text('#!/bin/sh\nexec "$@"\n')
    for program in (apt, sudo):
        program.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "POLICY_FILE": str(tmp_path / "policy-rc.d"),
    }


def install(machine: dict[str, str]) -> "subprocess.Popen[str]":
    command = [str(ROOT / "scripts" / "debian-packages"), "no-such-package=no-such-program"]
    return subprocess.Popen(command, env=machine, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_it_prints_the_packages_before_it_installs_them(machine: dict[str, str], tmp_path: Path) -> None:
    with install(machine) as process:
        assert process.stdout is not None
        assert "no-such-package" in process.stdout.readline()
        assert "NO_INSTALL=1" in process.stdout.readline()
        asyncio.run(until((tmp_path / "asked").exists, "apt-get"))
        policy = subprocess.run([machine["POLICY_FILE"], "postgresql", "start"])
        assert policy.returncode == 101, "services are not started"
        (tmp_path / "go").touch()
    assert process.returncode == 0
    assert not Path(machine["POLICY_FILE"]).exists()


def test_it_installs_nothing_if_told_so(machine: dict[str, str], tmp_path: Path) -> None:
    with install({**machine, "NO_INSTALL": "1"}) as process:
        _, error = process.communicate()
    assert process.returncode == 1 and "apt-get install no-such-package" in error
    assert not (tmp_path / "asked").exists() and not Path(machine["POLICY_FILE"]).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_run_leaves_no_policy(machine: dict[str, str], tmp_path: Path, number: int) -> None:
    with install(machine) as process:
        asyncio.run(until((tmp_path / "asked").exists, "apt-get"))
        process.send_signal(number)
        (tmp_path / "go").touch()  # bash handles a signal when its child has ended
    assert not Path(machine["POLICY_FILE"]).exists()


def test_the_policy_of_a_killed_run_has_no_effect_and_the_next_run_removes_it(
    machine: dict[str, str], tmp_path: Path
) -> None:
    policy = Path(machine["POLICY_FILE"])
    with install(machine) as process:
        asyncio.run(until((tmp_path / "asked").exists, "apt-get"))
        process.kill()
        (tmp_path / "go").touch()
    assert policy.exists()
    assert subprocess.run([str(policy), "postgresql", "start"]).returncode == 0, "services may start again"
    subprocess.run([str(ROOT / "scripts" / "debian-packages"), "bash=bash"], env=machine, check=True)
    assert not policy.exists()


def test_a_policy_of_the_machine_stays(machine: dict[str, str], tmp_path: Path) -> None:
    policy = Path(machine["POLICY_FILE"])
    policy.write_text("#!/bin/sh\nexit 101\n")
    (tmp_path / "go").touch()
    with install(machine) as process:
        process.communicate()
    assert policy.read_text() == "#!/bin/sh\nexit 101\n"
