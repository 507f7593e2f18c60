"""Every transport that the suite runs over. A new one enters here, and nowhere else.

A backend is emptied before each test and connected to with the test's clock. What a transport cannot do is said
by its capabilities; a test that needs one says so with `requires`, and is skipped by that only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest

import millpond
from millpond import Capability, Store
from millpond.transports.database import sqlite as sqlite_module
from millpond.transports.database.sqlite import open_connection
from tests.conformance.rabbitmq import RabbitByHand
from tests.shared import SharedDatabase


def requires(capability: Capability) -> pytest.MarkDecorator:
    """Run this test only over transports with the capability."""
    return pytest.mark.requires(capability)


class Backend(Protocol):
    def empty(self) -> None:
        """Forget every message."""

    async def connect(self, **options: Any) -> Store:
        """A handle; several handles between two `empty` share their messages."""


class Memory:
    def empty(self) -> None:
        self._url = f"memory://{uuid4().hex}"

    async def connect(self, **options: Any) -> Store:
        return await millpond.connect(self._url, **options)  # type: ignore[return-value]


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def empty(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        self._url = f"sqlite:///{self._folder / uuid4().hex}.db"

    async def connect(self, **options: Any) -> Store:
        return await millpond.connect(self._url, **options)  # type: ignore[return-value]


class Server:
    def __init__(self, database: SharedDatabase) -> None:
        self._database = database

    def empty(self) -> None:
        self._database.empty()

    async def connect(self, **options: Any) -> Store:
        return await millpond.connect(self._database.url, **options)  # type: ignore[return-value]


def memory(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield Memory()


def sqlite(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """With as many parameters to a statement as SQLite has by default; some distributions build it with more."""

    def connect(path: str, busy_timeout: float) -> sqlite3.Connection:
        connection = open_connection(path, busy_timeout)
        connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite_module, "open_connection", connect)
        yield Sqlite(request.getfixturevalue("tmp_path_factory").mktemp("conformance"))


def postgresql(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield Server(request.getfixturevalue("shared_postgres"))


def mariadb(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield Server(request.getfixturevalue("shared_mariadb"))


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
}

DATABASES = [name for name in BACKENDS if name not in ("memory", "rabbitmq")]
