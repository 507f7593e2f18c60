"""`spark.readStream.format("millpond")`: the streaming source with the methods that Spark calls.

Spark makes one reader in a driver process that lives as long as the query, and others in processes that only plan. So
`__init__` must have no effect. Each task has a copy, with nothing but the options and its partition.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millpond.errors import ClaimLost, InvalidOption
from millpond.loop import LoopThread
from millpond.seam.streams import ClaimSlice, Settlement
from millpond.spark.columns import select_columns, stream_columns
from millpond.spark.connection_cache import IDLE, cached_reader
from millpond.spark.options import TASK_OPTIONS, SparkOptions
from millpond.spark.read.batch import dealt
from millpond.spark.short_traces import short_trace
from millpond.spark.stream.driver import Offset, StreamDriver, StreamOptions

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

T = TypeVar("T")

STREAM_OPTIONS = (
    *("stream", "queue", "maxMessagesPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger"),
    *("minMessagesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions"),
    *("failOnDataLoss", "ackMode", "unsettled", "includeHeaders", "adoptOpenBatch", *TASK_OPTIONS),
)
_SETTLEMENTS: Mapping[str, Settlement] = {"ack": "ack", "nack": "nack", "fail": "reject"}
_MOST = 10_000_000
_MOST_BYTES = 1 << 40
_DELAY = 15 * 60.0
"""Seconds, as in Spark's Kafka source."""
_ONCE = (
    "Trigger.Once delivers one batch of maxMessagesPerTrigger messages, and leaves it claimed until the next start; "
    "availableNow=True delivers all messages in several batches and leaves none claimed"
)
log = logging.getLogger("millpond")


@dataclass
class StreamPartition(InputPartition):
    """Slices of one shard's claim, for one task."""

    shard: int
    stream: int
    seq: int
    slices: Sequence[ClaimSlice]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Passes Spark's calls to the driver of the stream."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options = SparkOptions(given, STREAM_OPTIONS, of="a stream")
        self._schema = schema
        select_columns(stream_columns(), schema, "a stream")
        limit = options.either("maxMessagesPerTrigger", "maxOffsetsPerTrigger")
        self._limit = options.integer(limit, 10_000, 1, _MOST)
        least = options.either("minMessagesPerTrigger", "minOffsetsPerTrigger")
        min_messages = options.integer(least, 0, 0, _MOST)
        if min_messages > self._limit:
            raise InvalidOption(f"{least!r} is {min_messages:,}, more than {limit!r}, {self._limit:,}")
        if options.get("maxTriggerDelay") is not None and not min_messages:
            raise InvalidOption(f"the option 'maxTriggerDelay' needs {least!r}, for which a batch waits")
        most_bytes = options.integer("maxBytesPerTrigger", 0, 1, _MOST_BYTES)
        options.flag("includeHeaders", True)  # used for the schema only
        manual = options.choice("ackMode", ("commit", "manual"), "commit") == "manual"
        if options.get("unsettled") is not None and not manual:
            raise InvalidOption("the option 'unsettled' is for ackMode=manual; otherwise every message is acked")
        unsettled = options.choice("unsettled", tuple(_SETTLEMENTS), "nack" if manual else "ack")
        self._options = StreamOptions(
            stream=options.require("stream"),
            queues=options.queues(),
            min_partitions=options.integer("minPartitions", 1, 1, 100_000),
            unsettled=_SETTLEMENTS[unsettled],
            fail_on_data_loss=options.flag("failOnDataLoss", True),
            max_bytes=most_bytes or None,
            min_messages=min_messages,
            max_delay=options.seconds("maxTriggerDelay", _DELAY),
            adopt=options.flag("adoptOpenBatch", False),
        )
        self._max_connections = options.max_connections()
        self._idle = options.seconds("idleTimeout", IDLE)
        self._shards = options.shards()  # last: it may connect, and the other options are right then
        self._loop: LoopThread | None = None
        self._driver: StreamDriver | None = None
        self._seq = 0

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._limit)

    @short_trace
    def prepareForTriggerAvailableNow(self) -> None:
        self._run(self.driver.stop_at_now())

    @short_trace
    def initialOffset(self) -> Offset:
        return self._run(self.driver.initial())

    @short_trace
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        # The engine may pass another kind of limit than the one of getDefaultReadLimit.
        if isinstance(limit, ReadAllAvailable) and not self._seq:
            log.warning(_ONCE)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._limit
        latest = self._run(self.driver.latest(start, most))
        self._seq = latest["seq"]
        return latest

    @short_trace
    def reportLatestOffset(self) -> Offset:
        return {"stream": self._options.stream, "seq": self._seq, **self._run(self.driver.metrics())}

    @short_trace
    def partitions(self, start: Offset, end: Offset) -> list[StreamPartition]:
        claims = self._run(self.driver.claims(start, end))
        most = self._max_connections and max(1, self._max_connections // max(1, len(claims)))
        return [
            StreamPartition(shard.number, claim.stream, claim.seq, some)
            for shard, claim in claims
            for some in dealt(claim.slices, most)
        ]

    @short_trace
    def commit(self, end: Offset) -> None:
        """Usually a no-op: `latestOffset` of the next batch has acknowledged this one or is doing so."""
        self._run(self.driver.commit(end))

    def stop(self) -> None:
        if self._driver is not None and self._loop is not None:
            try:
                self._loop.wait_for(self._driver.close())
            finally:
                self._loop.end()
                self._driver = self._loop = None

    @property
    def driver(self) -> StreamDriver:
        if self._driver is None:
            self._driver = self.make_driver()
        return self._driver

    def make_driver(self) -> StreamDriver:
        return StreamDriver(self._shards, self._options)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the event loop of the connections. The loop and its tasks keep running between calls."""
        if self._loop is None:
            self._loop = LoopThread()
        return self._loop.wait_for(work)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The rows of a slice, in a task. Raises at the end if some are missing."""
        assert isinstance(partition, StreamPartition)
        shard = self._shards[partition.shard]
        columns = select_columns(stream_columns(shard.number), self._schema, "a stream")
        rows, expected = 0, sum(slice_.messages for slice_ in partition.slices)
        with cached_reader(shard, self._idle) as reader:
            for slice_ in partition.slices:
                for batch in reader.read_claim(partition.stream, partition.seq, slice_, columns):
                    rows += batch.num_rows
                    yield batch
        if rows != expected and self._options.fail_on_data_loss:
            raise ClaimLost(
                f"stream {self._options.stream!r}: a slice of claim {partition.seq} on shard {partition.shard} has "
                f"{rows:,} messages, not {expected:,}: the claim was released, or changed by hand, "
                "while this task read it; nothing of it is committed"
            )
