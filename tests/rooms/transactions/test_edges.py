"""Special cases of a caller's transaction: autocommit, contention, isolation, wrong objects."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pymysql
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

import millpond
from millpond import Ack, Message, Millpond, Nack, Retry, Transport
from millpond.errors import WrongConnection, WrongDatabase
from millpond.transports import transactions
from tests.rooms.transactions.callers import address, django_on, path, sqlalchemy_url
from tests.shared import KINDS, empty_database
from tests.waiting import IS_WAITING

MESSAGE = Message(queue="q", payload=b"x")
NO_TRANSACTION = "no transaction open"


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[Transport]:
    store = await millpond.connect(postgres_url, migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def mariadb(mariadb_url: str) -> AsyncIterator[Transport]:
    store = await millpond.connect(mariadb_url, migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def sqlite(sqlite_url: str) -> AsyncIterator[Transport]:
    store = await millpond.connect(sqlite_url)
    yield store
    await store.close()


async def is_empty(store: Transport) -> bool:
    return await store.claim(["q"]) == []


# --- without a transaction -----------------------------------------------------------------------------------


async def test_psycopg_in_autocommit_is_refused(postgres: Transport, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as c:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            postgres.transactions.publish_sync([MESSAGE], within=c)
        assert await is_empty(postgres)
        with c.transaction():
            postgres.transactions.publish_sync([MESSAGE], within=c)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as ac:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            await postgres.publish([MESSAGE], within=ac)
        async with ac.transaction():
            await postgres.publish([MESSAGE], within=ac)
    assert len(await postgres.claim(["q"], limit=10)) == 2


async def test_psycopg_in_a_pipeline(postgres: Transport, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as c, c.pipeline():
        assert postgres.transactions.publish_sync([Message(queue="q", payload=b"x", id=uuid4())], within=c)[0].new
        c.commit()
    assert not await is_empty(postgres)


async def test_asyncpg_without_a_transaction_is_refused(postgres: Transport, postgres_url: str) -> None:
    c = await asyncpg.connect(postgres_url)
    try:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            await postgres.publish([MESSAGE], within=c)
        assert await is_empty(postgres)
        async with c.transaction():
            await postgres.publish([MESSAGE], within=c)
    finally:
        await c.close()
    assert not await is_empty(postgres)


async def test_mysql_in_autocommit_is_refused(mariadb: Transport, mariadb_url: str) -> None:
    with closing(pymysql.connect(**address(mariadb_url), autocommit=True)) as c:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            mariadb.transactions.publish_sync([MESSAGE], within=c)
        assert await is_empty(mariadb)
        c.begin()
        mariadb.transactions.publish_sync([MESSAGE], within=c)
        c.commit()
    ac = await asyncmy.connect(**address(mariadb_url), autocommit=True)
    try:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            await mariadb.publish([MESSAGE], within=ac)
        await ac.begin()
        await mariadb.publish([MESSAGE], within=ac)
        await ac.commit()
    finally:
        await ac.ensure_closed()
    assert len(await mariadb.claim(["q"], limit=10)) == 2


async def test_sqlite_in_autocommit_is_refused(sqlite: Transport, sqlite_url: str) -> None:
    c = sqlite3.connect(path(sqlite_url), isolation_level=None)
    with closing(c), pytest.raises(WrongConnection, match=NO_TRANSACTION):
        sqlite.transactions.publish_sync([MESSAGE], within=c)
    async with aiosqlite.connect(path(sqlite_url), isolation_level=None) as ac:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            await sqlite.publish([MESSAGE], within=ac)
    assert await is_empty(sqlite)


async def test_sqlalchemy_in_autocommit_is_refused(
    postgres: Transport, postgres_url: str, mariadb: Transport, mariadb_url: str, sqlite: Transport, sqlite_url: str
) -> None:
    for store, url in (
        (postgres, sqlalchemy_url(postgres_url, "psycopg")),
        (mariadb, sqlalchemy_url(mariadb_url, "pymysql")),
        (sqlite, sqlite_url),
    ):
        always, sometimes = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT"), sqlalchemy.create_engine(url)
        with (
            always.connect() as first,
            sometimes.connect().execution_options(isolation_level="AUTOCOMMIT") as second,
        ):
            for connection in (first, second):
                with pytest.raises(WrongConnection, match=NO_TRANSACTION):
                    store.transactions.publish_sync([MESSAGE], within=connection)
        always.dispose()
        sometimes.dispose()
        assert await is_empty(store)


async def test_async_sqlalchemy_in_autocommit_is_refused(postgres: Transport, postgres_url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(postgres_url, "asyncpg"), isolation_level="AUTOCOMMIT")
    async with engine.connect() as c:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            await postgres.publish([MESSAGE], within=c)
    await engine.dispose()
    assert await is_empty(postgres)


def test_django_without_atomic_is_refused(sqlite_url: str) -> None:
    asyncio.run(_create(sqlite_url))
    with django_on("sqlite", sqlite_url):
        from django.db import connection, connections, transaction

        room = transactions(sqlite_url)
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            room.publish_sync([MESSAGE], within=connection)
        with transaction.atomic():
            room.publish_sync([MESSAGE], within=connections["default"])
    with closing(sqlite3.connect(path(sqlite_url))) as c:
        assert c.execute("SELECT count(*) FROM millpond_message").fetchone() == (1,)


async def _create(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()


# --- SQLite --------------------------------------------------------------------------------------------------


async def test_sqlite3_by_default_begins_with_our_first_statement(sqlite: Transport, sqlite_url: str) -> None:
    """The module begins a transaction only before the first INSERT. A settle reads earlier and must lock those rows."""
    await sqlite.publish([MESSAGE])
    (claim,) = await sqlite.claim(["q"])
    with (
        closing(sqlite3.connect(path(sqlite_url))) as c,
        closing(sqlite3.connect(path(sqlite_url), timeout=0)) as other,
    ):
        assert sqlite.transactions.settle_sync([Ack(claim.receipt)], within=c) == []
        assert c.in_transaction
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite.transactions.settle_sync([Ack(claim.receipt)], within=other)
        c.commit()
        assert not c.in_transaction
    async with aiosqlite.connect(path(sqlite_url)) as ac:
        await sqlite.publish([MESSAGE], within=ac)
        assert ac.in_transaction


async def test_sqlite_deferred_transactions_get_the_drivers_own_error(sqlite: Transport, sqlite_url: str) -> None:
    with (
        closing(sqlite3.connect(path(sqlite_url), isolation_level=None, timeout=0)) as deferred,
        closing(sqlite3.connect(path(sqlite_url), isolation_level=None, timeout=0)) as other,
    ):
        deferred.execute("BEGIN")
        deferred.execute("SELECT count(*) FROM millpond_message").fetchall()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            sqlite.transactions.publish_sync([MESSAGE], within=deferred)
        sqlite.transactions.publish_sync([MESSAGE], within=other)
        other.execute("COMMIT")
        # Its snapshot is out of date, so it can never write: the reason for BEGIN IMMEDIATE.
        with pytest.raises(sqlite3.OperationalError, match="database is locked") as told:
            sqlite.transactions.publish_sync([MESSAGE], within=deferred)
        assert told.value.sqlite_errorname == "SQLITE_BUSY_SNAPSHOT"
        deferred.execute("ROLLBACK")
    assert len(await sqlite.claim(["q"], limit=10)) == 1


# --- servers: isolation and settings -------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_every_isolation_level(postgres: Transport, postgres_url: str, level: str) -> None:
    engine = sqlalchemy.create_engine(sqlalchemy_url(postgres_url, "psycopg"), isolation_level=level)
    with engine.connect() as c:
        given = Message(queue="q", payload=b"x", id=uuid4())
        assert postgres.transactions.publish_sync([given, MESSAGE], within=c)[0].new
        assert not postgres.transactions.publish_sync([given], within=c)[0].new
        c.commit()
    claims = await postgres.claim(["q"], limit=10)
    with engine.connect() as c:
        assert postgres.transactions.settle_sync([Ack(claim.receipt) for claim in claims], within=c) == []
        c.commit()
    engine.dispose()
    assert await postgres.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_mysql_repeatable_read_with_an_old_snapshot(mariadb: Transport, mariadb_url: str) -> None:
    """The caller's transaction read before the message was claimed, and must not act on that old snapshot."""
    id_ = uuid4()
    await mariadb.publish([MESSAGE])
    with closing(pymysql.connect(**address(mariadb_url))) as c, c.cursor() as cursor:
        cursor.execute("SELECT @@tx_isolation, count(*) FROM millpond_message")
        assert cursor.fetchall() == (("REPEATABLE-READ", 1),)
        (claim,) = await mariadb.claim(["q"])
        await mariadb.publish([Message(queue="q", payload=b"x", id=id_)])
        assert mariadb.transactions.settle_sync([Ack(claim.receipt)], within=c) == []
        assert not mariadb.transactions.publish_sync([Message(queue="q", payload=b"x", id=id_)], within=c)[0].new
        c.commit()
    assert await mariadb.settle([Ack(claim.receipt)]) == []
    assert len(await mariadb.claim(["q"], limit=10)) == 1


