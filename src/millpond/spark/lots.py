"""The rows of one task on their way to the shards, gathered to lots of a size that a database likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import pyarrow as pa

from millpond.spark.ids import new_ids
from millpond.spark.options import Shard
from millpond.spark.rows import SCHEMA, without_copies
from millpond.transports.database.load import Loader
from millpond.transports.database.staging import Batch
from millpond.transports.routing import place_of, shard_of

LOT_ROWS = 65_536
LOT_BYTES = 32 << 20
_MOST_QUEUES = 1000
"""Announced after a commit; whoever waits for others finds them by polling."""


class Piles:
    """Gathers rows by shard, and hands them on in tables of a size that a database likes."""

    def __init__(self, shards: int, take: Callable[[int, pa.Table], None], *, given: bool) -> None:
        self._piles: list[list[pa.RecordBatch]] = [[] for _ in range(shards)]
        self._take = take
        self._given = given
        self.queues: set[str] = set()

    def add(self, rows: pa.RecordBatch) -> None:
        if len(self.queues) < _MOST_QUEUES:
            self.queues.update(rows.column("queue").unique().to_pylist()[:_MOST_QUEUES])
        for shard, some in routed(rows, len(self._piles), given=self._given):
            pile = self._piles[shard]
            pile.append(some)
            if sum(part.num_rows for part in pile) >= LOT_ROWS or sum(part.nbytes for part in pile) >= LOT_BYTES:
                self._hand_on(shard)

    def flush(self) -> None:
        for shard, pile in enumerate(self._piles):
            if pile:
                self._hand_on(shard)

    def _hand_on(self, shard: int) -> None:
        rows = pa.Table.from_batches(self._piles[shard])
        self._piles[shard] = []
        self._take(shard, rows)


class Lots:
    """Stages tables as lots; `numbers` tells what was loaded where."""

    def __init__(self, shards: Sequence[Shard], batch: Batch, *, given: bool) -> None:
        self._shards = shards
        self._batch = batch
        self._given = given
        self._loaders: list[Loader | None] = [None for _ in shards]
        self._open = ExitStack()
        self.numbers: list[dict[int, int]] = [{} for _ in shards]
        """Of each shard, lot -> rows in it."""
        self.copies = [0 for _ in shards]
        """Of each shard, how many rows were left out since their id stands in the same lot."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def load(self, shard: int, rows: pa.Table) -> None:
        if self._given:
            once = without_copies(rows)
            self.copies[shard] += rows.num_rows - once.num_rows
            rows = once
        self.numbers[shard][self._loader(shard).load(self._batch, rows)] = rows.num_rows

    def _loader(self, shard: int) -> Loader:
        loader = self._loaders[shard]
        if loader is None:
            loader = self._loaders[shard] = self._open.enter_context(self._shards[shard].loader())
        return loader


def routed(rows: pa.RecordBatch, shards: int, *, given: bool) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each shard.

    Rows without key and id go by their payload: when a batch is repeated, and one shard has it already, the
    others must get the rows that they would have got then. Their ids are drawn until they lead to that shard.
    """
    if shards == 1:
        yield 0, rows
        return
    keys, ids, payloads = (rows.column(name).to_pylist() for name in ("key", "id", "payload"))
    others = ids if given else payloads
    numbers = np.array(
        [
            shard_of(place_of(other if key is None else key.encode()), shards)
            for key, other in zip(keys, others, strict=True)
        ]
    )
    if not given:
        ids = _ids_for(ids, keys, numbers, shards)
        rows = rows.set_column(SCHEMA.get_field_index("id"), SCHEMA.field("id"), pa.array(ids, pa.binary()))
    for shard in range(shards):
        some = rows.filter(pa.array(numbers == shard))
        if some.num_rows:
            yield shard, some


def _ids_for(ids: list[bytes], keys: list[str | None], numbers: Any, shards: int) -> list[bytes]:
    free = [n for n, key in enumerate(keys) if key is None]
    while free := [n for n in free if shard_of(place_of(ids[n]), shards) != numbers[n]]:
        for n, id_ in zip(free, new_ids(len(free)).to_pylist(), strict=True):
            ids[n] = id_
    return ids
