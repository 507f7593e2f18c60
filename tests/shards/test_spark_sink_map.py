"""A Spark sink with an old or foreign shard map publishes nothing, and its error names the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

import millpond
from millpond import transports
from millpond.errors import ShardMapChanged, ShardMapMismatch, WrongShard
from millpond.seam.bulk import Batch
from millpond.spark.options import SparkOptions
from millpond.spark.write.sink import Loaded, Sink
from millpond.transports.shard_map import ShardMap, ShardRecord, check_routed
from tests import templates
from tests.shards.conftest import three_shards

pytestmark = pytest.mark.slow_on_servers

T = TypeVar("T")
SCHEMA = StructType([StructField("key", StringType()), StructField("payload", StringType())])
ROWS = [pa.RecordBatch.from_pydict({"key": [f"k{n}" for n in range(60)], "payload": ["x"] * 60})]


@pytest.fixture(params=["sqlite", "postgres"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Three shards. On PostgreSQL, tasks may publish their parts without staging."""
    return three_shards(request, tmp_path)


def sink_on(urls: list[str], *, atomic: bool = True) -> Sink:
    given = {"url": " ".join(urls), "queue": "q", "atomic": str(atomic).lower()}
    return Sink(SparkOptions(given, ("queue", "atomic"), of="a write"), SCHEMA, False, what="df.write")


def publish(sink: Sink, batch: Batch) -> Loaded:
    loaded = sink.write(batch, 0, iter(ROWS))
    sink.commit(batch, [loaded])
    return loaded


def on(url: str, work: Callable[[Any], Awaitable[T]]) -> T:
    async def run() -> T:
        store = await millpond.connect(url)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def placed(urls: list[str]) -> dict[str, str]:
    """Key -> name of the shard that has the message."""
    found = {}
    for name, url in zip("abc", urls, strict=True):
        rows = on(url, lambda store: store.operations.browse("q", limit=500))
        found |= {row.key: name for row in rows}
        assert all(row.key is not None for row in rows)
    return found


@pytest.mark.parametrize("atomic", [True, False], ids=["whole", "parts"])
def test_an_old_map_publishes_nothing_anywhere(urls: list[str], atomic: bool) -> None:
    old = sink_on(urls, atomic=atomic)
    asyncio.run(transports.move_range(urls, "-55", "b"))
    with pytest.raises(ShardMapChanged, match=r"-55 belongs to shard 'b' by version 2.*restart the query"):
        publish(old, Batch("query:1", 0))
    assert "a" not in placed(urls).values()
    old.abort(Batch("query:1", 0))


def test_the_same_batch_is_published_once_by_a_sink_that_read_the_new_map(urls: list[str]) -> None:
    batch = Batch("query:1", 0)
    old = sink_on(urls)
    loaded = old.write(batch, 0, iter(ROWS))
    asyncio.run(transports.move_range(urls, "-55", "b"))
    with pytest.raises(ShardMapChanged):
        old.commit(batch, [loaded])
    assert placed(urls) == {}
    new = sink_on(urls)
    publish(new, batch)
    publish(new, batch)
    found = placed(urls)
    map_ = new.shards[0].map
    assert map_ is not None and len(found) == 60
    assert all(map_.place(key, b"") == shard for key, shard in found.items())


def test_the_map_is_checked_within_the_transaction(urls: list[str]) -> None:
    """It may change after the sink has looked at all shards."""
    batch, sink = Batch("query:1", 0), sink_on(urls)
    loaded = sink.write(batch, 0, iter(ROWS))
    asyncio.run(transports.move_range(urls, "-55", "b"))
    for shard, routed, error in ((0, sink.shards[0].record, ShardMapChanged), (2, None, WrongShard)):
        with pytest.raises(error):
            on(urls[shard], lambda store: store.bulk.publish(batch, loaded.lots[shard], routed=routed))  # noqa: B023
    written = on(urls[1], lambda store: store.bulk.publish(batch, loaded.lots[1], routed=sink.shards[1].record))
    assert written.new == sum(loaded.lots[1].values()) > 0
    assert set(placed(urls).values()) == {"b"}


@pytest.mark.parametrize("atomic", [True, False], ids=["whole", "parts"])
def test_one_shard_alone_is_refused(urls: list[str], atomic: bool) -> None:
    with pytest.raises(WrongShard, match=r"is shard 'a' of 3.*Give the URLs of all shards"):
        publish(sink_on(urls[:1], atomic=atomic), Batch("query:1", 0))
    assert placed(urls) == {}


@pytest.mark.parametrize("atomic", [True, False], ids=["whole", "parts"])
def test_databases_that_become_shards_under_a_sink(tmp_path: Path, atomic: bool) -> None:
    urls = [templates.migrated(tmp_path / f"{name}.db") for name in "abc"]
    sink = sink_on(urls, atomic=atomic)
    asyncio.run(transports.init_shards(urls, names=["a", "b", "c"]))
    with pytest.raises(WrongShard, match="Give the URLs of all shards"):
        publish(sink, Batch("query:1", 0))
    assert placed(urls) == {}


def test_a_foreign_map_is_refused() -> None:
    one, other = ShardMap.even("pond", ["a", "b"]), ShardMap.even("other", ["a", "b"])
    check_routed(ShardRecord("a", one), ShardRecord("a", one), "db")
    for found in (None, ShardRecord("a", other), ShardRecord("b", one)):
        with pytest.raises(ShardMapMismatch, match="no longer shard 'a' of the shard map"):
            check_routed(found, ShardRecord("a", one), "db")