async def test_mysql_retry_policy_with_an_old_snapshot(mariadb: Transport, mariadb_url: str) -> None:
    await mariadb.operations.configure("q", retry=Retry(attempts=1))
    with closing(pymysql.connect(**address(mariadb_url))) as c, c.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM millpond_message")
        await mariadb.publish([MESSAGE])
        (claim,) = await mariadb.claim(["q"])
        assert mariadb.transactions.settle_sync([Nack(claim.receipt)], within=c) == []
        c.commit()
    assert [row.reason for row in await mariadb.operations.archived("q")] == ["retries used up"]


async def test_two_publishers_of_one_id_wait_for_each_other(postgres: Transport, postgres_url: str) -> None:
    given = Message(queue="q", payload=b"x", id=uuid4())
    first, second = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        for outcome, new in (("ROLLBACK", True), ("COMMIT", False)):
            await first.execute("BEGIN")
            await second.execute("BEGIN")
            assert (await postgres.publish([given], within=first))[0].new
            waiting = asyncio.create_task(postgres.publish([given], within=second))
            async with asyncio.timeout(60):
                while not await first.fetchval(IS_WAITING):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await first.execute(outcome)
            assert (await waiting)[0].new is new
            assert await second.fetchval("SELECT 1") == 1  # not aborted
            await second.execute("ROLLBACK")
    finally:
        await first.close()
        await second.close()


