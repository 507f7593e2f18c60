"""Where a caller's transaction is not what it seems: autocommit, contention, isolation, wrong objects."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
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
from millpond import Ack, Message, Store
from millpond.errors import WrongConnection
from millpond.transports import detached
from tests.transactions.callers import address, django_on, path, sqlalchemy_url

MESSAGE = Message(queue="q", payload=b"x")
NO_TRANSACTION = "no transaction open"


@pytest.fixture
async def postgres(postgres_url: str) -> AsyncIterator[Store]:
    store = await millpond.connect(postgres_url, migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def mariadb(mariadb_url: str) -> AsyncIterator[Store]:
    store = await millpond.connect(mariadb_url, migrate=True)
    yield store
    await store.close()


@pytest.fixture
async def sqlite(sqlite_url: str) -> AsyncIterator[Store]:
    store = await millpond.connect(sqlite_url)
    yield store
    await store.close()


async def is_empty(store: Store) -> bool:
    return await store.claim(["q"]) == []


# --- without a transaction -----------------------------------------------------------------------------------


async def test_psycopg_in_autocommit_is_refused(postgres: Store, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as c:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            postgres.publish_sync([MESSAGE], within=c)
        assert await is_empty(postgres)
        with c.transaction():
            postgres.publish_sync([MESSAGE], within=c)
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as ac:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            await postgres.publish([MESSAGE], within=ac)
        async with ac.transaction():
            await postgres.publish([MESSAGE], within=ac)
    assert len(await postgres.claim(["q"], limit=10)) == 2


async def test_psycopg_in_a_pipeline(postgres: Store, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as c, c.pipeline():
        assert postgres.publish_sync([Message(queue="q", payload=b"x", id=uuid4())], within=c)[0].new
        c.commit()
    assert not await is_empty(postgres)


async def test_asyncpg_without_a_transaction_is_refused(postgres: Store, postgres_url: str) -> None:
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


async def test_mysql_in_autocommit_is_refused(mariadb: Store, mariadb_url: str) -> None:
    with closing(pymysql.connect(**address(mariadb_url), autocommit=True)) as c:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            mariadb.publish_sync([MESSAGE], within=c)
        assert await is_empty(mariadb)
        c.begin()
        mariadb.publish_sync([MESSAGE], within=c)
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


async def test_sqlite_in_autocommit_is_refused(sqlite: Store, sqlite_url: str) -> None:
    c = sqlite3.connect(path(sqlite_url), isolation_level=None)
    with closing(c), pytest.raises(WrongConnection, match=NO_TRANSACTION):
        sqlite.publish_sync([MESSAGE], within=c)
    async with aiosqlite.connect(path(sqlite_url), isolation_level=None) as ac:
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            await sqlite.publish([MESSAGE], within=ac)
    assert await is_empty(sqlite)


async def test_sqlalchemy_in_autocommit_is_refused(
    postgres: Store, postgres_url: str, mariadb: Store, mariadb_url: str, sqlite: Store, sqlite_url: str
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
                    store.publish_sync([MESSAGE], within=connection)
        always.dispose()
        sometimes.dispose()
        assert await is_empty(store)


async def test_async_sqlalchemy_in_autocommit_is_refused(postgres: Store, postgres_url: str) -> None:
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

        store = detached(sqlite_url)
        with pytest.raises(WrongConnection, match=NO_TRANSACTION):
            store.publish_sync([MESSAGE], within=connection)
        with transaction.atomic():
            store.publish_sync([MESSAGE], within=connections["default"])
    with closing(sqlite3.connect(path(sqlite_url))) as c:
        assert c.execute("SELECT count(*) FROM message").fetchone() == (1,)


async def _create(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()


# --- SQLite --------------------------------------------------------------------------------------------------


async def test_sqlite3_by_default_begins_with_our_first_statement(sqlite: Store, sqlite_url: str) -> None:
    """The module would begin before the first INSERT only; a settle reads before that and must hold what it read."""
    await sqlite.publish([MESSAGE])
    (claim,) = await sqlite.claim(["q"])
    with (
        closing(sqlite3.connect(path(sqlite_url))) as c,
        closing(sqlite3.connect(path(sqlite_url), timeout=0)) as other,
    ):
        assert sqlite.settle_sync([Ack(claim.receipt)], within=c) == []
        assert c.in_transaction
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite.settle_sync([Ack(claim.receipt)], within=other)
        c.commit()
        assert not c.in_transaction
    async with aiosqlite.connect(path(sqlite_url)) as ac:
        await sqlite.publish([MESSAGE], within=ac)
        assert ac.in_transaction


async def test_sqlite_deferred_transactions_get_the_drivers_own_error(sqlite: Store, sqlite_url: str) -> None:
    with (
        closing(sqlite3.connect(path(sqlite_url), isolation_level=None, timeout=0)) as deferred,
        closing(sqlite3.connect(path(sqlite_url), isolation_level=None, timeout=0)) as other,
    ):
        deferred.execute("BEGIN")
        deferred.execute("SELECT count(*) FROM message").fetchall()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            sqlite.publish_sync([MESSAGE], within=deferred)
        sqlite.publish_sync([MESSAGE], within=other)
        other.execute("COMMIT")
        # What it read is out of date now, so that it can never write: the reason for BEGIN IMMEDIATE.
        with pytest.raises(sqlite3.OperationalError, match="database is locked") as told:
            sqlite.publish_sync([MESSAGE], within=deferred)
        assert told.value.sqlite_errorname == "SQLITE_BUSY_SNAPSHOT"
        deferred.execute("ROLLBACK")
    assert len(await sqlite.claim(["q"], limit=10)) == 1


# --- servers: isolation and settings -------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_every_isolation_level(postgres: Store, postgres_url: str, level: str) -> None:
    engine = sqlalchemy.create_engine(sqlalchemy_url(postgres_url, "psycopg"), isolation_level=level)
    with engine.connect() as c:
        given = Message(queue="q", payload=b"x", id=uuid4())
        assert postgres.publish_sync([given, MESSAGE], within=c)[0].new
        assert not postgres.publish_sync([given], within=c)[0].new
        c.commit()
    claims = await postgres.claim(["q"], limit=10)
    with engine.connect() as c:
        assert postgres.settle_sync([Ack(claim.receipt) for claim in claims], within=c) == []
        c.commit()
    engine.dispose()
    assert await postgres.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_mysql_repeatable_read_with_an_old_snapshot(mariadb: Store, mariadb_url: str) -> None:
    """The caller's transaction looked before the message was claimed, and must not act on what it saw then."""
    id_ = uuid4()
    await mariadb.publish([MESSAGE])
    with closing(pymysql.connect(**address(mariadb_url))) as c, c.cursor() as cursor:
        cursor.execute("SELECT @@tx_isolation, count(*) FROM message")
        assert cursor.fetchall() == (("REPEATABLE-READ", 1),)
        (claim,) = await mariadb.claim(["q"])
        await mariadb.publish([Message(queue="q", payload=b"x", id=id_)])
        assert mariadb.settle_sync([Ack(claim.receipt)], within=c) == []
        assert not mariadb.publish_sync([Message(queue="q", payload=b"x", id=id_)], within=c)[0].new
        c.commit()
    assert await mariadb.settle([Ack(claim.receipt)]) == []
    assert len(await mariadb.claim(["q"], limit=10)) == 1


