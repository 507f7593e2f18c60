"""Publishes settled messages again, once each, from executors. A filter in Spark SQL selects the messages.

A replayed message has an id derived from the old id and the replay's name, as with `operations.replay`. A replay that
failed can run again under the same name: it publishes only the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import msgspec

from millpond.errors import InvalidOption, StoreError
from millpond.loop import outside_loop
from millpond.message import LARGEST_BODY_LIMIT, check_name, replayed_headers, replayed_id
from millpond.seam.bulk import Batch
from millpond.spark.archive import settled_messages
from millpond.spark.options import SparkOptions

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

    from millpond.spark.write.sink import Sink

_READ = ("id", "queue", "key", "priority", "headers", "payload")
_WRITTEN = (*_READ, "due_at")


class Replayed(msgspec.Struct, frozen=True):
    """Result of a replay."""

    selected: int
    published: int
    """Number published by this run; the rest had been published under the same name before."""


def selected(
    spark: SparkSession,
    where: str,
    *,
    lake: str | None = None,
    database: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The settled messages that the filter selects, with all columns."""
    from pyspark.errors import AnalysisException

    messages = settled_messages(spark, lake=lake, database=database, storage_options=storage_options)
    try:
        # In parentheses: Spark would read "state = 'FAILED' AND" as an expression with the alias AND.
        return messages.where(f"({where}\n)")
    except AnalysisException as e:
        columns = ", ".join(f"{field.name} ({field.dataType.simpleString()})" for field in messages.schema.fields)
        wrong = " ".join(str(e).split("\n\n== SQL")[0].split(";\n")[0].split())
        raise InvalidOption(f"the filter {where!r} cannot be used: {wrong} The columns are {columns}") from None


def counts(messages: DataFrame) -> list[dict[str, Any]]:
    """Number of selected messages by queue and state, for a dry run."""
    found = messages.groupBy("queue", "state").count().orderBy("queue", "state").collect()
    return [{"queue": row["queue"], "state": row["state"], "messages": row["count"]} for row in found]


def replay(
    messages: DataFrame,
    *,
    name: str,
    database: Mapping[str, str],
    to: str | None = None,
    rate: float | None = None,
) -> Replayed:
    """Publish these settled messages again: into their own queues, or all into the queue `to`.

    In each database they appear all at once. With `rate` they become due one after the other, at most that many per
    second: the queue holds them back, not this job.
    """
    from millpond.spark.columns import batch_columns, named_columns, spark_schema
    from millpond.spark.write.sink import Loaded, Sink

    check_name(name, "name")
    if to is not None:
        check_name(to, "queue")
    if rate is not None and not rate > 0:
        raise InvalidOption(f"the rate must be more than 0 messages per second, not {rate}")
    spark = messages.sparkSession
    schema = spark_schema(named_columns(batch_columns("archive"), _WRITTEN, "the archive"))
    options = SparkOptions(database, (), of="a replay")
    # Their publishers had their own limits: one large body must not stop the replay of all others.
    sink = Sink(options, schema, False, what="a replay", body_limit=LARGEST_BODY_LIMIT)
    batch = Batch(f"replay:{uuid4()}")
    rows = messages.select(*_READ)
    pace = None
    if rate is not None:
        partitions = spark.sparkContext.defaultParallelism
        # A known number of equally filled partitions: each gets its share of the rate.
        rows, pace = rows.repartition(partitions), Pace(sink.shards[0].now(), partitions / rate, 1 / rate)
    try:
        rows_loaded = rows.mapInArrow(ReplayWriter(sink, batch, name, to, pace), "loaded binary").collect()
        loaded = [msgspec.json.decode(row["loaded"], type=Loaded) for row in rows_loaded]
        written = outside_loop(lambda: sink.commit(batch, loaded))
    except BaseException:
        with contextlib.suppress(StoreError):  # the next purge collects the rest
            outside_loop(lambda: sink.abort(batch))
        raise
    return Replayed(sum(one.rows for one in written), sum(one.new for one in written))


class Pace(msgspec.Struct, frozen=True):
    """Due times: partition p's n-th message is due n·step + p·shift seconds after the start."""

    start: datetime
    step: float
    """Seconds between two messages of a partition."""
    shift: float
    """Seconds between two partitions."""

    def due_at(self, partition: int, number: int) -> datetime:
        return self.start + timedelta(seconds=number * self.step + partition * self.shift)


@dataclass(frozen=True)
class ReplayWriter:
    """Loads the replayed messages of one partition, in a task, and returns a summary as one row."""

    sink: Sink
    batch: Batch
    name: str
    to: str | None
    pace: Pace | None

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        task = TaskContext.get()
        part = task.partitionId() if task is not None else 0
        loaded = self.sink.write(self.batch, part, self._messages(batches, part))
        yield pa.record_batch([pa.array([msgspec.json.encode(loaded)], pa.binary())], names=["loaded"])

    def _messages(self, batches: Iterator[pyarrow.RecordBatch], partition: int) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        number = 0
        for batch in batches:
            rows = batch.num_rows
            originals = [UUID(id_) for id_ in batch.column("id").to_pylist()]
            due = [self.pace.due_at(partition, number + n) if self.pace else None for n in range(rows)]
            headers = map(replayed_headers, batch.column("headers").to_pylist(), originals)
            yield pa.record_batch(
                {
                    "id": pa.array([str(replayed_id(original, self.name)) for original in originals], pa.string()),
                    "queue": batch.column("queue") if self.to is None else pa.repeat(self.to, rows),
                    "key": batch.column("key"),
                    "priority": batch.column("priority"),
                    "headers": pa.array(headers, pa.string()),
                    "payload": batch.column("payload"),
                    "due_at": pa.array(due, pa.timestamp("us", "UTC")),
                }
            )
            number += rows
