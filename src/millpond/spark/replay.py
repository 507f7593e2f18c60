"""Publishing settled messages again, those that a filter in Spark's SQL selects; by executors, and each once.

A replayed message has an id made of the old one and the replay's name, as with `Store.replay`: run again under the
same name, after whatever went wrong, a replay publishes what it has not published yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

import msgspec

from millpond.clock import as_datetime
from millpond.errors import InvalidOption, StoreError
from millpond.message import check_name, replayed_headers, replayed_id
from millpond.spark.options import Options
from millpond.spark.settled import settled_messages

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from millpond.spark.sink import Sink

T = TypeVar("T")

_READ = ("id", "queue", "key", "priority", "headers", "payload")
_WRITTEN = {
    "id": "string",
    "queue": "string",
    "key": "string",
    "priority": "integer",
    "headers": "string",
    "payload": "binary",
    "due_at": "timestamp",
}


class Replayed(msgspec.Struct, frozen=True):
    """What came of a replay."""

    selected: int
    published: int
    """How many this run published; the rest had been published under the same name before."""


def selected(
    spark: SparkSession, where: str, *, lake: str | None = None, database: Mapping[str, str] | None = None
) -> DataFrame:
    """The settled messages that the filter selects, with all their columns."""
    from pyspark.errors import AnalysisException

    messages = settled_messages(spark, lake=lake, database=database)
    try:
        # In brackets: of "state = 'FAILED' AND" Spark alone would make a filter whose name is AND.
        return messages.where(f"({where}\n)")
    except AnalysisException as e:
        columns = ", ".join(f"{field.name} ({field.dataType.simpleString()})" for field in messages.schema.fields)
        wrong = " ".join(str(e).split("\n\n== SQL")[0].split(";\n")[0].split())
        raise InvalidOption(f"the filter {where!r} cannot be used: {wrong} The columns are {columns}") from None


def counts(messages: DataFrame) -> list[dict[str, Any]]:
    """How many are selected, by queue and state: what a dry run tells."""
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

    They appear as a whole in each database. With `rate` they fall due one after the other, so many in a second at
    most: it is the queue that holds them back, not this job.
    """
    from millpond.spark.sink import Loaded, Sink
    from millpond.transports.database.staging import Batch

    check_name(name, "name")
    if to is not None:
        check_name(to, "queue")
    if rate is not None and not rate > 0:
        raise InvalidOption(f"the rate must be more than 0 messages per second, not {rate}")
    spark = messages.sparkSession
    sink = Sink(Options(database, (), of="a replay"), _written(), False, what="a replay")
    batch = Batch(f"replay:{uuid4()}")
    rows = messages.select(*_READ)
    pace = None
    if rate is not None:
        lanes = spark.sparkContext.defaultParallelism
        # A known number of lanes, filled alike: each lets its share of the rate pass.
        rows, pace = rows.repartition(lanes), Pace(_now(sink), lanes / rate, 1 / rate)
    try:
        told = rows.mapInArrow(Publisher(sink, batch, name, to, pace), "loaded binary").collect()
        loaded = [msgspec.json.decode(row["loaded"], type=Loaded) for row in told]
        written = _apart(lambda: sink.commit(batch, loaded))
    except BaseException:
        with contextlib.suppress(StoreError):  # what is left is collected by the next purge
            _apart(lambda: sink.abort(batch))
        raise
    return Replayed(sum(one.rows for one in written), sum(one.new for one in written))


def _apart(work: Callable[[], T]) -> T:
    """In a thread: the sink runs an event loop of its own, and a notebook has one running here already."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


def _written() -> StructType:
    from pyspark.sql.types import StructType

    schema = StructType()
    for name, type_ in _WRITTEN.items():
        schema = schema.add(name, type_)
    return schema


def _now(sink: Sink) -> datetime:
    from millpond.transports.database.fetch import now

    with sink.shards[0].fetcher() as fetcher:
        return as_datetime(now(fetcher))


class Pace(msgspec.Struct, frozen=True):
    """When the messages of each lane fall due: one after the other, and the lanes in turns."""

    start: datetime
    step: float
    """Seconds between two messages of a lane."""
    shift: float
    """Seconds between two lanes."""

    def due_at(self, lane: int, number: int) -> datetime:
        return self.start + timedelta(seconds=number * self.step + lane * self.shift)


class Publisher:
    """What a task does with its part: it loads the messages that they become, and tells what it loaded."""

    def __init__(self, sink: Sink, batch: Any, name: str, to: str | None, pace: Pace | None) -> None:
        self._sink = sink
        self._batch = batch
        self._name = name
        self._to = to
        self._pace = pace

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        task = TaskContext.get()
        part = task.partitionId() if task is not None else 0
        loaded = self._sink.write(self._batch, part, self._messages(batches, part))
        yield pa.record_batch([pa.array([msgspec.json.encode(loaded)], pa.binary())], names=["loaded"])

    def _messages(self, batches: Iterator[pyarrow.RecordBatch], lane: int) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        number = 0
        for batch in batches:
            rows = batch.num_rows
            originals = [UUID(id_) for id_ in batch.column("id").to_pylist()]
            due = [self._pace.due_at(lane, number + n) if self._pace else None for n in range(rows)]
            headers = [
                replayed_headers(text, original)
                for text, original in zip(batch.column("headers").to_pylist(), originals, strict=True)
            ]
            yield pa.record_batch(
                {
                    "id": pa.array([str(replayed_id(original, self._name)) for original in originals], pa.string()),
                    "queue": batch.column("queue") if self._to is None else pa.repeat(self._to, rows),
                    "key": batch.column("key"),
                    "priority": batch.column("priority"),
                    "headers": pa.array(headers, pa.string()),
                    "payload": batch.column("payload"),
                    "due_at": pa.array(due, pa.timestamp("us", "UTC")),
                }
            )
            number += rows
