"""A store on the caller's pool or engine: it works, leaves sessions as they were, and closes none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncmy
import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

import millpond
from millpond import Message, State
from millpond.errors import AuthenticationFailed, InvalidOption, StoreBusy, Unreachable
from millpond.transports.database.sql.statement import Query, Statement
from tests.deployment.work import everything, everything_at_once
from tests.rooms.transactions.callers import address, sqlalchemy_url
from tests.waiting import until

pytestmark = pytest.mark.slow

# asyncpg switches jit off and on again.
PG_SETTINGS = "SELECT name, setting FROM pg_settings WHERE (source = 'session' OR name ~ 'isolation') AND name <> 'jit'"
MYSQL_SETTINGS = "SELECT @@session.tx_isolation, @@session.innodb_lock_wait_timeout, @@session.sql_mode, @@autocommit"
LEVEL = "SELECT trx_isolation_level FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = connection_id()"


KINDS = ["asyncpg", "sqlalchemy-asyncpg", "sqlalchemy-psycopg", "asyncmy", "sqlalchemy-asyncmy"]


@asynccontextmanager
async def own_pool(kind: str, postgres_url: str, mariadb_url: str, size: int) -> AsyncIterator[tuple[str, Any]]:
    """The scheme for `connect`, and a pool of at most `size` connections."""
    url = mariadb_url if kind.endswith("asyncmy") else postgres_url
    scheme = f"{urlsplit(url).scheme}://"
    if kind == "asyncpg":
        async with asyncpg.create_pool(url, min_size=1, max_size=size) as pool:
            yield scheme, pool
    elif kind == "asyncmy":
        async with asyncmy.create_pool(**address(url), minsize=1, maxsize=size) as pool:
            yield scheme, pool
    else:
        driver = kind.partition("-")[2]
        engine = create_async_engine(sqlalchemy_url(url, driver), pool_size=size, max_overflow=0)
        yield scheme, engine
        await engine.dispose()


def connection_of(pool: Any) -> Any:
    return pool.connect() if hasattr(pool, "connect") else pool.acquire()


async def test_asyncpg_pool(postgres_url: str) -> None:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=3) as pool:
        before = await pool.fetch(PG_SETTINGS)
        store = await millpond.connect("postgresql://", pool=pool, migrate=True)
        await everything_at_once(store, 8)
        await store.close()
        assert await pool.fetch(PG_SETTINGS) == before
        for connection in pool._holders:
            assert connection._con is None or not connection._con.is_in_transaction()


@pytest.mark.parametrize("autocommit", [True, False])
async def test_asyncmy_pool(mariadb_url: str, autocommit: bool) -> None:
    async with asyncmy.create_pool(**address(mariadb_url), minsize=1, maxsize=3, autocommit=autocommit) as pool:
        before = await ask(pool, MYSQL_SETTINGS)
        store = await millpond.connect("mysql://", pool=pool, migrate=True)
        await everything_at_once(store, 8)
        await store.close()
        connections = [await pool.acquire() for _ in range(3)]
        for connection in connections:
            assert await asked(connection, MYSQL_SETTINGS) == before
            await connection.rollback()
            pool.release(connection)


async def test_asyncmy_transactions_are_at_read_committed(mariadb_url: str) -> None:
    """A REPEATABLE READ transaction would hold gap locks, for which other publishers would wait."""
    async with asyncmy.create_pool(**address(mariadb_url), minsize=1, maxsize=2) as pool:
        assert (await ask(pool, "SELECT @@tx_isolation"))[0][0] == "REPEATABLE-READ"
        store = await millpond.connect("mysql://", pool=pool, migrate=True)

        def steps() -> Any:
            yield Query(Statement("INSERT INTO millpond_queue (name) VALUES ('x')"), {})
            return (yield Query(Statement(LEVEL), {}))

        assert list(await store.runner.engine.run(steps)) == [("READ COMMITTED",)]  # type: ignore[attr-defined]
        await store.close()


async def ask(pool: Any, text: str) -> Any:
    async with pool.acquire() as connection:
        answer = await asked(connection, text)
        await connection.rollback()
        return answer


async def asked(connection: Any, text: str) -> Any:
    async with connection.cursor() as cursor:
        await cursor.execute(text)
        return await cursor.fetchall()


@pytest.mark.parametrize(
    ("database", "driver", "level"),
    [
        ("postgres", "asyncpg", None),
        ("postgres", "asyncpg", "SERIALIZABLE"),
        ("postgres", "psycopg", None),
        ("postgres", "psycopg", "AUTOCOMMIT"),
        ("mariadb", "asyncmy", None),
        ("mariadb", "asyncmy", "AUTOCOMMIT"),
    ],
)
async def test_sqlalchemy_engine(database: str, driver: str, level: str | None, request: pytest.FixtureRequest) -> None:
    url = sqlalchemy_url(request.getfixturevalue(f"{database}_url"), driver)
    engine = create_async_engine(url, pool_size=3, max_overflow=0, **({"isolation_level": level} if level else {}))
    settings = sqlalchemy.text(PG_SETTINGS if database == "postgres" else MYSQL_SETTINGS)
    async with engine.connect() as connection:
        before = (await connection.execute(settings)).fetchall()
    scheme = "postgresql" if database == "postgres" else "mariadb"
    store = await millpond.connect(f"{scheme}://", pool=engine, migrate=True)
    await everything_at_once(store, 8)
    await store.close()
    async with engine.connect() as connection:
        assert (await connection.execute(settings)).fetchall() == before
    await engine.dispose()


async def test_a_schema_and_a_prefix(postgres_url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(postgres_url, "psycopg"))
    store = await millpond.connect("postgresql://", pool=engine, schema="Jobs", table_prefix="mp_", migrate=True)
    await everything(store, "q")
    await store.close()
    async with engine.connect() as connection:
        found = await connection.execute(sqlalchemy.text('SELECT count(*) FROM "Jobs".mp_archive'))
        assert found.scalar() == 64
    await engine.dispose()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lost_connection_is_replaced(
    kind: str, postgres_url: str, mariadb_url: str, postgres_proxy: Any, mariadb_proxy: Any
) -> None:
    proxy = mariadb_proxy if kind.endswith("asyncmy") else postgres_proxy
    url = proxy.url(mariadb_url if kind.endswith("asyncmy") else postgres_url)
    pool: Any
    if kind == "asyncpg":
        pool = await asyncpg.create_pool(url, min_size=2, max_size=2)
    elif kind == "asyncmy":
        pool = await asyncmy.create_pool(**address(url), minsize=2, maxsize=2)
    else:
        pool = create_async_engine(sqlalchemy_url(url, kind.partition("-")[2]), pool_size=2)
    store = await millpond.connect(f"{urlsplit(url).scheme}://", pool=pool, migrate=True, call_timeout=2)
    await everything(store, "before")
    proxy.cut()
    await everything(store, "after")
    await store.close()
    if kind == "asyncpg":
        await pool.close()
    elif kind == "asyncmy":
        pool.close()
        await pool.wait_closed()
    else:
        await pool.dispose()


async def test_errors_of_an_engine_have_their_meaning(postgres_url: str, mariadb_url: str) -> None:
    for url, driver in ((postgres_url, "asyncpg"), (postgres_url, "psycopg"), (mariadb_url, "asyncmy")):
        parts = urlsplit(url)
        scheme = f"{parts.scheme}://"
        wrong = create_async_engine(sqlalchemy_url(url.replace(parts.password or "", "wrong"), driver))
        with pytest.raises(AuthenticationFailed):
            await millpond.connect(scheme, pool=wrong)
        await wrong.dispose()
        nowhere = create_async_engine(sqlalchemy_url(url.replace(str(parts.port), "1"), driver))
        with pytest.raises(Unreachable):
            await millpond.connect(scheme, pool=nowhere)
        await nowhere.dispose()


async def test_an_exhausted_engine_is_busy(postgres_url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(postgres_url, "asyncpg"), pool_size=2, max_overflow=0, pool_timeout=0.2)
    store = await millpond.connect("postgresql://", pool=engine, migrate=True)
    async with engine.connect(), engine.connect():
        with pytest.raises(StoreBusy, match="pool"):
            await store.publish([Message(queue="q", payload=b"")])
    await store.publish([Message(queue="q", payload=b"")])
    await store.close()
    await engine.dispose()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exhausted_pool_is_busy_after_a_bounded_wait(kind: str, postgres_url: str, mariadb_url: str) -> None:
    async with own_pool(kind, postgres_url, mariadb_url, 2) as (scheme, pool):
        store = await millpond.connect(scheme, pool=pool, migrate=True, busy_timeout=0.5)
        async with connection_of(pool), connection_of(pool), asyncio.timeout(60):
            with pytest.raises(StoreBusy, match=r"no connection of your pool came free within 0\.5 s"):
                await store.publish([Message(queue="q", payload=b"")])
        await store.publish([Message(queue="q", payload=b"")])
        await store.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pool_below_two_is_refused(kind: str, postgres_url: str, mariadb_url: str) -> None:
    async with own_pool(kind, postgres_url, mariadb_url, 1) as (scheme, pool):
        with pytest.raises(InvalidOption, match="pool has at most 1 connection"):
            await millpond.connect(scheme, pool=pool, migrate=True)


async def test_a_pool_without_a_limit_is_accepted(postgres_url: str, mariadb_url: str) -> None:
    for url, driver in ((postgres_url, "psycopg"), (mariadb_url, "asyncmy")):
        engine = create_async_engine(sqlalchemy_url(url, driver), poolclass=sqlalchemy.NullPool)
        store = await millpond.connect(f"{urlsplit(url).scheme}://", pool=engine, migrate=True)
        await everything(store, "q")
        await store.close()
        await engine.dispose()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
async def test_handlers_that_hold_the_pool_while_they_ack(
    kind: str, size: int, postgres_url: str, mariadb_url: str
) -> None:
    """The worker's own session settles: otherwise each handler would wait for a connection that another one holds."""
    async with own_pool(kind, postgres_url, mariadb_url, size) as (scheme, pool):
        pond = millpond.Millpond(scheme, pool=pool, migrate=True)

        @pond.subscriber("q", max_workers=8)
        async def handle(body: int, delivery: millpond.Delivery) -> None:
            async with connection_of(pool):
                await delivery.ack()

        await pond.publish_many("q", range(40))
        run = asyncio.create_task(pond.run(signals=False))

        async def all_done() -> bool:
            (stats,) = await (await pond.transport).operations.count(["q"])
            return bool(stats.counts[State.COMPLETED] == 40)

        await until(all_done, within=60)
        pond.stop()
        await run
        await pond.close()


async def test_a_presence_ends_with_its_session(postgres_url: str) -> None:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2) as pool:
        store = await millpond.connect("postgresql://", pool=pool, migrate=True)
        presence = await store.workers.join("me")  # type: ignore[attr-defined]
        assert await presence.beat()
        locks = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        assert await pool.fetchval(locks) == 1
        await presence.leave()
        async with asyncio.timeout(60):
            while await pool.fetchval(locks):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await store.close()


async def test_what_is_no_pool(postgres_url: str, mariadb_url: str, sqlite_url: str) -> None:
    with pytest.raises(InvalidOption, match=r"pool must be an asyncpg pool or .*, not builtins\.object"):
        await millpond.connect(postgres_url, pool=object())
    with pytest.raises(InvalidOption, match=r"pool must be an asyncmy pool or .*, not builtins\.str"):
        await millpond.connect(mariadb_url, pool="x")
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(InvalidOption, match="pool must be an asyncpg pool"):
        await millpond.connect(postgres_url, pool=engine)
    with pytest.raises(InvalidOption, match="means nothing to SQLite"):
        await millpond.connect(sqlite_url, pool=engine)
    await engine.dispose()