async def test_two_publishers_of_one_id_wait_for_each_other(postgres: Store, postgres_url: str) -> None:
    given = Message(queue="q", payload=b"x", id=uuid4())
    first, second = await asyncpg.connect(postgres_url), await asyncpg.connect(postgres_url)
    try:
        for outcome, new in (("ROLLBACK", True), ("COMMIT", False)):
            await first.execute("BEGIN")
            await second.execute("BEGIN")
            assert (await postgres.publish([given], within=first))[0].new
            waiting = asyncio.create_task(postgres.publish([given], within=second))
            async with asyncio.timeout(60):
                while not await first.fetchval("SELECT 1 FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await first.execute(outcome)
            assert (await waiting)[0].new is new
            assert await second.fetchval("SELECT 1") == 1  # not aborted
            await second.execute("ROLLBACK")
    finally:
        await first.close()
        await second.close()


async def test_the_session_is_left_as_it_was(postgres: Store, postgres_url: str) -> None:
    settings = "SELECT name, setting FROM pg_settings WHERE source = 'session' OR name LIKE 'transaction_isolation'"
    with psycopg.connect(postgres_url) as c:
        before = c.execute(settings).fetchall()
        postgres.publish_sync([MESSAGE, Message(queue="q", payload=b"", id=uuid4())], within=c)
        assert c.execute(settings).fetchall() == before
        assert c.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        c.rollback()


async def test_driver_errors_pass_unchanged(postgres: Store, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as c:
        with pytest.raises(psycopg.errors.DivisionByZero):
            c.execute("SELECT 1/0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            postgres.publish_sync([MESSAGE], within=c)
        c.rollback()
        c.execute("SET lock_timeout = 1; SET search_path = nowhere")
        with pytest.raises(psycopg.errors.UndefinedTable):
            postgres.publish_sync([MESSAGE], within=c)


# --- wrong objects -------------------------------------------------------------------------------------------


@pytest.fixture
def memory_connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as c:
        yield c


async def test_another_kind_of_database(postgres: Store, memory_connection: sqlite3.Connection) -> None:
    with pytest.raises(WrongConnection, match="a connection to sqlite, and the store is in postgresql"):
        postgres.publish_sync([MESSAGE], within=memory_connection)
    with pytest.raises(WrongConnection, match="a connection to sqlite, and the store is in postgresql"):
        await postgres.publish([MESSAGE], within=memory_connection)


@pytest.mark.parametrize("thing", [object(), "postgresql://", 7, asyncio], ids=["object", "url", "number", "module"])
async def test_no_connection_at_all(sqlite: Store, thing: object) -> None:
    for attempt in (sqlite.publish_sync, sqlite.publish):
        with pytest.raises(WrongConnection, match=r"within= takes .*psycopg.*Django's connection; not "):
            result = attempt([MESSAGE], within=thing)
            if asyncio.iscoroutine(result):
                await result


async def test_the_engine_instead_of_a_connection(sqlite: Store, sqlite_url: str) -> None:
    engine = sqlalchemy.create_engine(sqlite_url)
    with pytest.raises(WrongConnection, match=r"not sqlalchemy\.engine\.base\.Engine"):
        sqlite.publish_sync([MESSAGE], within=engine)
    engine.dispose()
