"""One migrated database for many tests, because a migration takes longer than most tests."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from uuid import uuid4

import pytest

import millpond
from servers import MariaDB, Postgres
from tests import templates

# In few round trips, because thousands of tests begin with it. Each DELETE is committed alone, because a session that a
# test left behind may still hold locks.
_EMPTY_POSTGRES = """
DO $$ DECLARE found regclass; BEGIN
FOR found IN SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
AND NOT relispartition AND relname NOT LIKE '%migration'
LOOP EXECUTE format('DELETE FROM %s', found); COMMIT; END LOOP; END $$
"""
_TABLES_OF_MARIADB = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = database() AND table_type = 'BASE TABLE' AND table_name NOT LIKE '%migration'
"""

KINDS = ["sqlite", "postgres", "mariadb"]


def empty_database(request: pytest.FixtureRequest, kind: str) -> str:
    """The URL of a database without messages: the shared one, or for SQLite a new file."""
    if kind == "sqlite":
        return templates.migrated(request.getfixturevalue("tmp_path") / "pond.db")
    shared: SharedDatabase = request.getfixturevalue(f"shared_{kind}")
    shared.empty()
    return shared.url


def empty_databases(request: pytest.FixtureRequest, kind: str, count: int) -> list[str]:
    """URLs of databases on one server, without messages: up to three shared ones."""
    shared: list[SharedDatabase] = request.getfixturevalue(f"three_{kind}")[:count]
    for database in shared:
        database.empty()
    return [database.url for database in shared]


class SharedDatabase:
    """A database whose rows are deleted before each test. Tables that a test made stay, empty."""

    def __init__(self, server: Postgres | MariaDB) -> None:
        self._server = server
        self._name = f"shared_{uuid4().hex[:8]}"

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
            if isinstance(self._server, Postgres):
                cursor.execute(_EMPTY_POSTGRES)
                return
            cursor.execute(_TABLES_OF_MARIADB)
            deletes = " ".join(f"DELETE FROM `{table}`;" for (table,) in cursor.fetchall())
            cursor.execute(f"BEGIN NOT ATOMIC {deletes} END")

    def __exit__(self, *_: object) -> None:
        self._admin.close()
        self._server.drop_database(self._name)
