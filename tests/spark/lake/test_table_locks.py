"""A settle or a stream's ack that waits for a table lock is exported, then purged, whenever its statement began."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, Message, Reject
from tests.races.test_late_commit import caller
from tests.rooms.streams.driver import Driver
from tests.spark.lake.here import export
from tests.spark.lake.readers import by_duckdb
from tests.spark.lake.test_export import archived, ids, lake_rows
from tests.triggers import execute
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("soon")

WAITING = {
    "postgresql": "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
    "mysql": "SELECT 1 FROM information_schema.processlist WHERE db = database() AND id <> connection_id() "
    "AND (state LIKE 'Waiting for%lock%')",
}
LOCKS = {
    "mysql": [
        "LOCK TABLES millpond_archive READ",
        "LOCK TABLES millpond_message READ",
        "LOCK TABLES millpond_message WRITE",
        "LOCK TABLES millpond_archive READ, millpond_message WRITE, millpond_stream_message WRITE",
        "FLUSH TABLES millpond_message, millpond_archive WITH READ LOCK",
    ],
    "postgresql": [
        "LOCK TABLE millpond_archive IN SHARE MODE",
        "LOCK TABLE millpond_message IN ACCESS EXCLUSIVE MODE",
        "LOCK TABLE millpond_archive IN ACCESS EXCLUSIVE MODE",
    ],
}
Write = Callable[[Any], Awaitable[Any]]
"""Publishes, claims, and returns a call that archives the claimed messages."""


async def ack(store: Any) -> Any:
    claims = await claimed(store)
    return lambda: store.settle([Ack(claim.receipt) for claim in claims])


async def reject(store: Any) -> Any:
    """Each with its own reason: another statement writes them."""
    claims = await claimed(store)
    return lambda: store.settle([Reject(claim.receipt, f"no {n}") for n, claim in enumerate(claims)])


async def ack_stream(store: Any) -> Any:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(5)])
    driver = await Driver(store).open()
    await driver.held(1)
    return lambda: driver.ack(1, unsettled="ack")


async def cancel(store: Any) -> Any:
    published = await store.publish([Message(queue="q", payload=b"x") for _ in range(5)])
    return lambda: store.operations.cancel([one.id for one in published])


async def fail_expired(store: Any) -> Any:
    """A stream's claim archives the expired messages that it meets."""
    await store.publish([Message(queue="q", payload=b"x", expires=0.001) for _ in range(5)])
    driver = await Driver(store).open()
    return lambda: driver.claim(1)


async def claimed(store: Any) -> list[Any]:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(5)])
    return list(await store.claim(["q"], limit=5, lease=600))


@contextlib.contextmanager
def locked(url: str, text: str) -> Iterator[None]:
    connection = caller(url)
    try:
        connection.cursor().execute(text)
        yield
    finally:
        connection.close()


WRITES: list[Write] = [ack, reject, ack_stream, cancel, fail_expired]
QUICK = [("mysql", LOCKS["mysql"][0], write) for write in WRITES] + [("postgresql", LOCKS["postgresql"][0], ack)]
CASES = [
    pytest.param(kind, text, write, marks=() if (kind, text, write) in QUICK else pytest.mark.slow)
    for kind, texts in LOCKS.items()
    for text in texts
    for write in WRITES
]


@pytest.mark.parametrize(("kind", "text", "write"), CASES)
def test_it_is_exported(kind: str, text: str, write: Write, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    shared = request.getfixturevalue("shared_postgres" if kind == "postgresql" else "shared_mariadb")
    shared.empty()
    url, path = shared.url, tmp_path / "lake"

    async def story() -> None:
        store: Any = await millpond.connect(url, call_timeout=600, busy_timeout=600)
        await asyncio.to_thread(export, path, url)
        # The export that runs meanwhile has something to commit, and so it moves on.
        await store.settle([Ack(claim.receipt) for claim in await claimed(store)])
        archive = await write(store)
        with locked(url, text):
            waiting = asyncio.create_task(archive())
            await until(lambda: execute(url, WAITING[kind]), "the statement to wait")
            if "EXCLUSIVE" in text:  # the export waits for this lock as well
                exporting = threading.Thread(target=export, args=(path, url))
                exporting.start()
                await asyncio.sleep(0.2)
            else:
                await asyncio.to_thread(export, path, url)
                exporting = None
        await waiting
        if exporting is not None:
            await asyncio.to_thread(exporting.join)
        await asyncio.to_thread(export, path, url)
        before = await asyncio.to_thread(archived, url)
        assert ids(lake_rows(path)) == by_duckdb(path) == before and len(before) == 10
        assert await store.operations.purge(older_than=0) == 10
        assert await asyncio.to_thread(archived, url) == [] and by_duckdb(path) == before
        await store.close()

    asyncio.run(story())
