"""Few connections for many calls; no call waits for ever."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

import millpond
from millpond import Message, StoreUnavailable
from millpond.errors import StoreError
from millpond.transports.database.mysql import reader
from millpond.transports.url import Url
from servers import Proxy
from tests.deployment.work import everything_at_once
from tests.rooms.transactions.callers import address, sqlalchemy_url
from tests.triggers import execute
from tests.waiting import until

CALL_TIMEOUT = 1.0
"""Short, but longer than a call takes on a busy machine."""


@pytest.fixture(params=["postgres", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    fixture: str = request.getfixturevalue(f"{request.param}_url")
    return fixture


@pytest.fixture
def proxy(url: str, request: pytest.FixtureRequest) -> Proxy:
    fixture: Proxy = request.getfixturevalue(f"{'postgres' if url.startswith('postgres') else 'mariadb'}_proxy")
    return fixture


def connections(url: str) -> int:
    """Number of sessions in the test's database, without those of this function and of PostgreSQL's own processes.

    A session of an earlier call may take a moment to end, and so it is known by its name, or by having no database.
    """
    if url.startswith("postgres"):
        with psycopg.connect(url, application_name="watch") as c:
            text = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND backend_type = 'client backend' AND application_name <> 'watch'"
            )
            return int(c.execute(text).fetchone()[0])  # type: ignore[index]
    database = address(url)["database"]
    with pymysql.connect(**address(url) | {"database": None}) as c, c.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM information_schema.processlist WHERE db = %s", (database,))
        return int(cursor.fetchone()[0])


async def test_more_calls_than_connections_wait(url: str) -> None:
    store = await millpond.connect(url, migrate=True, pool_size=2)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, await asyncio.to_thread(connections, url))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    await everything_at_once(store, 10)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert 1 <= most <= 2
    await store.close()
    async with asyncio.timeout(60):
        while connections(url):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_call_that_is_cancelled_costs_no_connection(url: str) -> None:
    store = await millpond.connect(url, migrate=True, pool_size=1)
    for delay in (0, 0.0005, 0.001, 0.002, 0.004):
        task = asyncio.create_task(store.publish([Message(queue="q", payload=b"x")]))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (await store.publish([Message(queue="q", payload=b"x")]))[0].new
    await store.close()


async def impatient(url: str, proxy: Proxy, **options: Any) -> Any:
    """A database that was migrated with the default timeouts."""
    await (await millpond.connect(url, migrate=True)).close()
    return await millpond.connect(proxy.url(url), call_timeout=CALL_TIMEOUT, **options)


async def test_a_black_hole_is_noticed(url: str, proxy: Proxy) -> None:
    store = await impatient(url, proxy, reconnect_timeout=1)
    proxy.black_hole()
    big = [Message(queue="q", payload=bytes(900_000)) for _ in range(20)]  # more than fits into any buffer
    calls: list[Any] = [
        store.publish([Message(queue="q", payload=b"x")]),
        store.publish(big),
        store.claim(["q"]),
        store.extend([millpond.Receipt(millpond.id_from("x"), 1)]),
        store.settle([millpond.Ack(millpond.Receipt(millpond.id_from("x"), 1))]),
    ]
    started = time.monotonic()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - started < 30
    assert [type(result) for result in results] == [StoreUnavailable] * 5
    assert all(result.retryable for result in results)
    proxy.resume()
    assert (await store.publish([Message(queue="after", payload=b"x")]))[0].new
    await store.close()


@pytest.mark.parametrize("before", [0, 20])
async def test_a_short_black_hole_is_only_a_delay(url: str, proxy: Proxy, before: int) -> None:
    """The store repeats the call, and the message is there once. Statements that were repeated have a timeout too."""
    store = await impatient(url, proxy, reconnect_timeout=60)
    for _ in range(before):
        await store.publish([Message(queue="before", payload=b"x")])
    proxy.black_hole()
    call = asyncio.create_task(store.publish([Message(queue="q", payload=b"x")]))
    await asyncio.sleep(2.2 * CALL_TIMEOUT)
    assert not call.done()
    proxy.resume()
    assert (await call)[0].new
    assert len(await store.claim(["q"], limit=10)) == 1
    await store.close()


async def test_a_black_hole_on_the_callers_own_engine(postgres_url: str, postgres_proxy: Proxy) -> None:
    engine = create_async_engine(sqlalchemy_url(postgres_proxy.url(postgres_url), "asyncpg"))
    await (await millpond.connect(postgres_url, migrate=True)).close()
    store = await millpond.connect("postgresql://", pool=engine, call_timeout=CALL_TIMEOUT, reconnect_timeout=1)
    postgres_proxy.black_hole()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.claim(["q"])
    assert time.monotonic() - started < 30
    postgres_proxy.resume()
    await store.claim(["q"])
    await store.close()
    await engine.dispose()


async def test_a_cancelled_close_leaves_no_connection(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()
    for steps in range(0, 24, 2):
        store = await millpond.connect(url)
        await store.workers.join()
        await store.publish([Message(queue="q", payload=b"1")])
        await store.wait(["q"], 0)  # from now on PostgreSQL has a listener
        closing = asyncio.create_task(store.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await store.close()
    await until(lambda: connections(url) == 0, "the end of all sessions")


async def test_a_close_that_is_cancelled_while_a_publish_waits_ends_listener_and_worker(url: str) -> None:
    store = await millpond.connect(url, migrate=True)
    await store.workers.join()
    await store.publish([Message(queue="q", payload=b"1")])
    await store.wait(["q"], 0)  # from now on PostgreSQL has a listener
    with locked_messages(url):
        publishing = asyncio.create_task(store.publish([Message(queue="q", payload=b"2")]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
    await asyncio.wait([closing, publishing])
    await until(lambda: connections(url) == 0, "the end of all sessions")
    assert execute(url, "SELECT count(*) FROM millpond_worker") == [(0,)]


@contextmanager
def locked_messages(url: str) -> Iterator[None]:
    """No other session writes messages meanwhile."""
    if url.startswith("postgres"):
        with psycopg.connect(url) as c:
            c.execute("LOCK TABLE millpond_message IN EXCLUSIVE MODE")
            yield
    else:
        with pymysql.connect(**address(url)) as my, my.cursor() as cursor:
            cursor.execute("LOCK TABLES millpond_message WRITE")
            yield


def test_a_reader_whose_session_cannot_be_set_leaves_no_connection(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    class Refusing:
        """A connection whose server refuses the next statement."""

        async def query(self, text: str) -> None:
            await opened[0].query("no SQL")

        def close(self) -> None:
            opened[0].close()

    def make_connector(*args: Any) -> Any:
        async def connect() -> Refusing:
            opened.append(await reader_connector(*args)())
            return Refusing()

        return connect

    reader_connector = reader.make_connector
    monkeypatch.setattr(reader, "make_connector", make_connector)
    with pytest.raises(StoreError):
        reader.MysqlReader(Url(mariadb_url), None, "millpond_")
    asyncio.run(until(lambda: connections(mariadb_url) == 0, "the end of its session"))
