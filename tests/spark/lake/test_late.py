"""A transaction that stalls between its timestamp and its commit is exported, on every database."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pymysql
import pytest

import millpond
from millpond import Ack, ManualClock, Message, State
from millpond.clock import as_datetime
from millpond.errors import StoreError
from millpond.seam.operations import Row
from millpond.transports.database.exports.exports import DatabaseExports
from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.operations.record import record_rows
from millpond.transports.database.postgres.dialect import PostgresDialect
from millpond.transports.database.runner import Mode
from millpond.transports.database.sql.statement import Query
from millpond.transports.url import Url
from tests.races.test_late_commit import caller
from tests.spark.lake.here import export, exporter
from tests.spark.lake.test_export import archived, in_lake
from tests.spark.ponds import fill

pytestmark = pytest.mark.slow_on_servers

WRITERS = 6
EXPORTS = 5


def connection_to(url: str) -> Any:
    """An application's connection, in a transaction."""
    if url.startswith("sqlite"):
        connection: Any = sqlite3.connect(Url(url).path.removeprefix("/"), isolation_level=None, timeout=60)
        connection.execute("BEGIN IMMEDIATE")
        return connection
    connection = caller(url)
    if url.startswith("mysql"):
        connection.begin()
    return connection


async def claimed(url: str, count: int) -> tuple[Any, list[Ack]]:
    store: Any = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x") for _ in range(count)])
    return store, [Ack(claim.receipt) for claim in await store.claim(["q"], limit=count, lease=600)]


