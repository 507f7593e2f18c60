"""One migrated database for many tests, because a migration takes longer than most tests."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from uuid import uuid4

import pytest

import millpond
from servers import MariaDB, Postgres
from tests import templates

_TABLES = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = %s AND table_type = 'BASE TABLE' AND table_name NOT LIKE '%%migration'
AND table_name NOT LIKE '%%archive!_%%' ESCAPE '!'
"""
"""Partitions are emptied with their table."""

KINDS = ["sqlite", "postgres", "mariadb"]


def empty_database(request: pytest.FixtureRequest, kind: str) -> str:
    """The URL of a database without messages: the shared one, or for SQLite a new file."""
    if kind == "sqlite":
        return templates.migrated(request.getfixturevalue("tmp_path") / "pond.db")
    shared: SharedDatabase = request.getfixturevalue(f"shared_{kind}")
    shared.empty()
    return shared.url


class SharedDatabase:
    """A database whose rows are deleted before each test. Tables that a test made stay, empty."""

    def __init__(self, server: Postgres | MariaDB) -> None:
        self._server = server
        self._name = f"shared_{uuid4().hex[:8]}"
        on_postgres = isinstance(server, Postgres)
        self._schema, self._quote = ("public", '"') if on_postgres else (self._name, "`")

    def __enter__(self) -> Self:
        self.url = self._server.create_database(self._name)
        with ThreadPoolExecutor(1) as thread:  # an event loop may run already: a test may ask for the fixture by name
            thread.submit(lambda: asyncio.run(self._migrate())).result()
        self._admin: Any = self._server.connect(self._name)
        return self

    async def _migrate(self) -> None:
        await (await millpond.connect(self.url, migrate=True)).close()

    def empty(self) -> None:
        with self._admin.cursor() as cursor:
            cursor.execute(_TABLES, (self._schema,))
            for (table,) in cursor.fetchall():
                cursor.execute(f"DELETE FROM {self._quote}{table}{self._quote}")

    def __exit__(self, *_: object) -> None:
        self._admin.close()
        self._server.drop_database(self._name)
