"""A periodic message that cannot be published, or is locked, delays no other one and keeps no worker busy."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pymysql
import pytest

import millpond
from millpond import Ack, ManualClock
from millpond.schedule import Periodic, Times, times_of
from millpond.transports.database import periodic
from tests.rooms.transactions.callers import address, path
from tests.triggers import execute, failing

QUEUES = ["a", "b", "c", "d"]


async def declare(store: Any) -> None:
    await store.periodic.declare([Periodic(name=queue, queue=queue, schedule="0 * * * *") for queue in QUEUES])


async def published(store: Any) -> list[str]:
    claims = await store.claim(QUEUES, 100)
    await store.settle([Ack(claim.receipt) for claim in claims])
    return sorted(claim.message.queue for claim in claims)


async def test_a_message_that_the_database_refuses(
    url: str, store: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(store)
    with failing(url, "INSERT", "millpond_message", "ROW.queue IN ('b', 'd')"):
        for _ in range(3):
            clock.advance(timedelta(hours=1))
            assert await store.periodic.publish_due() == 3600
            assert await published(store) == ["a", "c"]
        assert await store.periodic.publish_due() == 3600
    assert caplog.text.count("'b' is not published") == caplog.text.count("'d' is not published") == 1
    assert await store.periodic.publish_due() == 3600
    assert await published(store) == ["b", "d"]  # once for the times that were missed


@pytest.mark.parametrize("change", ["priority = 1000", "queue = ''", "missed = 'never'"])
async def test_a_value_that_no_program_can_declare(
    change: str, url: str, store: Any, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(store)
    execute(url, f"UPDATE millpond_periodic SET {change} WHERE name = 'b'")
    clock.advance(timedelta(hours=1))
    assert await store.periodic.publish_due() == 3600
    assert await published(store) == ["a", "c", "d"]
    assert caplog.text.count("'b' is not published") == 1


async def test_an_error_that_concerns_all_is_raised(url: str, store: Any, clock: ManualClock) -> None:
    await declare(store)
    execute(url, "ALTER TABLE millpond_message RENAME TO elsewhere")
    clock.advance(timedelta(hours=1))
    try:
        with pytest.raises(Exception, match="millpond migrate"):
            await store.periodic.publish_due()
    finally:
        execute(url, "ALTER TABLE elsewhere RENAME TO millpond_message")
    assert await store.periodic.publish_due() == 3600
    assert await published(store) == QUEUES


async def test_locked_rows_are_waited_for(url: str, store: Any, clock: ManualClock) -> None:
    if url.startswith("sqlite"):
        pytest.skip("SQLite locks no rows")
    await declare(store)
    clock.advance(timedelta(hours=1))
    with locked(url, "SELECT name FROM millpond_periodic FOR UPDATE"):
        assert await store.periodic.publish_due() == 1
    assert await store.periodic.publish_due() == 3600


@contextlib.contextmanager
def locked(url: str, text: str) -> Iterator[None]:
    connection: Any = psycopg.connect(url) if url.startswith("postgres") else pymysql.connect(**address(url))
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(text)
        yield
        connection.rollback()  # a close alone does not wait until the server has ended the transaction


async def test_schedules_are_computed_while_others_write(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first call of a process, which finds out whether the clock was set back. SQLite has one writer."""
    store: Any = await millpond.connect(sqlite_url)
    await declare(store)
    written = []

    def slow(schedule: str, timezone: str) -> Times:
        with contextlib.closing(sqlite3.connect(path(sqlite_url), timeout=0)) as other:
            written.append(other.execute("BEGIN IMMEDIATE"))
        return times_of(schedule, timezone)

    monkeypatch.setattr(periodic, "times_of", slow)
    assert await store.periodic.publish_due() is not None
    assert len(written) == len(QUEUES)
    await store.close()
