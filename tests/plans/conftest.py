"""Databases in which more than a million rows stand ahead of the messages to be claimed, made once per run."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import millpond
from servers import MariaDB, Postgres
from tests.plans import operations, walls
from tests.plans.readers import MariadbReader, PostgresReader, Reader, SqliteReader


async def migrated(url: str) -> Any:
    """The store's own session settings."""
    store: Any = await millpond.connect(url, migrate=True)
    await store.close()
    return getattr(store._engine, "_settings", None)


@pytest.fixture(scope="session")
def postgres_walls(postgres_server: Postgres) -> Iterator[tuple[str, str, PostgresReader]]:
    """URL, settings, and a session whose plans were made while all tables were empty."""
    url = postgres_server.create_database("plans")
    settings = asyncio.run(migrated(url))
    with psycopg.connect(url, autocommit=True) as connection:
        # Statistics would let the plans be made anew.
        connection.execute("ALTER TABLE message SET (autovacuum_enabled = off)")
        connection.execute("VACUUM ANALYZE")
        early = PostgresReader(url, settings)
        operations.everything_once(early)
        early.rollback()
        connection.execute("SET synchronous_commit = off")
        for statement in walls.statements(walls.POSTGRES):
            connection.execute(statement)
    yield url, settings, early
    early.close()
    postgres_server.drop_database("plans")


@pytest.fixture(scope="session")
def mariadb_walls(mariadb_server: MariaDB) -> Iterator[str]:
    asyncio.run(migrated(mariadb_server.create_database("plans")))
    with mariadb_server.connect("plans") as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 0")
        for statement in walls.statements(walls.MARIADB):
            cursor.execute(statement)
        cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    yield "plans"
    mariadb_server.drop_database("plans")


@pytest.fixture(scope="session")
def sqlite_walls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "pond.db"
    asyncio.run(migrated(f"sqlite:///{path}"))
    with contextlib.closing(SqliteReader(str(path))) as reader:
        reader.fill(walls.statements(walls.SQLITE))
    return path


@pytest.fixture(params=["postgresql planned when empty", "postgresql", "mariadb", "sqlite"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = _reader(request)
    yield made
    made.rollback()
    if request.param != "postgresql planned when empty":
        made.close()


def _reader(request: pytest.FixtureRequest) -> Reader:
    match request.param:
        case "mariadb":
            server: MariaDB = request.getfixturevalue("mariadb_server")
            return MariadbReader(server.connect(request.getfixturevalue("mariadb_walls")))
        case "sqlite":
            return SqliteReader(str(request.getfixturevalue("sqlite_walls")))
        case "postgresql":
            url, settings, _ = request.getfixturevalue("postgres_walls")
            return PostgresReader(url, settings)
        case _:
            early: PostgresReader = request.getfixturevalue("postgres_walls")[2]
            return early