async def test_the_session_is_left_as_it_was(postgres: Transport, postgres_url: str) -> None:
    settings = "SELECT name, setting FROM pg_settings WHERE source = 'session' OR name LIKE 'transaction_isolation'"
    with psycopg.connect(postgres_url) as c:
        before = c.execute(settings).fetchall()
        postgres.transactions.publish_sync([MESSAGE, Message(queue="q", payload=b"", id=uuid4())], within=c)
        assert c.execute(settings).fetchall() == before
        assert c.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        c.rollback()


async def test_driver_errors_pass_unchanged(postgres: Transport, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as c:
        with pytest.raises(psycopg.errors.DivisionByZero):
            c.execute("SELECT 1/0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            postgres.transactions.publish_sync([MESSAGE], within=c)
        c.rollback()
        c.execute("SET lock_timeout = 1; SET search_path = nowhere")
        with pytest.raises(psycopg.errors.UndefinedTable):
            postgres.transactions.publish_sync([MESSAGE], within=c)


# --- wrong objects -------------------------------------------------------------------------------------------


@pytest.fixture
def memory_connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as c:
        yield c


async def test_another_kind_of_database(postgres: Transport, memory_connection: sqlite3.Connection) -> None:
    with pytest.raises(WrongConnection, match="a connection to sqlite, and the store is in postgresql"):
        postgres.transactions.publish_sync([MESSAGE], within=memory_connection)
    with pytest.raises(WrongConnection, match="a connection to sqlite, and the store is in postgresql"):
        await postgres.publish([MESSAGE], within=memory_connection)


@pytest.mark.parametrize("thing", [object(), "postgresql://", 7, asyncio], ids=["object", "url", "number", "module"])
async def test_no_connection_at_all(sqlite: Transport, thing: object) -> None:
    for attempt in (sqlite.transactions.publish_sync, sqlite.publish):
        with pytest.raises(WrongConnection, match=r"within= takes .*psycopg.*Django's connection; not "):
            result = attempt([MESSAGE], within=thing)
            if asyncio.iscoroutine(result):
                await result


async def test_the_engine_instead_of_a_connection(sqlite: Transport, sqlite_url: str) -> None:
    engine = sqlalchemy.create_engine(sqlite_url)
    with pytest.raises(WrongConnection, match=r"not sqlalchemy\.engine\.base\.Engine"):
        sqlite.transactions.publish_sync([MESSAGE], within=engine)
    engine.dispose()


# --- no tables ------------------------------------------------------------------------------------------


def test_missing_tables_are_noted_on_the_drivers_error(postgres_url: str, mariadb_url: str, sqlite_url: str) -> None:
    """The error stays the driver's own. A note has the remedy."""
    for url, driver in ((postgres_url, "psycopg"), (mariadb_url, "pymysql"), (sqlite_url, "pysqlite")):
        room = transactions(url, table_prefix="absent_")
        engine = sqlalchemy.create_engine(sqlalchemy_url(url, driver))
        with engine.connect() as session, pytest.raises(sqlalchemy.exc.DBAPIError) as wrapped:
            room.publish_sync([MESSAGE], within=session)
        engine.dispose()
        assert "run: millpond migrate" in wrapped.value.__notes__[0]
    with django_on("sqlite", sqlite_url):
        from django.db import OperationalError, connection, transaction

        with pytest.raises(OperationalError, match="no such table") as raised, transaction.atomic():
            transactions(sqlite_url).publish_sync([MESSAGE], within=connection)
        assert "run: millpond migrate" in raised.value.__notes__[0]


@pytest.fixture(params=KINDS)
def two_databases(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    here, name = empty_database(request, request.param), f"other_{uuid4().hex[:8]}"
    if request.param == "sqlite":
        yield here, f"{here}.other"
        return
    server = request.getfixturevalue(f"{request.param}_server")
    yield here, server.create_database(name)
    server.drop_database(name)


async def test_a_connection_to_another_database_is_refused(two_databases: tuple[str, str]) -> None:
    """It is of the same kind and has the same tables. The store's own connections are taken, each time."""
    here, there = two_databases
    stores = [await millpond.connect(url, migrate=True) for url in (here, there)]
    message = Message(queue="q", payload=b"x")
    with _begun(there) as connection:
        with pytest.raises(WrongDatabase, match="another"):
            await stores[0].publish([message], within=connection)
        with pytest.raises(WrongDatabase):
            stores[0].transactions.publish_sync([message], within=connection)
        connection.rollback()
    for _ in range(2):
        with _begun(here) as connection:
            await stores[0].publish([message], within=connection)
            stores[0].transactions.publish_sync([message], within=connection)
            connection.commit()
    assert [len(await store.claim(["q"], limit=10)) for store in stores] == [4, 0]
    for store in stores:
        await store.close()


@pytest.mark.parametrize("connected", [False, True], ids=["by name", "connected"])
async def test_a_synchronous_pond_refuses_another_database(two_databases: tuple[str, str], connected: bool) -> None:
    here, there = two_databases
    for url in (here, there):
        await (await millpond.connect(url, migrate=True)).close()
    pond = Millpond(here)
    if connected:
        await pond.transport
    with _begun(there) as connection:
        with pytest.raises(WrongDatabase, match="own database"):
            pond.publish_sync("q", 1, within=connection)
        connection.rollback()
    with _begun(here) as connection:
        pond.publish_sync("q", 2, within=connection)
        connection.commit()
    assert len(await (await pond.transport).claim(["q"], limit=10)) == 1
    await pond.close()


def _begun(url: str) -> Any:
    if url.startswith("sqlite"):
        return closing(sqlite3.connect(path(url), timeout=60))
    if url.startswith("postgres"):
        return closing(psycopg.connect(url))
    return closing(pymysql.connect(**address(url)))