@pytest.mark.parametrize("server", ["postgres", "mariadb"])
def test_a_stalled_transaction_is_waited_for(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Exports run meanwhile: rows archived before it appear at once, rows after it together with it."""
    shared = request.getfixturevalue(f"shared_{server}")
    shared.empty()
    url, path = shared.url, tmp_path / "lake"

    async def story() -> None:
        store, (first, stalled, later) = await claimed(url, 3)
        await store.settle([first])
        connection = connection_to(url)
        store.transactions.settle_sync([stalled], within=connection)
        await store.settle([later])
        done = await asyncio.to_thread(export, path, url)
        assert done.held == [0]
        assert in_lake(path) == [str(first.receipt.id)]
        connection.commit()
        connection.close()
        done = await asyncio.to_thread(export, path, url)
        assert (done.rows, done.held) == (2, [])
        assert in_lake(path) == await asyncio.to_thread(archived, url)
        await store.close()

    with _patience(0.3):
        asyncio.run(story())


def test_a_transaction_that_is_older_than_the_last_export(shared_postgres: Any, tmp_path: Path) -> None:
    """It settles after that export. The time before which the lake is complete stays; it never goes back."""
    shared_postgres.empty()
    url, path = shared_postgres.url, tmp_path / "lake"

    async def story() -> None:
        store, (first, stalled, later) = await claimed(url, 3)
        connection = connection_to(url)
        connection.execute("SELECT 1")
        await store.settle([first])
        before = await asyncio.to_thread(export, path, url)
        store.transactions.settle_sync([stalled], within=connection)
        await store.settle([later])
        done = await asyncio.to_thread(export, path, url)
        assert (done.rows, done.held, done.until_us) == (0, [0], before.until_us)
        assert (await store.exports.close_archive(before.until_us[0])).until_us == before.until_us[0]
        connection.commit()
        connection.close()
        assert (await asyncio.to_thread(export, path, url)).rows == 2
        assert in_lake(path) == await asyncio.to_thread(archived, url)
        await store.close()

    with _patience(0.3):
        asyncio.run(story())


def test_a_stalled_writer_of_sqlite_is_waited_for(sqlite_url: str, tmp_path: Path) -> None:
    """There is one writer at a time: the export waits for it."""
    path = tmp_path / "lake"

    async def story() -> None:
        store, (first, stalled) = await claimed(sqlite_url, 2)
        await store.settle([first])
        connection = connection_to(sqlite_url)
        store.transactions.settle_sync([stalled], within=connection)
        began = threading.Event()

        def export_meanwhile() -> Any:
            one = exporter(path, sqlite_url)
            began.set()
            try:
                return one.export()
            finally:
                one.close()

        running = asyncio.create_task(asyncio.to_thread(export_meanwhile))
        await asyncio.to_thread(began.wait)
        done, _ = await asyncio.wait([running], timeout=0.5)
        assert not done
        connection.execute("COMMIT")
        connection.close()
        assert (await running).rows == 2
        assert in_lake(path) == await asyncio.to_thread(archived, sqlite_url)
        await store.close()

    asyncio.run(story())


def test_rolled_back_after_all(url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"

    async def story() -> None:
        store, (first, stalled) = await claimed(url, 2)
        connection = connection_to(url)
        store.transactions.settle_sync([stalled], within=connection)
        connection.rollback()
        connection.close()
        await store.settle([first])
        await asyncio.to_thread(export, path, url)
        await store.settle([stalled])
        await asyncio.to_thread(export, path, url)
        assert in_lake(path) == await asyncio.to_thread(archived, url)
        await store.close()

    with _patience(0.3):
        asyncio.run(story())


def test_what_a_broker_settled_is_waited_for(url: str, tmp_path: Path) -> None:
    """One statement reads the time, and another one writes the row."""
    path = tmp_path / "lake"
    stalled, go = threading.Event(), threading.Event()

    def stalling(steps: Any) -> Any:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                return end.value
            if not isinstance(step, Query):
                stalled.set()
                go.wait(4)
            answer = yield step

    async def record() -> None:
        store: Any = await millpond.connect(url)
        row = Row(
            id=uuid4(),
            queue="q",
            key=None,
            priority=50,
            state=State.COMPLETED,
            headers={},
            payload=b"x",
            deliveries=1,
            attempts=1,
            due_us=0,
            created_us=0,
        )

        def steps(again: bool) -> Any:
            return stalling(record_rows(store.dialect, [row], now=None, dedupe_for=1))

        assert await store.runner.run(steps, Mode.WRITE) == 1
        await store.close()

    recorder = threading.Thread(target=lambda: asyncio.run(record()))
    recorder.start()
    assert stalled.wait(30)
    exporting = threading.Thread(target=export, args=(path, url))
    with _patience(0.3):
        exporting.start()
        exporting.join(0.3)
        go.set()
        for thread in (recorder, exporting):
            thread.join()
        export(path, url)
    assert in_lake(path) == archived(url) != []


def test_a_clock_that_was_set_back_is_told(url: str, tmp_path: Path) -> None:
    async def story() -> None:
        store: Any = await millpond.connect(url)
        closed = await store.exports.close_archive(None)
        await store.close()
        store = await millpond.connect(url, clock=ManualClock(as_datetime(closed.until_us) - timedelta(seconds=5)))
        with pytest.raises(StoreError, match="set back"):
            await store.exports.close_archive(closed.until_us)
        await store.close()

    with _patience(0.3):
        asyncio.run(story())


def test_a_failover_to_a_clock_that_is_behind_loses_nothing(url: str, tmp_path: Path) -> None:
    """The other server continues at a time that has passed on the first one. An export leaves a margin for this."""
    path = tmp_path / "lake"
    clock = ManualClock(datetime.now(UTC) - timedelta(hours=1))

    async def settle(at: ManualClock) -> None:
        store: Any = await millpond.connect(url, clock=at)
        await store.publish([Message(queue="q", payload=b"x")])
        await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"])])
        await store.close()

    asyncio.run(settle(clock))
    with _patience(0.3):
        done = export(path, url, clock=clock, margin=60)
        assert (done.rows, in_lake(path)) == (0, []), "younger than the margin"
        clock.advance(120)
        asyncio.run(settle(clock))
        assert export(path, url, clock=clock, margin=60).rows == 1
        asyncio.run(settle(ManualClock(as_datetime(clock.now()) - timedelta(seconds=50))))
        clock.advance(120)
        assert export(path, url, clock=clock, margin=60).rows == 2
    assert in_lake(path) == archived(url)


def test_an_export_with_a_longer_margin_than_the_last_one(url: str, tmp_path: Path) -> None:
    fill(url, ["orders"])
    with _patience(0.3):
        first = export(tmp_path / "lake", url, margin=0)
        assert export(tmp_path / "lake", url, margin=3600).until_us == first.until_us


def test_many_writers_that_commit_in_any_order(url: str, tmp_path: Path) -> None:
    """A mark on the greatest id or time seen by an export would miss a quarter of the rows permanently."""
    path = tmp_path / "lake"
    stop = threading.Event()

    def write(seed: int) -> None:
        luck = random.Random(seed)

        async def go() -> None:
            store: Any = await millpond.connect(url)
            while not stop.is_set():
                await store.publish([Message(queue=f"q{seed % 3}", payload=b"x") for _ in range(10)])
                claims = await store.claim([f"q{seed % 3}"], limit=10, lease=600)
                connection = connection_to(url)
                with contextlib.closing(connection):
                    try:
                        store.transactions.settle_sync([Ack(claim.receipt) for claim in claims], within=connection)
                    except pymysql.err.OperationalError:  # a deadlock; the lease brings them back
                        continue
                    # SQLite has one writer: a stalled one blocks all others.
                    stop.wait(luck.random() * (0.01 if url.startswith("sqlite") else 0.3))
                    connection.rollback() if luck.random() < 0.1 else connection.commit()
            await store.close()

        asyncio.run(go())

    writers = [threading.Thread(target=write, args=(n,)) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    one = exporter(path, url)
    with _patience(0.3, grace=0.1):
        meanwhile: list[int] = []
        while sum(rows > 0 for rows in meanwhile) < EXPORTS:
            meanwhile.append(one.export().rows)
        stop.set()
        for writer in writers:
            writer.join()
        one.export()
    one.close()
    assert in_lake(path) == archived(url)


@contextlib.contextmanager
def _patience(seconds: float, grace: float = 0.0) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseExports, "patience", seconds)
        patch.setattr(MysqlDialect, "grace", grace)
        patch.setattr(PostgresDialect, "grace", grace)
        yield
