"""Streams where the tables have other names, in another schema."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import millpond
from millpond import State
from millpond.seam.streams import RecordedOutcome
from millpond.spark.columns import spark_schema, stream_columns
from millpond.spark.stream.reader import StreamPartition, StreamReader
from tests.rooms.streams.driver import Driver, counts, publish
from tests.spark.cached_readers import close_cached


@pytest.mark.parametrize("database", ["sqlite", "postgres", "mariadb"])
async def test_every_verb(database: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(f"{database}_url")
    place: dict[str, Any] = {"table_prefix": "x_"} | ({"schema": "queues"} if database == "postgres" else {})
    store: Any = await millpond.connect(url, migrate=True, **place)
    ids = await publish(store, 6)
    await publish(store, 1, expires=0)
    driver = await Driver(store).open()
    claim = await driver.held(1, limit=4, slices=2)
    options = {"url": url, "queue": "q", "stream": "s", "tablePrefix": "x_"} | (
        {"schema": "queues"} if database == "postgres" else {}
    )
    reader = StreamReader(options, spark_schema(stream_columns()))

    def read() -> list[str]:
        parts = [StreamPartition(0, claim.stream, claim.seq, [part]) for part in claim.slices]
        rows = [row["id"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
        close_cached()
        return rows

    assert sorted(await asyncio.to_thread(read)) == sorted(map(str, ids[:4]))
    outcomes = [RecordedOutcome(ids[0], "nack", 60, "later"), RecordedOutcome(ids[1], "reject")]
    assert await store.streams.record("s", outcomes) == []
    await driver.ack(1, messages=4)
    await driver.held(2)
    assert await store.streams.release("s") == 2
    assert (await store.streams.waiting(["q"])).messages == 2
    assert await counts(store) == {State.PENDING: 2, State.RETRYABLE: 1, State.COMPLETED: 2, State.FAILED: 2}
    await store.close()
