"""`manage.py millpond`: worker processes import what manage.py imports, and commands work on the project's database.

manage.py is in another folder than the current one, and adds a folder of apps, as templates of projects do.
"""

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import SOON, until

MANAGE = """
import sys
from pathlib import Path
from django.core.management import execute_from_command_line
sys.path.append(str(Path(__file__).parent / "apps"))
execute_from_command_line(sys.argv)
"""
SETTINGS = """
from pathlib import Path
SECRET_KEY = "only for this test"
INSTALLED_APPS = ["shop", "millpond.integrations.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).with_name("shop.db")}}
USE_TZ = True
"""
HANDLERS = """
from pathlib import Path
from millpond.integrations.django import pond

@pond.subscriber("orders")
def ship(body: dict) -> None: ...

@pond.on_start
def started() -> None:
    Path("{version}").touch()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shop = tmp_path / "site" / "apps" / "shop"
    shop.mkdir(parents=True)
    (shop / "__init__.py").touch()
    (shop / "handlers.py").write_text(HANDLERS.format(version="first"))
    (tmp_path / "site" / "manage.py").write_text(MANAGE)
    (tmp_path / "site" / "production.py").write_text(SETTINGS)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "site/manage.py", *arguments, "--settings=production"]


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "MILLPOND"))}


def manage(folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def completed(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(folder / "site" / "shop.db")) as database:
        (number,) = database.execute("SELECT count(*) FROM millpond_archive").fetchone()
        return int(number)


def test_worker_processes_import_what_manage_py_imports(folder: Path) -> None:
    manage(folder, "migrate")
    manage(folder, "millpond", "publish", "orders", "{}")
    manage(folder, "millpond", "run", "--workers", "2", "--until-idle")
    assert completed(folder) == 1


def test_commands_work_on_the_projects_database(folder: Path) -> None:
    """Also where the environment names the database of another program."""
    manage(folder, "migrate")
    others = {"MILLPOND_URL": "sqlite:///other.db", "MILLPOND_TABLE_PREFIX": "other_", "MILLPOND_OPTIONS": "x=y"}
    manage(folder, "millpond", "publish", "orders", "{}", **others)
    assert "orders" in manage(folder, "millpond", "stats", **others)
    assert not (folder / "other.db").exists()


@pytest.fixture
def reloaded(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    manage(folder, "migrate")
    process = subprocess.Popen(command("millpond", "run", "--reload"), cwd=folder, env=ENVIRONMENT)
    yield process
    process.kill()
    process.wait()


async def test_reload(reloaded: "subprocess.Popen[bytes]", folder: Path) -> None:
    await until((folder / "first").exists)
    (folder / "site" / "apps" / "shop" / "handlers.py").write_text(HANDLERS.format(version="second"))
    await until((folder / "second").exists)
    reloaded.terminate()
    assert reloaded.wait(SOON) == 0
