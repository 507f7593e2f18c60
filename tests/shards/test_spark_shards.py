"""Spark finds the shards by the same map: their numbers, and the place of each row."""

from pathlib import Path

import pyarrow as pa
import pytest

import millpond
from millpond.errors import ShardMapMismatch
from millpond.message import new_id
from millpond.spark.options import SparkOptions
from millpond.spark.write.lots import owner_of, route_rows
from millpond.transports.shard_map import ShardMap
from tests.shards.conftest import NAMES


def shards_of(urls: list[str]) -> list[tuple[int, str, bool]]:
    found = SparkOptions({"url": " ".join(urls)}, (), of="a read").shards()
    return [(shard.number, shard.url.raw, shard.map is not None) for shard in found]


async def test_the_order_of_urls_changes_no_number(urls: list[str]) -> None:
    expected = [(n, url, True) for n, url in enumerate(urls)]
    assert shards_of(urls) == shards_of(urls[::-1]) == shards_of([urls[1], urls[2], urls[0]]) == expected


async def test_a_missing_or_additional_url_is_an_error(urls: list[str], tmp_path: Path) -> None:
    with pytest.raises(ShardMapMismatch, match="2 URLs were given, and the shard map has 3 shards"):
        shards_of(urls[:2])
    await (await millpond.connect(f"sqlite:///{tmp_path}/more.db", migrate=True)).close()
    with pytest.raises(ShardMapMismatch, match="has no shard map"):
        shards_of([*urls, f"sqlite:///{tmp_path}/more.db"])


async def test_without_a_map_the_order_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    urls = [f"sqlite:///{tmp_path}/{n}.db" for n in range(2)]
    for url in urls:
        await (await millpond.connect(url, migrate=True)).close()
    assert shards_of(urls[::-1]) == [(0, urls[1], False), (1, urls[0], False)]
    assert "must never change. Run: millpond shards init" in caplog.text


@pytest.mark.parametrize("given", [False, True], ids=["new ids", "given ids"])
def test_rows_go_where_a_pond_publishes_them(given: bool) -> None:
    map_ = ShardMap.even("pond", NAMES)
    count = 200
    rows = pa.record_batch(
        {
            "id": pa.array([new_id().bytes for _ in range(count)], pa.binary()),
            "due_at": pa.array([0] * count, pa.int64()),
            "priority": pa.array([50] * count, pa.int16()),
            "queue": ["q"] * count,
            "key": [f"customer-{n}" if n % 2 else None for n in range(count)],
            "headers": pa.array([None] * count, pa.string()),
            "payload": [str(n).encode() for n in range(count)],
        }
    )
    placed = 0
    for shard, some in route_rows(rows, 3, given=given, owner=owner_of(3, map_)):
        for row in some.to_pylist():
            assert map_.place(row["key"], row["id"]) == NAMES[shard]
            placed += 1
    assert placed == count
