"""A short range of a large archive is found by an index: the cost of an export depends on the new rows only."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

import millpond
from millpond import Ack, Message
from millpond.clock import as_datetime
from millpond.spark.columns import batch_columns
from millpond.spark.lake.export import shards_of
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.database.arrow.reader import DatabaseReader
from tests.shared import empty_database

MANY = 6000
EXPLAIN = {"sqlite": "EXPLAIN QUERY PLAN", "mysql": "EXPLAIN"}


async def migrate(url: str) -> None:
    await (await millpond.connect(url, migrate=True)).close()


async def settle(url: str, count: int) -> int:
    """Returns a time after it."""
    store: Any = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x" * 100) for _ in range(count)])
    await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], limit=count)])
    until = (await store.exports.close_archive(None)).until_us
    await store.close()
    return int(until)


def test_what_was_settled_before_is_closed(url: str, soon: None) -> None:
    """Also within one tick of the database's clock."""

    async def scenario() -> None:
        store: Any = await millpond.connect(url)
        await store.publish([Message(queue="q", payload=b"x") for _ in range(20)])
        for claim in await store.claim(["q"], limit=20):
            await store.settle([Ack(claim.receipt)])
            closed_at = as_datetime((await store.exports.close_archive(None)).until_us)
            (row,) = await store.operations.find([claim.receipt.id])
            assert row.archived_at < closed_at
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_plans(kind: str, request: pytest.FixtureRequest, soon: None) -> None:
    url = empty_database(request, kind)
    asyncio.run(migrate(url))
    since = asyncio.run(settle(url, MANY))
    until = asyncio.run(settle(url, 3))
    (shard,) = shards_of(url, None, TABLE_PREFIX)
    with shard.open_reader() as reader:
        assert isinstance(reader, DatabaseReader)
        slices = reader.closed_slices(since, until, 1)
        rows = [
            row for part in slices for piece in part for row in reader.rows(f"SELECT id {piece.rest}", piece.params)
        ]
        assert len(rows) == 3
        for piece in (piece for part in slices for piece in part):
            explain = EXPLAIN[reader.dialect.name]
            plan = " ".join(map(str, reader.rows(f"{explain} SELECT payload {piece.rest}", piece.params)))
            if reader.dialect.name == "mysql":
                assert "'range'" in plan and "PRIMARY" in plan, plan
            else:
                assert "SEARCH millpond_archive USING INDEX millpond_archive_time" in plan, plan


FILL = """
INSERT INTO millpond_archive (id, queue, priority, due_at, payload, deliveries, attempts, created_at, state,
archived_at)
SELECT gen_random_uuid(), 'queue ' || n %% %s, 50, 0, repeat('x', 100)::bytea, 1, 1, 0, 'COMPLETED', %s + n
FROM generate_series(0, %s - 1) n
"""


def pages_of_an_export(url: str, queues: int, rows: int) -> int:
    """Pages that PostgreSQL touches to export 10 new messages, after an export of the others."""

    async def closed(store: Any, since: int | None) -> int:
        return int((await store.exports.close_archive(since)).until_us)

    async def scenario() -> int:
        store: Any = await millpond.connect(url)
        with psycopg.connect(url, autocommit=True) as connection:
            start = await closed(store, None) - rows
            connection.execute(FILL, (queues, start, rows))
            since = await closed(store, None)
            connection.execute(FILL, (queues, since + 1, 10))
            await asyncio.sleep(0.01)
            until = await closed(store, since)
        await store.close()
        return await asyncio.to_thread(touched, since, until)

    def touched(since: int, until: int) -> int:
        (shard,) = shards_of(url, None, TABLE_PREFIX)
        with shard.open_reader() as reader, psycopg.connect(url) as connection:
            assert isinstance(reader, DatabaseReader)
            ((piece,),) = reader.closed_slices(since, until, 1)
            assert sum(batch.num_rows for batch in reader.read([piece], batch_columns("archive"))) == 10
            connection.execute("SELECT set_config('enable_seqscan', 'off', true)")
            text = reader.dialect.fill(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT payload {piece.rest}")
            for name, value in piece.params.items():
                text = text.replace(f":{name}", str(value))
            ((plan,),) = connection.execute(text).fetchall()
        return int(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])

    return asyncio.run(scenario())


def test_an_export_reads_its_own_rows_whatever_the_day_has(shared_postgres: Any, soon: None) -> None:
    """Ten rows cost the same with 10 and with 3,000 queues, and with 30 times the rows of the day."""
    found = []
    for queues, rows in ((10, 2_000), (3_000, 60_000)):
        shared_postgres.empty()
        with psycopg.connect(shared_postgres.url, autocommit=True) as connection:
            connection.execute("VACUUM millpond_archive")
        found.append(pages_of_an_export(shared_postgres.url, queues, rows))
    assert max(found) < 100, found
    assert found[1] < found[0] + 50, found
