"""`df.write.format("millpond")` and `df.writeStream.format("millpond")`: bulk publish from executors, exactly once.

Tasks load their rows into the staging tables; nobody claims from there. The driver's commit publishes what the
tasks say they loaded, in one transaction for each database, which also notes the batch: a batch that comes again
finds itself published. With `atomic=false` each task publishes its own partition in this way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from millpond.errors import InvalidMessage, InvalidOption, Unsupported
from millpond.message import BODY_LIMIT, check_text
from millpond.spark.options import Options, Shard
from millpond.transports import connect
from millpond.transports.database.options import TRANSACTION_LIMIT
from millpond.transports.database.staging import WHOLE, Batch, Written

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from millpond.transports.database.store import DatabaseStore

log = logging.getLogger("millpond")

_OPTIONS = ("queue", "atomic", "bodyLimit", "pooler")
_STREAM_OPTIONS = ("checkpointLocation", "asyncProgressTrackingEnabled", "asyncProgressTrackingCheckpointIntervalMs")
_LONGEST_TXN = 200
_LONGEST_CALL = 3600
"""Seconds that publishing a batch in one database may take."""
_LOCK_WAIT = 60


@dataclass
class Loaded(WriterCommitMessage):
    """What one task loaded, of each shard."""

    batch: Batch
    given: bool
    lots: list[dict[int, int]] = field(default_factory=list)
    """Lot -> rows."""
    copies: list[int] = field(default_factory=list)
    queues: set[str] = field(default_factory=set)


class Sink:
    """What a batch and a stream have in common. Made on the driver, and sent to the tasks."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool, *, what: str) -> None:
        from millpond.spark.rows import layout

        if overwrite:
            raise InvalidOption(f"{what} only adds messages: use {_HOW[what]}; nothing is ever overwritten")
        self.shards = options.shards()
        self.atomic = options.flag("atomic", True)
        self._body_limit = options.whole("bodyLimit", BODY_LIMIT, 1, TRANSACTION_LIMIT)
        self._pooler = options.flag("pooler", False)
        queues = options.queues() if options.given("queue") else [None]
        if len(queues) > 1:
            raise InvalidOption("a message is in one queue: give one name by the option 'queue', or a column 'queue'")
        self._layout = layout(schema, queues[0])

    # --- in tasks -----------------------------------------------------------------------------------

    def write(self, batch: Batch, part: int, batches: Iterator[pyarrow.RecordBatch]) -> Loaded:
        """Load the rows of a partition; publish them too, unless the driver does."""
        from millpond.spark.lots import Lots
        from millpond.transports.database.load import has_parts

        given = self._layout.given
        if not self.atomic and not given and all(has_parts(shard.url) for shard in self.shards):
            return self._write_part(batch, part, batches)
        with Lots(self.shards, batch, given=given) as lots:
            queues = self._pile(lots.load, batches)
        loaded = Loaded(batch, given, lots.numbers, lots.copies, queues)
        if not self.atomic:
            asyncio.run(self._publish(batch, part, [loaded]))
        return loaded

    def _write_part(self, batch: Batch, number: int, batches: Iterator[pyarrow.RecordBatch]) -> Loaded:
        """Without staging: nobody waits for the other partitions."""
        from millpond.transports.database.load import open_part

        with ExitStack() as open_:
            parts = [open_.enter_context(open_part(s.url, batch, number, **s.options)) for s in self.shards]
            queues = self._pile(lambda shard, rows: parts[shard].load(rows), batches)
            for part in parts:
                part.commit(queues)
        return Loaded(batch, False)

    def _pile(self, take: Callable[[int, pyarrow.Table], None], batches: Iterator[pyarrow.RecordBatch]) -> set[str]:
        """Hand the rows on as messages; returns their queues."""
        from millpond.spark.lots import Piles

        piles = Piles(len(self.shards), take, given=self._layout.given)
        for rows in self._messages(batches):
            piles.add(rows)
        piles.flush()
        return piles.queues

    def _messages(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        from millpond.spark.rows import messages

        for batch in batches:
            if len(self.shards) > 1 and self._layout.given and batch.column(self._layout.places["id"]).null_count:
                raise InvalidMessage("where rows go to several databases by their ids, the column 'id' has no nulls")
            if batch.num_rows:
                yield messages(self._layout, batch, self._body_limit)

    # --- on the driver ------------------------------------------------------------------------------

    def commit(self, batch: Batch, loaded: Sequence[Loaded]) -> list[Written]:
        """Publish the batch; returns what came of it, of each shard."""
        return asyncio.run(self._publish(batch, WHOLE, loaded if self.atomic else []))

    def abort(self, batch: Batch) -> None:
        asyncio.run(self._each(lambda store, _: store.collect(batch)))

    async def _publish(self, batch: Batch, part: int, loaded: Sequence[Loaded]) -> list[Written]:
        async def publish(store: DatabaseStore, shard: int) -> Written:
            written = await store.publish_lots(
                batch,
                {lot: rows for one in loaded for lot, rows in one.lots[shard].items()},
                part=part,
                given=any(one.given for one in loaded),
                copies=sum(one.copies[shard] for one in loaded),
                queues={queue for one in loaded for queue in one.queues},
            )
            if part == WHOLE:
                await store.collect(batch)
            return written

        found: list[Written] = await self._each(publish)
        for written in found:
            if written.again:
                log.warning("%s: batch %s had been published before; nothing was written", batch.writer, batch.number)
            elif written.rows > written.new and self._layout.given:
                log.warning(
                    "%s: of %s rows %s had ids that were published before",
                    batch.writer,
                    written.rows,
                    written.rows - written.new,
                )
        return found

    async def _each(self, do: Any) -> list[Any]:
        """On all shards at once; one that fails keeps no other from its end."""

        async def on(shard: Shard) -> Any:
            options = {**shard.options, "pooler": self._pooler, "busy_timeout": _LOCK_WAIT}
            store: Any = await connect(shard.url.raw, call_timeout=_LONGEST_CALL, **options)
            try:
                return await do(store, shard.number)
            finally:
                await store.close()

        found = await asyncio.gather(*map(on, self.shards), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found


_BATCH, _STREAM = "df.write", "df.writeStream"
_HOW = {_BATCH: '.mode("append")', _STREAM: '.outputMode("append")'}


class BatchWriter(DataSourceArrowWriter):
    """Of one `df.write`."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        options = Options(given, (*_OPTIONS, "txn"), of="a write")
        self._sink = Sink(options, schema, overwrite, what=_BATCH)
        txn = options.given("txn")
        if txn is not None and (not txn or len(check_text(txn, "txn")) > _LONGEST_TXN):
            raise InvalidOption(f"the option 'txn' must have 1 to {_LONGEST_TXN} characters")
        # Drawn here, on the driver: all tasks of this write and its commit have the same.
        self._batch = Batch(f"txn:{txn}" if txn is not None else f"write:{uuid4()}")

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Loaded:
        return self._sink.write(self._batch, _task().partitionId(), iterator)

    def commit(self, messages: list[Loaded | None]) -> None:  # type: ignore[override]
        self._sink.commit(self._batch, [message for message in messages if message is not None])

    def abort(self, messages: list[Loaded | None]) -> None:  # type: ignore[override]
        self._sink.abort(self._batch)


class StreamWriter(DataSourceStreamArrowWriter):
    """Of a query. One is made to plan its tasks, and another for each commit."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        options = Options(given, (*_OPTIONS, *_STREAM_OPTIONS), of="a stream's write")
        if options.flag("asyncProgressTrackingEnabled", False):
            raise InvalidOption(
                "asyncProgressTrackingEnabled would let batches be forgotten that were published: leave it out"
            )
        self._sink = Sink(options, schema, overwrite, what=_STREAM)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Loaded:
        task = _task()
        # The query's id is that of its checkpoint, and outlives restarts.
        query, number = (task.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
        if not query or not number:
            raise Unsupported("Spark does not tell this task which batch of which query it writes; use foreachBatch")
        return self._sink.write(Batch(f"query:{query}", int(number)), task.partitionId(), iterator)

    def commit(self, messages: list[Loaded | None], batchId: int) -> None:  # type: ignore[override]
        loaded = [message for message in messages if message is not None]
        for batch in {message.batch for message in loaded}:
            self._sink.commit(batch, loaded)

    def abort(self, messages: list[Loaded | None], batchId: int) -> None:  # type: ignore[override]
        # Without any message nobody knows whose batch it is: the query's next commit collects what it left.
        for batch in {message.batch for message in messages if message is not None}:
            self._sink.abort(batch)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "write runs in a task"
    return task
