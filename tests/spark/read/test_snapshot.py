"""All slices of a read show one time: a settle committed during the read is seen completely or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import millpond
from millpond import Ack, Message
from millpond.errors import StoreError
from millpond.seam.arrow import Read, Slice
from millpond.spark.columns import batch_columns, spark_schema
from millpond.spark.read.batch import BatchReader
from millpond.transports import open_reader
from tests.spark.ponds import fill

TOGETHER = 40
"""Number of messages settled in one transaction; they share one body."""


async def settle_some(store: Any, n: int) -> None:
    body = str(n).encode()
    await store.publish([Message(queue="q", payload=body) for _ in range(TOGETHER)])
    claims = await store.claim(["q"], limit=TOGETHER, lease=60)
    assert not await store.settle([Ack(claim.receipt) for claim in claims])


@contextmanager
def writer(url: str) -> Iterator[threading.Event]:
    """Settles batches without pause; the event is set after each commit."""
    stop, another = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    async def run() -> None:
        store: Any = await millpond.connect(url)
        n = 1_000_000
        while not stop.is_set():
            await settle_some(store, n)
            another.set()
            n += 1
        await store.close()

    def guarded() -> None:
        try:
            asyncio.run(run())
        except BaseException as e:
            failed.append(e)
            another.set()

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield another
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


async def prepare(url: str, batches: int) -> None:
    store: Any = await millpond.connect(url, migrate=True)
    for n in range(batches):
        await settle_some(store, n)
    await store.close()


def read(url: str, part: Slice, table: str = "archive") -> list[bytes]:
    columns = [column for column in batch_columns(table) if column.name == "payload"]
    with open_reader(url) as reader:
        return [row["payload"] for batch in reader.read(part, columns) for row in batch.to_pylist()]


def test_slices_of_the_archive_show_one_moment(postgres_url: str, mariadb_url: str, sqlite_url: str) -> None:
    for url in (postgres_url, mariadb_url, sqlite_url):
        asyncio.run(prepare(url, 30))
        with writer(url) as another:
            for _ in range(3):
                another.clear()
                assert another.wait(30)
                with open_reader(url) as reader:
                    slices = reader.slices(Read("archive", at_least=4))
                assert len(slices) >= 4 or url is not postgres_url
                found: Counter[bytes] = Counter()
                for part in slices:
                    # There is a settle between any two slices, and often in the middle of one.
                    another.clear()
                    assert another.wait(30)
                    found.update(read(url, part))
                assert set(found.values()) == {TOGETHER}
                assert len(found) >= 30


def test_what_was_in_progress_is_not_seen_when_it_is_done(postgres_url: str) -> None:
    asyncio.run(prepare(postgres_url, 3))
    copy = "INSERT INTO millpond_archive SELECT (m).* FROM (SELECT m FROM millpond_archive m LIMIT 5) x"
    with psycopg.connect(postgres_url) as late, psycopg.connect(postgres_url, autocommit=True) as soon:
        late.execute(copy)
        with open_reader(postgres_url) as reader:
            slices = reader.slices(Read("archive", at_least=2))
        soon.execute(copy)
        late.commit()
        assert sum(len(read(postgres_url, part)) for part in slices) == 3 * TOGETHER
        # Rows committed before are seen, although an older transaction is still open.
        late.execute(copy)
        soon.execute(copy)
        with open_reader(postgres_url) as reader:
            slices = reader.slices(Read("archive", at_least=2))
        assert sum(len(read(postgres_url, part)) for part in slices) == 3 * TOGETHER + 15
        late.rollback()


def test_live_messages_show_one_moment(postgres_url: str, mariadb_url: str, sqlite_url: str) -> None:
    for url in (postgres_url, mariadb_url, sqlite_url):
        fill(url, ["held"], each=30)
        with open_reader(url) as reader:
            assert len(reader.slices(Read("messages", at_least=8))) == 1
            assert len(reader.slices(Read("messages", at_least=8, snapshot=False))) > 1


def test_a_table_that_is_rewritten_is_noticed(postgres_url: str) -> None:
    asyncio.run(prepare(postgres_url, 3))
    given = {"url": postgres_url, "table": "archive", "minPartitions": "2"}
    reader = BatchReader(given, spark_schema(batch_columns("archive")))
    parts = reader.partitions()
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("VACUUM FULL millpond_archive")
    with pytest.raises(StoreError, match="read it again"):
        for part in parts:
            list(reader.read(part))
    # A partition that a purge dropped has no rows; that is no error.
    parts = reader.partitions()
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        for (name,) in admin.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'millpond_archive'::regclass"
        ).fetchall():
            if "default" not in name:
                admin.execute(f"DROP TABLE {name}")
    assert [batch for part in parts for batch in reader.read(part)] == []


def test_fewer_parts_than_asked_for_are_told(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A read of live messages is one snapshot, so it has one part unless the caller allows several snapshots."""
    fill(sqlite_url, ["orders"])
    given = {"url": sqlite_url, "table": "messages", "minPartitions": "8"}
    assert len(BatchReader(given, spark_schema(batch_columns("messages"))).partitions()) == 1
    assert "snapshot=false reads more parts" in caplog.text
    caplog.clear()
    BatchReader({**given, "snapshot": "false"}, spark_schema(batch_columns("messages"))).partitions()
    assert "snapshot=false" not in caplog.text
