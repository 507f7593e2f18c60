"""`df.write.format("millpond")` and `df.writeStream.format("millpond")`: bulk publish from executors, exactly once.

Tasks load their rows into the staging tables, where no worker claims. The driver's commit publishes the lots that the
tasks report, in one transaction for each database, which also records the batch. A repeated batch is found there and
not published again. With `atomic=false` each task publishes its own partition in this way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from millpond.errors import InvalidMessage, InvalidOption, Unsupported
from millpond.loop import gather_all
from millpond.message import BODY_LIMIT, LARGEST_BODY_LIMIT, check_text
from millpond.seam.arrow import PartWriter
from millpond.seam.bulk import WHOLE, Batch, Bulk, Written
from millpond.seam.transport import Transport
from millpond.spark.options import SparkOptions, SparkShard
from millpond.spark.short_traces import short_trace
from millpond.spark.write.lots import Lots, RowBuffers
from millpond.spark.write.messages import layout, messages
from millpond.transports import connect, open_part_writer
from millpond.transports.shard_map import check_routed

T = TypeVar("T")

log = logging.getLogger("millpond")

_OPTIONS = ("queue", "atomic", "bodyLimit")
_STREAM_OPTIONS = ("checkpointLocation", "asyncProgressTrackingEnabled", "asyncProgressTrackingCheckpointIntervalMs")
_LONGEST_TXN = 200
_LONGEST_CALL = 3600
"""Maximum seconds for publishing a batch in one database."""
_LOCK_WAIT = 60


@dataclass
class Loaded(WriterCommitMessage):
    """Rows that one task loaded, by shard."""

    batch: Batch
    lots: list[dict[int, int]] = field(default_factory=list)
    """Lot -> rows."""
    others: list[int] = field(default_factory=list)
    """Rows in no lot: copies, and rows that the task has published itself."""
    queues: set[str] = field(default_factory=set)


class Sink:
    """The common part of batch and stream writes. Made on the driver and sent to the tasks."""

    def __init__(
        self, options: SparkOptions, schema: StructType, overwrite: bool, *, what: str, body_limit: int = BODY_LIMIT
    ) -> None:
        if overwrite:
            raise InvalidOption(f"{what} only adds messages: use {_HOW[what]}; nothing is ever overwritten")
        self.shards = options.shards()
        self.atomic = options.flag("atomic", True)
        self._body_limit = options.integer("bodyLimit", body_limit, 1, LARGEST_BODY_LIMIT)
        queues = options.queues() if options.get("queue") else [None]
        if len(queues) > 1:
            raise InvalidOption("a message is in one queue: give one name by the option 'queue', or a column 'queue'")
        self._layout = layout(schema, queues[0])

    # --- in tasks -----------------------------------------------------------------------------------

    def write(self, batch: Batch, part: int, batches: Iterator[pyarrow.RecordBatch]) -> Loaded:
        """Load the rows of a partition; with `atomic=false` publish them too."""
        if not self.atomic and not self._layout.given:
            with ExitStack() as stack:
                writers = self._part_writers(stack, batch, part)
                if writers is not None:
                    return self._write_part(batch, writers, batches)
        with Lots(self.shards, batch, given=self._layout.given) as lots:
            queues = self._load_rows(lots.load, batches)
        loaded = Loaded(batch, lots.numbers, lots.copies, queues)
        if self.atomic:
            return loaded
        asyncio.run(self._publish(batch, part, [loaded]))
        rows = [sum(some.values()) + copies for some, copies in zip(lots.numbers, lots.copies, strict=True)]
        return Loaded(batch, [{} for _ in rows], rows)

    def _part_writers(self, stack: ExitStack, batch: Batch, part: int) -> list[PartWriter] | None:
        """One for each shard, or None if a shard has no way without staging."""
        writers: list[PartWriter] = []
        for shard in self.shards:
            writer = open_part_writer(shard.url.raw, batch, part, **shard.options)
            if writer is None:
                return None
            writers.append(stack.enter_context(writer))
        return writers

    def _write_part(
        self, batch: Batch, writers: Sequence[PartWriter], batches: Iterator[pyarrow.RecordBatch]
    ) -> Loaded:
        """Write without staging: these rows need not appear together with the other partitions."""
        queues = self._load_rows(lambda shard, rows: writers[shard].load(rows), batches)
        rows = [
            writer.commit(queues, routed=shard.record).rows for shard, writer in zip(self.shards, writers, strict=True)
        ]
        return Loaded(batch, [{} for _ in rows], rows)

    def _load_rows(
        self, take: Callable[[int, pyarrow.Table], None], batches: Iterator[pyarrow.RecordBatch]
    ) -> set[str]:
        """Pass the rows as messages to `take`, by shard; returns their queues."""
        buffers = RowBuffers(len(self.shards), take, given=self._layout.given, map_=self.shards[0].map)
        for rows in self._messages(batches):
            buffers.add(rows)
        buffers.flush()
        return buffers.queues

    def _messages(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            if len(self.shards) > 1 and self._layout.given and batch.column(self._layout.places["id"]).null_count:
                raise InvalidMessage("the column 'id' has nulls: with several databases every row needs an id")
            if batch.num_rows:
                yield messages(self._layout, batch, self._body_limit)

    # --- on the driver ------------------------------------------------------------------------------

    def commit(self, batch: Batch, loaded: Sequence[Loaded]) -> list[Written]:
        """Publish the batch; returns the result of each shard."""
        return asyncio.run(self._publish(batch, WHOLE, loaded))

    def abort(self, batch: Batch) -> None:
        asyncio.run(self._each(lambda bulk, _: bulk.collect(batch), by_map=False))

    async def _publish(self, batch: Batch, part: int, loaded: Sequence[Loaded]) -> list[Written]:
        async def publish(bulk: Bulk, shard: int) -> Written:
            written = await bulk.publish(
                batch,
                {lot: rows for one in loaded for lot, rows in one.lots[shard].items()},
                part=part,
                given=self._layout.given,
                others=sum(one.others[shard] for one in loaded),
                queues={queue for one in loaded for queue in one.queues},
                routed=self.shards[shard].record,
            )
            if part == WHOLE:
                await bulk.collect(batch)
            return written

        found = await self._each(publish)
        for written in found:
            if written.again:
                log.warning("%s: batch %s had been published before; nothing was written", batch.writer, batch.number)
            elif written.rows > written.new and self._layout.given:
                old = written.rows - written.new
                log.warning("%s: ids published before: %s of %s rows", batch.writer, old, written.rows)
        return found

    async def _each(self, do: Callable[[Bulk, int], Awaitable[T]], *, by_map: bool = True) -> list[T]:
        """Run on all shards in parallel. A failure on one does not interrupt the others.

        `by_map`: nothing begins if a shard has a map that places the rows elsewhere. The batch is then routed anew when
        it is repeated, and a shard that had published its part would find other rows in it.
        """
        stores = await asyncio.gather(*map(_open, self.shards), return_exceptions=True)
        try:
            for shard, store in zip(self.shards, stores, strict=True):
                if by_map and not isinstance(store, BaseException):
                    check_routed(getattr(store, "shard", None), shard.record, str(shard.url))

            async def on(shard: SparkShard, store: Transport | BaseException) -> T:
                if isinstance(store, BaseException):
                    raise store
                return await do(store.bulk, shard.number)

            return await gather_all(map(on, self.shards, stores))
        finally:
            await gather_all(store.close() for store in stores if not isinstance(store, BaseException))


async def _open(shard: SparkShard) -> Transport:
    options = {**shard.store_options, "busy_timeout": _LOCK_WAIT}
    return await connect(shard.url.raw, call_timeout=_LONGEST_CALL, **options)


_BATCH, _STREAM = "df.write", "df.writeStream"
_HOW = {_BATCH: '.mode("append")', _STREAM: '.outputMode("append")'}


class BatchWriter(DataSourceArrowWriter):
    """The writer of one `df.write`."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        options = SparkOptions(given, (*_OPTIONS, "txn"), of="a write")
        self._sink = Sink(options, schema, overwrite, what=_BATCH)
        txn = options.get("txn")
        if txn is not None and (not txn or len(check_text(txn, "txn")) > _LONGEST_TXN):
            raise InvalidOption(f"the option 'txn' must have 1 to {_LONGEST_TXN} characters")
        # Made here, on the driver: all tasks of this write and its commit have the same.
        self._batch = Batch(f"txn:{txn}" if txn is not None else f"write:{uuid4()}")

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Loaded:
        return self._sink.write(self._batch, _task().partitionId(), iterator)

    @short_trace
    def commit(self, messages: list[Loaded | None]) -> None:  # type: ignore[override]
        self._sink.commit(self._batch, [message for message in messages if message is not None])

    def abort(self, messages: list[Loaded | None]) -> None:  # type: ignore[override]
        self._sink.abort(self._batch)


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of a query. Spark makes one to plan the tasks and another for each commit."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        options = SparkOptions(given, (*_OPTIONS, *_STREAM_OPTIONS), of="a stream's write")
        if options.flag("asyncProgressTrackingEnabled", False):
            raise InvalidOption(
                "asyncProgressTrackingEnabled is not supported, as Spark could forget published batches: leave it out"
            )
        self._sink = Sink(options, schema, overwrite, what=_STREAM)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Loaded:
        task = _task()
        # The query's id is stored in its checkpoint and survives restarts.
        query, number = (task.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        if not query or not number:
            raise Unsupported("Spark does not give this task the id and batch number of its query; use foreachBatch")
        return self._sink.write(Batch(f"query:{query}", int(number)), task.partitionId(), iterator)

    @short_trace
    def commit(self, messages: list[Loaded | None], batchId: int) -> None:  # type: ignore[override]
        loaded = [message for message in messages if message is not None]
        for batch in {message.batch for message in loaded}:
            self._sink.commit(batch, loaded)

    def abort(self, messages: list[Loaded | None], batchId: int) -> None:  # type: ignore[override]
        # Without any message the batch is unknown here: the query's next commit collects its lots.
        for batch in {message.batch for message in messages if message is not None}:
            self._sink.abort(batch)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "write runs in a task"
    return task
