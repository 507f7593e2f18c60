"""Databases in which half a million rows stand ahead of the messages to be claimed, made once per run."""

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
    """Migrate a database; returns the session settings of the store."""
    store: Any = await millpond.connect(url, migrate=True)
    await store.close()
    return getattr(store.runner.engine, "_settings", None)


@pytest.fixture(scope="session")
def postgres_walls(postgres_server: Postgres) -> Iterator[tuple[str, str, PostgresReader]]:
    """URL, settings, and a session whose plans were made while all tables were empty."""
    url = postgres_server.create_database("plans")
    settings = asyncio.run(migrated(url))
    with psycopg.connect(url, autocommit=True) as connection:
        # With new statistics PostgreSQL would make the plans again.
        connection.execute("ALTER TABLE millpond_message SET (autovacuum_enabled = off)")
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
def postgres_analyzed(postgres_walls: tuple[str, str, PostgresReader]) -> None:
    with psycopg.connect(postgres_walls[0], autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")


@pytest.fixture(scope="session")
def mariadb_walls(mariadb_server: MariaDB) -> Iterator[str]:
    """With the statistics of empty tables, until ANALYZE runs."""
    asyncio.run(migrated(mariadb_server.create_database("plans")))
    with mariadb_server.connect("plans") as connection, connection.cursor() as cursor:
        for table in ("millpond_message", "millpond_archive"):
            cursor.execute(f"ALTER TABLE {table} STATS_AUTO_RECALC = 0")
            cursor.execute(f"ANALYZE TABLE {table}")
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


@pytest.fixture(scope="session")
def mariadb_analyzed(mariadb_server: MariaDB, mariadb_walls: str) -> str:
    with mariadb_server.connect(mariadb_walls) as connection, connection.cursor() as cursor:
        cursor.execute("ANALYZE TABLE millpond_message, millpond_archive")
    return mariadb_walls


PLANNED_EMPTY, ANALYZED_EMPTY = "postgresql planned when empty", "mariadb analyzed when empty"


@pytest.fixture(scope="session", params=[PLANNED_EMPTY, "postgresql", ANALYZED_EMPTY, "mariadb", "sqlite"])
def kind(request: pytest.FixtureRequest) -> str:
    """The scope is the session: all tests of one kind run before the next kind gathers statistics."""
    found: str = request.param
    return found


@pytest.fixture
def reader(kind: str, request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = _reader(kind, request)
    yield made
    made.rollback()
    if kind != PLANNED_EMPTY:
        made.close()


def _reader(kind: str, request: pytest.FixtureRequest) -> Reader:
    if kind == "sqlite":
        return SqliteReader(str(request.getfixturevalue("sqlite_walls")))
    if kind in ("mariadb", ANALYZED_EMPTY):
        server: MariaDB = request.getfixturevalue("mariadb_server")
        name = "mariadb_analyzed" if kind == "mariadb" else "mariadb_walls"
        return MariadbReader(server.connect(request.getfixturevalue(name)))
    url, settings, early = request.getfixturevalue("postgres_walls")
    if kind == PLANNED_EMPTY:
        return early
    request.getfixturevalue("postgres_analyzed")
    return PostgresReader(url, settings)
