"""The sink under a Spark that crashes at every step, without a JVM: two databases, retries, zombies, other partitions.

The model: tasks run once or twice, and one of their results counts. The driver dies after any task, and before,
between and after the commits of the two databases; then the batch is repeated. Commits of drivers that seemed dead
arrive late.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

import millpond
from millpond.errors import StagingLost, StreamBehind
from millpond.seam.bulk import Batch
from millpond.spark.options import SparkOptions
from millpond.spark.write.sink import Loaded, Sink
from tests.spark.write.test_sink import left, live, migrated

pytestmark = [pytest.mark.slow, pytest.mark.long]

SCHEMA = StructType([StructField("key", StringType()), StructField("payload", StringType())])
BATCHES = 25
ROWS = 12


class Crash(Exception):
    pass


class Simulation(Sink):
    """A sink whose driver may die between any two databases."""

    def __init__(self, url: str, atomic: bool, chance: random.Random) -> None:
        options = SparkOptions(
            {"url": url, "queue": "q", "atomic": str(atomic).lower()}, ("queue", "atomic"), of="a write"
        )
        super().__init__(options, SCHEMA, False, what="df.write")
        self.chance = chance
        self.crashes = 0

    def step(self) -> None:
        if self.chance.random() < 0.12:
            self.crashes += 1
            raise Crash

    async def _each(self, do: Any, **more: Any) -> list[Any]:
        shards, found = self.shards, []
        for shard in self.chance.sample(shards, len(shards)):
            self.step()
            self.shards = [shard]
            try:
                found += await super()._each(do, **more)
            finally:
                self.shards = shards
        self.step()
        return found


def table(rows: list[tuple[str | None, str]]) -> list[pa.RecordBatch]:
    keys, payloads = [key for key, _ in rows], [payload for _, payload in rows]
    return [pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.string()), "payload": payloads})]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("atomic", [True, False])
def test_each_row_is_published_once(tmp_path: Path, atomic: bool, seed: int) -> None:
    chance = random.Random(seed)
    urls = [migrated(f"sqlite:///{tmp_path / name}.db") for name in ("one", "other")]
    sink = Simulation(" ".join(urls), atomic, chance)
    zombies: list[tuple[Batch, list[Loaded]]] = []
    expected: Counter[bytes] = Counter()
    for number in range(BATCHES):
        batch = Batch("query:simulated", number)
        # The same row may be in a batch twice.
        rows = [(chance.choice([None, f"k{n % 5}"]), f"{number}-{n % (ROWS - 2)}") for n in range(ROWS)]
        expected.update(payload.encode() for _, payload in rows)
        cut = chance.randint(0, ROWS)
        while True:
            if atomic:  # any partitions, in any order
                chance.shuffle(rows)
                cut = chance.randint(0, ROWS)
            loaded: list[Loaded] = []
            try:
                for part, some in enumerate((rows[:cut], rows[cut:])):
                    for _ in range(chance.choice((1, 1, 2))):
                        one = sink.write(batch, part, iter(table(some)))
                    loaded.append(one)
                    sink.step()
                if zombies and chance.random() < 0.3:
                    with suppress(StagingLost, StreamBehind):  # its rows were collected, or a later batch is published
                        sink.commit(*zombies.pop(chance.randrange(len(zombies))))
                sink.commit(batch, loaded)
                break
            except Crash:
                if len(loaded) == 2:
                    zombies.append((batch, loaded))
                elif chance.random() < 0.3:
                    with suppress(Crash):
                        sink.abort(batch)
    assert sink.crashes > 10
    found = Counter(row.payload for url in urls for row in live(url, "q"))
    assert found == expected
    for url in urls:
        asyncio.run(purge(url))
        assert left(url) == 0


async def purge(url: str) -> None:
    store: Any = await millpond.connect(url)
    await store.operations.purge()
    await store.close()
