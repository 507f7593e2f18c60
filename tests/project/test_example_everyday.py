"""The three programs that a newcomer writes: Django, FastAPI with PostgreSQL, and a plain script."""

import contextlib
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from servers.ports import free_port
from tests.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, script: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TAKE = """
import django
django.setup()
from django.test import Client
answer = Client().post("/orders", {"sku": "teapot"})
assert answer.status_code == 200, answer.content
"""
CHECK = "import django; django.setup(); from shop.models import Order; assert Order.objects.get().shipped"


def test_django(tmp_path: Path) -> None:
    manage = EXAMPLES / "django_shop" / "manage.py"
    settings = {"DJANGO_SETTINGS_MODULE": "settings"}
    for name, text in (("take", TAKE), ("check", CHECK)):
        (tmp_path / f"{name}.py").write_text(f"import sys; sys.path.insert(0, {str(manage.parent)!r})\n{text}")
    run(tmp_path, manage, "migrate", **settings)
    run(tmp_path, manage, "migrate", **settings)
    run(tmp_path, tmp_path / "take.py", **settings)
    assert "orders" in run(tmp_path, manage, "millpond", "stats", **settings)
    run(tmp_path, manage, "millpond", "run", "--until-idle", **settings)
    run(tmp_path, tmp_path / "check.py", **settings)


DJANGO_TEST = """
from django.db import connection
from django.test import TestCase
from millpond.integrations.django import publish
from shop.models import Order

class Orders(TestCase):
    def test_an_order_and_its_message_are_stored_together(self):
        self.client.post("/orders", {"sku": "teapot"})
        publish("orders", {"order": 8})
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM millpond_message")
            self.assertEqual(cursor.fetchone(), (2,))
"""


def test_djangos_tests_have_millponds_tables_in_memory(tmp_path: Path) -> None:
    (tmp_path / "test_orders.py").write_text(DJANGO_TEST)
    manage = EXAMPLES / "django_shop" / "manage.py"
    run(tmp_path, manage, "test", str(tmp_path), DJANGO_SETTINGS_MODULE="settings")


PUBLISHING_TEST = """
from django.db import connection
from django.test import TestCase
from millpond.integrations.django import pond
from shop.handlers import ship  # imported before Django creates the test's database

class Orders(TestCase):
    def test_messages_are_in_the_database_of_the_test(self):
        pond.publish_sync("orders", {"order": 7})
        pond.publish_many_sync("orders", [{"order": 8}])
        ship.publish_sync({"order": 9})
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM millpond_message")
            self.assertEqual(cursor.fetchone(), (3,))

    def test_they_are_rolled_back(self):
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM millpond_message")
            self.assertEqual(cursor.fetchone(), (0,))
"""
WITH_FILE = """
from settings import *
DATABASES["default"]["TEST"] = {"NAME": Path("test.db").absolute()}
"""


@pytest.mark.parametrize("settings", ["settings", "settings_with_file"])
def test_djangos_tests_do_not_publish_to_the_real_database(tmp_path: Path, settings: str) -> None:
    (tmp_path / "test_orders.py").write_text(PUBLISHING_TEST)
    (tmp_path / "settings_with_file.py").write_text(WITH_FILE)
    manage = EXAMPLES / "django_shop" / "manage.py"
    path = os.pathsep.join([str(tmp_path), str(manage.parent), *sys.path])
    environment = {"DJANGO_SETTINGS_MODULE": settings, "PYTHONPATH": path}
    run(tmp_path, manage, "migrate", **environment)
    run(tmp_path, manage, "test", str(tmp_path), **environment)
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as real:
        assert real.execute("SELECT count(*) FROM millpond_message").fetchone() == (0,)


WITH_PREFIX = """
from settings import *
MILLPOND = {"OPTIONS": {"table_prefix": "jobs_", "busy_timeout": 5, "notify": True}}
"""


def test_djangos_commands_use_the_options_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "settings_with_prefix.py").write_text(WITH_PREFIX)
    manage = EXAMPLES / "django_shop" / "manage.py"
    path = os.pathsep.join([str(tmp_path), str(manage.parent), *sys.path])
    environment = {"DJANGO_SETTINGS_MODULE": "settings_with_prefix", "PYTHONPATH": path}
    run(tmp_path, manage, "migrate", **environment)
    run(tmp_path, manage, "millpond", "publish", "orders", "{}", **environment)
    assert "orders" in run(tmp_path, manage, "millpond", "stats", **environment)


Shell = Callable[[str], str]


@contextlib.asynccontextmanager
async def readme(name: str, folder: Path, **environment: str) -> AsyncIterator[tuple[Shell, list[str]]]:
    """Run the commands of an example's README, with its server if it has one. Gives those for another terminal."""
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    first, *others = re.findall(r"^```sh$(.*?)^```$", (folder / "README.md").read_text(), re.M | re.S)
    port, server = free_port(), None
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), **environment}

    def shell(line: str) -> str:
        line = line.replace("localhost:8000", f"localhost:{port}").replace("curl ", "curl --fail -sS ")
        command = ["bash", "-c", line]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(line: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(line.split(), cwd=folder, env=environment)

    try:
        for line in first.strip().splitlines():
            assert server is None, f"{line!r} comes after a command that does not end"
            if line.startswith("uvicorn "):
                server = start(f"{line} --port {port}")
            elif line.endswith(" runserver"):
                server = start(f"{line} --noreload {port}")
            elif not line.startswith(("pip install ", "export ")):  # installed and set by the test
                shell(line)
        if server is not None:
            await until(lambda: accepts(port))
        yield shell, "".join(others).strip().splitlines()
    finally:
        if server is not None:
            server.terminate()
            server.wait()


def accepts(port: int) -> bool:
    with contextlib.closing(socket.socket()) as client:
        return client.connect_ex(("localhost", port)) == 0


async def test_fastapi_by_its_readme(tmp_path: Path, postgres_url: str) -> None:
    async with readme("fastapi_shop", tmp_path, SHOP_URL=postgres_url) as (shell, (take, show)):
        assert shell(take) == "1"
        await until(lambda: shell(show) == "true")


async def test_django_by_its_readme(tmp_path: Path) -> None:
    async with readme("django_shop", tmp_path) as (shell, (take, stats, work)):
        assert "1" in shell(take)
        assert "orders" in shell(stats)
        shell(f"{work} --until-idle")
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as real:
        assert real.execute("SELECT shipped FROM shop_order").fetchall() == [(1,)]


async def test_a_plain_script_by_its_readme(tmp_path: Path) -> None:
    async with readme("plain_script", tmp_path) as (_, others):
        assert others == []


def test_a_plain_script(tmp_path: Path) -> None:
    out = run(tmp_path, EXAMPLES / "plain_script" / "script.py")
    assert "tick" in out and "snooze" in out and "report of today in trace" in out
    for name in ("send reports", "process ticks", "process reports"):
        assert f"span: {name}" in out
