"""The timeout of statements that repeat on one connection of PostgreSQL."""

import asyncio
from typing import Any

import pytest

from millpond.transports.database.postgres.recent_connections import _PREPARE_AT, RecentConnection
from millpond.transports.database.sql.statement import Query, Statement

INSERT = Query(Statement("INSERT INTO t VALUES (:value)"), {"value": 1})


class Pooled:
    """A connection of asyncpg's pool, and its prepared statement. It answers at once unless it `hangs`."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.hangs = False
        self.waits = asyncio.Event()

    async def prepare(self, text: str) -> "Pooled":
        self.prepared.append(text.strip())
        return self

    async def fetch(self, *values: Any, timeout: object = None) -> list[Any]:
        if self.hangs:
            self.waits.set()
            await asyncio.Event().wait()
        return []


async def warm(timeout: float) -> tuple[Pooled, RecentConnection]:
    pooled = Pooled()
    connection = RecentConnection(pooled, timeout)
    for _ in range(_PREPARE_AT):
        await connection.run_alone(INSERT)
    pooled.hangs = True
    return pooled, connection


async def test_a_statement_that_repeats_is_prepared_once() -> None:
    pooled, connection = await warm(60)
    pooled.hangs = False
    await connection.run_alone(INSERT)
    assert pooled.prepared == ["INSERT INTO t VALUES ($1)"]
    connection.end()


async def test_a_timeout_leaves_no_cancellation_behind() -> None:
    _, connection = await warm(0.05)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await connection.run_alone(INSERT)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    connection.end()


async def test_the_time_counts_from_the_statement_on() -> None:
    """Not from the first one that set the timer."""
    pooled, connection = await warm(0.5)
    pooled.hangs = False
    began = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began + 0.3:
        await connection.run_alone(INSERT)
        await asyncio.sleep(0)
    pooled.hangs = True
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await connection.run_alone(INSERT)
    assert asyncio.get_running_loop().time() - began >= 0.49
    connection.end()


async def test_a_cancellation_is_no_timeout() -> None:
    pooled, connection = await warm(60)
    call = asyncio.create_task(connection.run_alone(INSERT))
    await pooled.waits.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    connection.end()


@pytest.mark.parametrize("first", ["timeout", "cancellation"])
async def test_a_cancellation_at_the_time_of_the_timeout_is_kept(first: str) -> None:
    pooled, connection = await warm(60)
    call = asyncio.create_task(connection.run_alone(INSERT))
    await pooled.waits.wait()
    connection._began -= 61
    if first == "timeout":
        connection._look()
    call.cancel()
    if first == "cancellation":
        connection._look()
    with pytest.raises(asyncio.CancelledError):
        await call
    connection.end()


async def test_no_timer_is_left_behind() -> None:
    _, connection = await warm(60)
    timer = connection._timer
    assert timer is not None
    connection.end()
    assert timer.cancelled()
