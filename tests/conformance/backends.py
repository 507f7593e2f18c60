"""Every transport that the suite runs over. A new one enters here, and nowhere else.

A backend is emptied before each test and connected to with the test's clock. A test that needs a capability is marked
with `requires`, and only this mark skips it.
"""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest

import millpond
from millpond import Capability, Transport, transports
from millpond.transports.database.sqlite import engine as sqlite_module
from millpond.transports.database.sqlite.engine import open_connection
from tests import templates
from tests.conformance.rabbitmq import RabbitByHand
from tests.shared import SharedDatabase


def requires(capability: Capability) -> pytest.MarkDecorator:
    """Run this test only over transports with the capability."""
    return pytest.mark.requires(capability)


class Backend(Protocol):
    def empty(self) -> None:
        """Delete every message."""

    async def connect(self, **options: Any) -> Transport:
        """A handle; several handles between two `empty` share their messages."""


class Memory:
    def empty(self) -> None:
        self._url = f"memory://{uuid4().hex}"

    async def connect(self, **options: Any) -> Transport:
        return await millpond.connect(self._url, **options)  # type: ignore[return-value]


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def empty(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        self._url = templates.migrated(self._folder / f"{uuid4().hex}.db")

    async def connect(self, **options: Any) -> Transport:
        return await millpond.connect(self._url, **options)  # type: ignore[return-value]


class Server:
    def __init__(self, database: SharedDatabase) -> None:
        self._database = database

    def empty(self) -> None:
        self._database.empty()

    async def connect(self, **options: Any) -> Transport:
        return await millpond.connect(self._database.url, **options)  # type: ignore[return-value]


def memory(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield Memory()


def sqlite(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """With SQLite's default limit of parameters to a statement; some distributions build it with a higher one."""

    def connect(path: str, busy_timeout: float, **given: bool) -> sqlite3.Connection:
        connection = open_connection(path, busy_timeout, **given)
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
        return connection

    # A module that is imported meanwhile would keep the function below: this one is imported by tests of Spark.
    importlib.import_module("millpond.transports.database.sqlite.reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_module, "open_connection", connect)
        yield Sqlite(request.getfixturevalue("tmp_path_factory").mktemp("conformance"))


def postgresql(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield Server(request.getfixturevalue("shared_postgres"))


def mariadb(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield Server(request.getfixturevalue("shared_mariadb"))


class Shards:
    """Several databases that form one pond."""

    def __init__(self, urls: Callable[[], list[str]], databases: Sequence[SharedDatabase] = ()) -> None:
        self._urls = urls
        self._databases = databases

    def empty(self) -> None:
        for database in self._databases:
            database.empty()
        self._addresses = self._urls()
        self._made = False

    async def connect(self, **options: Any) -> Transport:
        if not self._made:
            self._made = True
            await transports.init_shards(self._addresses, names=templates.SHARDS, migrate=True)
        return await millpond.connect(self._addresses, **options)  # type: ignore[return-value]


class SqliteShards:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def empty(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        self._addresses = templates.shards(self._folder, uuid4().hex)

    async def connect(self, **options: Any) -> Transport:
        return await millpond.connect(self._addresses, **options)  # type: ignore[return-value]


def sqlite_shards(request: pytest.FixtureRequest) -> Iterator[Backend]:
    folder = request.getfixturevalue("tmp_path_factory").mktemp("shards")
    yield SqliteShards(folder)


def postgres_shards(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Three databases of one server."""
    databases = request.getfixturevalue("three_postgres")
    yield Shards(lambda: [one.url for one in databases], databases)


def mixed_postgres_shards(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """PostgreSQL, MariaDB and SQLite in one pond."""
    databases = [request.getfixturevalue("shared_postgres"), request.getfixturevalue("shared_mariadb")]
    folder = request.getfixturevalue("tmp_path_factory").mktemp("mixed")
    yield Shards(lambda: [*(one.url for one in databases), f"sqlite:///{folder / uuid4().hex}.db"], databases)


def rabbitmq(request: pytest.FixtureRequest) -> Iterator[Backend]:
    server = request.getfixturevalue("rabbitmq_server")
    name = f"conformance_{uuid4().hex[:8]}"
    yield RabbitByHand(server.create_vhost(name))
    server.drop_vhost(name)


BACKENDS: dict[str, Callable[[pytest.FixtureRequest], Iterator[Backend]]] = {
    "memory": memory,
    "sqlite": sqlite,
    "postgresql": postgresql,
    "mariadb": mariadb,
    "rabbitmq": rabbitmq,
    "sqlite_shards": sqlite_shards,
    "postgres_shards": postgres_shards,
    "mixed_postgres_shards": mixed_postgres_shards,
}

DATABASES = [name for name in BACKENDS if name in ("sqlite", "postgresql", "mariadb")]
