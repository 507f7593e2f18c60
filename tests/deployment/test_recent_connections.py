"""Connections that PostgreSQL's engine keeps at hand between two calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import millpond
from millpond import Message
from millpond.transports.database.postgres.recent_connections import _PREPARE_AT, _is_open
from millpond.transports.database.sql.statement import Query, Statement, Steps
from tests.shared import empty_database
from tests.triggers import execute
from tests.waiting import until

SLEEPS = "SELECT pg_sleep(600)"


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, "postgres")


@pytest.fixture
async def store(url: str) -> AsyncIterator[Any]:
    store: Any = await millpond.connect(url, pool_size=2, notify=False)
    yield store
    await store.close()


def steps(text: str) -> Any:
    def run() -> Steps[Any]:
        return (yield Query(Statement(text), {}))[0][0]

    return run


async def session(store: Any) -> int:
    """The process of the server behind the connection of a call."""
    return int(await store.runner.read(steps("SELECT pg_backend_pid()")))


def free(store: Any) -> int:
    return len(store.runner.engine._recent_connections._free)


async def test_the_next_call_has_the_same_connection(store: Any) -> None:
    assert len({await session(store) for _ in range(5)}) == 1
    assert free(store) == 1


async def test_many_callers_share_a_small_pool(store: Any) -> None:
    await asyncio.gather(*[store.publish([Message(queue="q", payload=b"")]) for _ in range(200)])
    assert len(await store.claim(["q"], limit=1000)) == 200


async def test_a_waiting_caller_gets_the_next_free_connection(store: Any) -> None:
    """Although others call again and again."""
    stop = False

    async def busy() -> None:
        while not stop:
            await session(store)

    others = [asyncio.create_task(busy()) for _ in range(4)]
    async with asyncio.timeout(60):
        for _ in range(20):
            await session(store)
    stop = True
    await asyncio.gather(*others)


async def test_an_unused_connection_goes_back_to_the_pool(store: Any) -> None:
    await session(store)
    assert store.runner.engine._pool.get_idle_size() == 0
    await until(lambda: store.runner.engine._pool.get_idle_size() == 1, "the pool to have it back")
    assert free(store) == 0
    assert store.runner.engine._recent_connections._timer is None or await until(
        lambda: store.runner.engine._recent_connections._timer is None, "the timer to end"
    )


async def test_a_connection_that_the_server_ended_is_not_used(store: Any) -> None:
    pid = await session(store)
    execute(store.url.raw, f"SELECT pg_terminate_backend({pid})")
    (kept,) = store.runner.engine._recent_connections._free
    await until(lambda: not _is_open(kept), "the connection to be closed")
    calls = []

    def counted() -> Steps[int]:
        calls.append(1)
        return (yield Query(Statement("SELECT pg_backend_pid()"), {}))[0][0]

    assert await store.runner.read(counted) != pid
    assert len(calls) == 1, "no try was lost"


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_the_connection_of_a_call_that_did_not_end_well_is_not_kept(store: Any, how: str) -> None:
    if how == "cancelled":
        call = asyncio.create_task(store.runner.read(steps(SLEEPS)))
        await until(
            lambda: execute(store.url.raw, f"SELECT 1 FROM pg_stat_activity WHERE query = '{SLEEPS}'"), "the call"
        )
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        with pytest.raises(millpond.errors.StoreError):
            await store.runner.read(steps("SELECT 1 / 0"))
    assert free(store) == 0
    assert await session(store)


async def test_statements_that_are_kept_do_not_add_up_in_the_server(store: Any) -> None:
    """One in the driver's cache, one that is in use, and perhaps one that the driver is about to close."""
    recent = store.runner.engine._recent_connections
    text = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'INSERT INTO %'"
    counts = set()
    for _ in range(6):
        for _ in range(2 * _PREPARE_AT):
            await store.publish([Message(queue="q", payload=b"")])
        counts.add(int(await store.runner.read(steps(text))))
        recent._release_idle()
        recent._release_idle()
        await asyncio.gather(*recent._releasing)
    assert counts == {2}


async def test_closing_ends_kept_connections(store: Any) -> None:
    pid = await session(store)
    async with asyncio.timeout(30):
        await store.close()
    await until(lambda: not execute(store.url.raw, f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}"), "its end")
