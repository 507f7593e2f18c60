"""Outcomes from a DataFrame, for streams with `ackMode=manual`. Executors record them, the next ack applies them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from millpond import transports
from millpond.errors import InvalidOption
from millpond.message import check_id
from millpond.seam.streams import RecordedOutcome
from millpond.seam.transport import Transport
from millpond.spark.options import SparkOptions, SparkShard
from millpond.spark.sessions import refuse_files_on_a_cluster

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

log = logging.getLogger("millpond")

_REQUIRED = ("id", "outcome")
_OPTIONAL = ("delay", "reason", "shard")
_ANSWER = "recorded bigint, unknown array<string>"
_SHOWN = 3


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `settle`."""

    recorded: int
    unknown: Sequence[UUID]
    """Ids that are not in the current batch of the stream: nothing was recorded for them."""


def settle(df: DataFrame, *, stream: str, **options: str) -> Recording:
    """Record outcomes for messages of the stream's current batch; for use in `foreachBatch`.

    Columns: `id`, `outcome` (ack, nack or reject); optional: `delay` (with nack: seconds), `reason`, and `shard`, which
    saves a search over several shards. Other options are those of the stream: `url` or `urlEnv`, `schema`,
    `tablePrefix`, `pooler`. Recording again is harmless and the last outcome counts. Two outcomes for one message in
    one DataFrame have no order.
    """
    shards = SparkOptions(options, (), of="settle").shards()
    missing = [name for name in _REQUIRED if name not in df.columns]
    if missing:
        raise InvalidOption(f"settle needs the column {missing[0]!r}; the DataFrame has {', '.join(df.columns)}")
    wanted = [*_REQUIRED, *(name for name in _OPTIONAL if name in df.columns)]
    rows = df.select(*wanted).mapInArrow(_Recorder(shards, stream), _ANSWER).collect()
    unknown = [UUID(id_) for row in rows for id_ in row.unknown]
    if unknown:
        some = ", ".join(map(str, unknown[:_SHOWN])) + (", …" if len(unknown) > _SHOWN else "")
        log.warning("outcomes ignored: %d, whose messages stream %r does not hold: %s", len(unknown), stream, some)
    return Recording(recorded=sum(row.recorded for row in rows), unknown=unknown)


@dataclass(frozen=True, repr=False)
class _Recorder:
    """Records one partition of the DataFrame, in a task."""

    shards: Sequence[SparkShard]
    stream: str

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        refuse_files_on_a_cluster(self.shards)
        recorded, unknown = asyncio.run(self._record(batches))
        yield pa.record_batch(
            [pa.array([recorded], pa.int64()), pa.array([[str(id_) for id_ in unknown]], pa.list_(pa.string()))],
            names=["recorded", "unknown"],
        )

    async def _record(self, batches: Iterable[pyarrow.RecordBatch]) -> tuple[int, list[UUID]]:
        stores: dict[int, Transport] = {}
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

    async def _record_some(
        self, stores: dict[int, Transport], shard: int | None, outcomes: list[RecordedOutcome]
    ) -> list[UUID]:
        """Try its shard, or all shards in turn until none is left; returns the ids that are on no shard."""
        left = [o.id for o in outcomes]
        for n in range(len(self.shards)) if shard is None else [shard]:
            if not 0 <= n < len(self.shards):
                break
            if n not in stores:
                place = self.shards[n]
                stores[n] = await transports.connect(place.url.raw, **place.store_options, migrate=False, pool_size=1)
            left = await stores[n].streams.record(self.stream, outcomes)
            if not left:
                break
            unknown = set(left)
            outcomes = [o for o in outcomes if o.id in unknown]
        return left


def _outcomes(batch: pyarrow.RecordBatch) -> dict[int | None, list[RecordedOutcome]]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    nothing = [None] * batch.num_rows
    by_shard: dict[int | None, list[RecordedOutcome]] = {}
    for id_, outcome, delay, reason, shard in zip(
        columns["id"], columns["outcome"], *(columns.get(name, nothing) for name in _OPTIONAL), strict=True
    ):
        seconds = None if delay is None else float(delay)  # Spark's literals with a decimal point are decimals
        by_shard.setdefault(shard, []).append(RecordedOutcome(check_id(id_), outcome, seconds, reason))
    return by_shard
