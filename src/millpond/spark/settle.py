"""Outcomes from a DataFrame, for streams with `ackMode=manual`: recorded by executors, applied by the next ack."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from millpond import transports
from millpond.errors import InvalidOption
from millpond.message import check_id
from millpond.spark.local import refuse_files_on_a_cluster
from millpond.spark.options import Options, Shard
from millpond.transport import Recorded

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

log = logging.getLogger("millpond")

_REQUIRED = ("id", "outcome")
_OPTIONAL = ("delay", "reason", "shard")
_ANSWER = "recorded bigint, unknown array<string>"
_SHOWN = 3


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What came of `settle`."""

    recorded: int
    unknown: Sequence[UUID]
    """Not of the batch that the stream holds now: nothing was recorded for them."""


def settle(df: DataFrame, *, stream: str, **options: str) -> Recording:
    """Record what shall become of the messages of the stream's current batch; for use in `foreachBatch`.

    Columns: `id`, `outcome` (ack, nack or reject), and if you like `delay` (with nack: seconds), `reason`, and
    `shard`, which saves a search where there are several. Other options say where, as for the stream itself: `url`
    or `urlEnv`, `schema`, `tablePrefix`. Recording again is harmless, the last word counts; two outcomes for one
    message in one DataFrame have no order.
    """
    shards = Options(options, (), of="settle").shards()
    missing = [name for name in _REQUIRED if name not in df.columns]
    if missing:
        raise InvalidOption(f"settle needs the column {missing[0]!r}; the DataFrame has {', '.join(df.columns)}")
    wanted = [*_REQUIRED, *(name for name in _OPTIONAL if name in df.columns)]
    rows = df.select(*wanted).mapInArrow(_Recorder(shards, stream), _ANSWER).collect()
    unknown = [UUID(id_) for row in rows for id_ in row.unknown]
    if unknown:
        some = ", ".join(map(str, unknown[:_SHOWN])) + (", …" if len(unknown) > _SHOWN else "")
        log.warning("%d outcomes are of messages that stream %r does not hold: %s", len(unknown), stream, some)
    return Recording(recorded=sum(row.recorded for row in rows), unknown=unknown)


class _Recorder:
    """What a task does with its part of the DataFrame."""

    def __init__(self, shards: Sequence[Shard], stream: str) -> None:
        self._shards = shards
        self._stream = stream

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        refuse_files_on_a_cluster(self._shards)
        recorded, unknown = asyncio.run(self._record(batches))
        yield pa.record_batch(
            [pa.array([recorded], pa.int64()), pa.array([[str(id_) for id_ in unknown]], pa.list_(pa.string()))],
            names=["recorded", "unknown"],
        )

    async def _record(self, batches: Iterable[pyarrow.RecordBatch]) -> tuple[int, list[UUID]]:
        stores: dict[int, Any] = {}
        recorded, unknown = 0, list[UUID]()
        try:
            for batch in batches:
                for shard, outcomes in _outcomes(batch).items():
                    left = await self._record_some(stores, shard, outcomes)
                    recorded += len({o.id for o in outcomes}) - len(left)
                    unknown += left
        finally:
            for store in stores.values():
                await store.close()
        return recorded, unknown

    async def _record_some(self, stores: dict[int, Any], shard: int | None, outcomes: list[Recorded]) -> list[UUID]:
        """On its shard, or on one after the other until none is left; returns the ids that are nowhere."""
        left = [o.id for o in outcomes]
        for n in range(len(self._shards)) if shard is None else [shard]:
            if not 0 <= n < len(self._shards):
                break
            if n not in stores:
                place = self._shards[n]
                stores[n] = await transports.connect(place.url.raw, **place.options, migrate=False, pool_size=1)
            left = await stores[n].record_outcomes(self._stream, outcomes)
            if not left:
                break
            unknown = set(left)
            outcomes = [o for o in outcomes if o.id in unknown]
        return left


def _outcomes(batch: pyarrow.RecordBatch) -> dict[int | None, list[Recorded]]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    nothing = [None] * batch.num_rows
    by_shard: dict[int | None, list[Recorded]] = {}
    for id_, outcome, delay, reason, shard in zip(
        columns["id"], columns["outcome"], *(columns.get(name, nothing) for name in _OPTIONAL), strict=True
    ):
        seconds = None if delay is None else float(delay)  # Spark's own numbers with a point are decimals
        by_shard.setdefault(shard, []).append(Recorded(check_id(id_), outcome, seconds, reason))
    return by_shard
