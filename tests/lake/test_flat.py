"""A short stretch of a large archive is found by an index: an export costs what is new, not what there is."""

from __future__ import annotations

import asyncio
from typing import Any

import millpond
from millpond import Ack, Message
from millpond.clock import as_datetime
from millpond.spark.lake.export import shards_of
from millpond.transports.database.fetch import closed

MANY = 6000
EXPLAIN = {"sqlite": "EXPLAIN QUERY PLAN", "postgresql": "EXPLAIN", "mysql": "EXPLAIN"}


async def settle(url: str, count: int) -> int:
    """Returns the moment after it."""
    store: Any = await millpond.connect(url)
    await store.publish([Message(queue="q", payload=b"x" * 100) for _ in range(count)])
    await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], limit=count)])
    until = (await store.close_archive(None)).until_us
    await store.close()
    return int(until)


def test_what_was_settled_before_is_closed(url: str, soon: None) -> None:
    """also within one tick of the database's clock"""

    async def scenario() -> None:
        store: Any = await millpond.connect(url)
        await store.publish([Message(queue="q", payload=b"x") for _ in range(20)])
        for claim in await store.claim(["q"], limit=20):
            await store.settle([Ack(claim.receipt)])
            closed_at = as_datetime((await store.close_archive(None)).until_us)
            (row,) = await store.find([claim.receipt.id])
            assert row.archived_at < closed_at
        await store.close()

    asyncio.run(scenario())


def test_plans(url: str, soon: None) -> None:
    since = asyncio.run(settle(url, MANY))
    until = asyncio.run(settle(url, 3))
    (shard,) = shards_of(url, None, "")
    with shard.fetcher() as fetcher:
        slices = closed.slices(fetcher, since, until, 1)
        rows = [
            row for part in slices for piece in part for row in fetcher.rows(f"SELECT id {piece.rest}", piece.params)
        ]
        assert len(rows) == 3
        for piece in (piece for part in slices for piece in part):
            explain = EXPLAIN[fetcher.dialect.name]
            plan = " ".join(map(str, fetcher.rows(f"{explain} SELECT payload {piece.rest}", piece.params)))
            if fetcher.dialect.name == "mysql":
                assert "'range'" in plan and "PRIMARY" in plan, plan
            else:
                assert "ndex" in plan.replace("INDEX", "Index") and "Seq Scan" not in plan, plan
                assert "SCAN message" not in plan, plan
