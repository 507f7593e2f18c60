"""A settle or a stream's ack that waits for a table lock is exported, then purged, whenever its statement began."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import millpond
from millpond import Ack, Message, Reject
from millpond.transports.database.exports import exports
from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.sql import writes
from servers import MariaDB
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


async def expire_by_sql(store: Any) -> Any:
    """A claim by SQL archives the expired messages that it meets."""
    await store.publish([Message(queue="q", payload=b"x", expires=0.001) for _ in range(5)])
    claim = (
        "CALL millpond_claim('q', 5, 30)"
        if store.url.raw.startswith("mysql")
        else "SELECT * FROM millpond_claim('q', 5)"
    )
    return lambda: asyncio.to_thread(execute, store.url.raw, claim)


async def ack_by_sql(store: Any) -> Any:
    receipts = [claim.receipt for claim in await claimed(store)]
    call = "CALL" if store.url.raw.startswith("mysql") else "SELECT"
    acks = [f"{call} millpond_ack('{receipt.id}', {receipt.token})" for receipt in receipts]
    return lambda: asyncio.to_thread(execute, store.url.raw, *acks)


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


WRITES: list[Write] = [ack, reject, ack_stream, cancel, fail_expired, ack_by_sql, expire_by_sql]
QUICK = [("mysql", LOCKS["mysql"][0], write) for write in WRITES] + [("postgresql", LOCKS["postgresql"][0], ack)]
SLOW = [("postgresql", LOCKS["postgresql"][0], write) for write in WRITES]
SLOW += [(kind, text, write) for kind, texts in LOCKS.items() for text in texts for write in (ack, ack_stream)]


def marks(*case: object) -> list[pytest.MarkDecorator]:
    """In `make slow` each write meets one lock, and each lock two writes; `make faults` has all pairs."""
    if case in QUICK:
        return []
    return [pytest.mark.slow] if case in SLOW else [pytest.mark.slow, pytest.mark.long]


CASES = [
    pytest.param(kind, text, write, marks=marks(kind, text, write))
    for kind, texts in LOCKS.items()
    for text in texts
    for write in WRITES
]
# A claim by SQL waits for a table before it comes to the archive.
CASES += [
    pytest.param("mysql", "LOCK TABLES millpond_queue WRITE", expire_by_sql, marks=pytest.mark.slow),
    ("postgresql", "LOCK TABLE millpond_queue IN ACCESS EXCLUSIVE MODE", expire_by_sql),
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


@pytest.mark.slow
def test_a_lock_of_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops a settle that has locked the archive and fixed its time. An export goes on together with the settle.

    A trigger delays the settle's first row. The settle ends within the grace that the export leaves it.
    """
    path = tmp_path / "lake"
    between, go_on, settled = (threading.Event() for _ in range(3))
    archive_locked = writes.archive_locked

    def later(*args: Any) -> Any:
        between.set()
        go_on.wait()
        return archive_locked(*args)

    async def sleep(seconds: float) -> None:
        if seconds:
            await asyncio.to_thread(settled.wait)

    async def settle_some() -> None:
        store: Any = await millpond.connect(url, call_timeout=600, busy_timeout=600)
        await store.settle([Ack(claim.receipt) for claim in await claimed(store)])
        await store.close()

    def settle() -> None:
        asyncio.run(settle_some())
        settled.set()

    with MariaDB() as server:
        url = server.create_database("locked")
        asyncio.run(migrated(url))
        asyncio.run(settle_some())
        export(path, url)
        asyncio.run(settle_some())
        execute(url, "CREATE TRIGGER slow BEFORE INSERT ON millpond_archive FOR EACH ROW DO sleep(0.2)")
        monkeypatch.setattr(writes, "archive_locked", later)
        monkeypatch.setattr(exports, "asyncio", SimpleNamespace(sleep=sleep))
        monkeypatch.setattr(MysqlDialect, "least_grace", 1.0)
        threads = [threading.Thread(target=settle), threading.Thread(target=export, args=(path, url))]
        threads[0].start()
        between.wait()
        with locked(url, "FLUSH TABLES WITH READ LOCK"):
            for number, thread in enumerate(threads, start=1):
                go_on.set()
                if number > 1:
                    thread.start()
                asyncio.run(until(lambda n=number: len(execute(url, WAITING["mysql"])) == n, f"{number} to wait"))
        for thread in threads:
            thread.join()
        export(path, url)
        assert ids(lake_rows(path)) == by_duckdb(path) == archived(url) and len(by_duckdb(path)) == 15


async def migrated(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()
