"""Distributes the rows of one task over shards and stages them in lots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.seam.arrow import ArrowWriter, Closing
from millpond.seam.bulk import Batch
from millpond.spark.options import SparkShard
from millpond.spark.write.messages import SCHEMA, new_ids, without_copies
from millpond.transports.routing import ring_point, shard_of
from millpond.transports.shard_map import ShardMap

Owner = Callable[[int], int]

LOT_ROWS = 65_536
LOT_BYTES = 32 << 20
_MOST_QUEUES = 1000
"""Maximum number of queues announced after a commit; workers find messages of others by polling."""


class RowBuffers:
    """Collects rows by shard and passes them on in tables of LOT_ROWS rows or LOT_BYTES bytes."""

    def __init__(
        self, shards: int, take: Callable[[int, pa.Table], None], *, given: bool, map_: ShardMap | None = None
    ) -> None:
        self._buffers: list[list[pa.RecordBatch]] = [[] for _ in range(shards)]
        self._owner = owner_of(shards, map_)
        self._take = take
        self._given = given
        self.queues: set[str] = set()

    def add(self, rows: pa.RecordBatch) -> None:
        if len(self.queues) < _MOST_QUEUES:
            self.queues.update(rows.column("queue").unique().to_pylist()[:_MOST_QUEUES])
        for shard, some in route_rows(rows, len(self._buffers), given=self._given, owner=self._owner):
            buffer = self._buffers[shard]
            buffer.append(some)
            if sum(part.num_rows for part in buffer) >= LOT_ROWS or sum(part.nbytes for part in buffer) >= LOT_BYTES:
                self._flush(shard)

    def flush(self) -> None:
        for shard, buffer in enumerate(self._buffers):
            if buffer:
                self._flush(shard)

    def _flush(self, shard: int) -> None:
        rows = pa.Table.from_batches(self._buffers[shard])
        self._buffers[shard] = []
        self._take(shard, rows)


class Lots(Closing):
    """Stages tables as lots; `numbers` has the lots of each shard."""

    def __init__(self, shards: Sequence[SparkShard], batch: Batch, *, given: bool) -> None:
        self._shards = shards
        self._batch = batch
        self._given = given
        self._writers: dict[int, ArrowWriter] = {}
        self._open = ExitStack()
        self.numbers: list[dict[int, int]] = [{} for _ in shards]
        """For each shard: lot -> number of rows."""
        self.copies = [0 for _ in shards]
        """For each shard: number of rows left out because their id is already in the same lot."""

    def close(self) -> None:
        self._open.close()

    def load(self, shard: int, rows: pa.Table) -> None:
        if self._given:
            once = without_copies(rows)
            self.copies[shard] += rows.num_rows - once.num_rows
            rows = once
        if shard not in self._writers:
            self._writers[shard] = self._open.enter_context(self._shards[shard].open_writer())
        self.numbers[shard][self._writers[shard].load(self._batch, rows)] = rows.num_rows


def owner_of(shards: int, map_: ShardMap | None) -> Owner:
    """Point of the ring -> number of its shard, by the map or else by equal ranges."""
    if map_ is None:
        return lambda point: shard_of(point, shards)
    numbers = {name: n for n, name in enumerate(map_.shards)}
    return lambda point: numbers[map_.shard_of(point)]


def route_rows(
    rows: pa.RecordBatch, shards: int, *, given: bool, owner: Owner | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each shard.

    The payload decides for rows without key and id. When a batch is repeated after one shard has published it, the
    other shards must get the same rows as before. New ids are drawn until they belong to that shard.
    """
    if shards == 1:
        yield 0, rows
        return
    owner = owner or owner_of(shards, None)
    keys, ids, payloads = (rows.column(name).to_pylist() for name in ("key", "id", "payload"))
    others = ids if given else payloads
    numbers = np.array([owner(ring_point(key, other)) for key, other in zip(keys, others, strict=True)])
    if not given:
        ids = _ids_for(ids, keys, numbers, owner)
        rows = rows.set_column(SCHEMA.get_field_index("id"), SCHEMA.field("id"), pa.array(ids, pa.binary()))
    for shard in range(shards):
        some = rows.filter(pa.array(numbers == shard))
        if some.num_rows:
            yield shard, some


def _ids_for(ids: list[bytes], keys: list[str | None], numbers: Any, owner: Owner) -> list[bytes]:
    free = [n for n, key in enumerate(keys) if key is None]
    while free := [n for n in free if owner(ring_point(None, ids[n])) != numbers[n]]:
        for n, id_ in zip(free, new_ids(len(free)).to_pylist(), strict=True):
            ids[n] = id_
    return ids
