"""The streaming source as Spark calls it: `spark.readStream.format("millpond")`.

Spark makes a reader in a process of the driver, which lives as long as the query, and others in processes that only
plan: nothing may happen in `__init__`. Tasks have a copy, which knows no more than its options and its partition.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from millpond.errors import ClaimLost, InvalidOption
from millpond.loop import LoopThread
from millpond.spark.driver import Offset, StreamDriver, Wanted
from millpond.spark.kept import kept_fetcher
from millpond.spark.options import Options
from millpond.spark.schema import chosen, stream_columns
from millpond.transport import Settlement, Slice
from millpond.transports.database.fetch import select
from millpond.transports.database.stream_claims import slice_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

T = TypeVar("T")

STREAM_OPTIONS = (
    *("stream", "queue", "maxMessagesPerTrigger", "maxOffsetsPerTrigger", "minPartitions"),
    *("failOnDataLoss", "ackMode", "unsettled", "includeHeaders"),
)
_SETTLEMENTS: Mapping[str, Settlement] = {"ack": "ack", "nack": "nack", "fail": "reject"}
_MOST = 10_000_000


class Part(InputPartition):
    """One slice of one shard's claim: what a task reads."""

    def __init__(self, shard: int, stream: int, seq: int, part: Slice) -> None:
        super().__init__((shard, seq, str(part.first)))
        self.shard = shard
        self.stream = stream
        self.seq = seq
        self.part = part


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's calls, one after the other, as calls of the stream's driver."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options = Options(given, STREAM_OPTIONS, of="a stream")
        self._shards = options.shards()
        self._schema = schema
        chosen(stream_columns(), schema, "a stream")
        limit = options.either("maxMessagesPerTrigger", "maxOffsetsPerTrigger")
        self._limit = options.whole(limit, 10_000, 1, _MOST)
        options.flag("includeHeaders", True)  # the schema is made by it
        manual = options.choice("ackMode", ("commit", "manual"), "commit") == "manual"
        if options.given("unsettled") is not None and not manual:
            raise InvalidOption("the option 'unsettled' is for ackMode=manual; otherwise every message is acked")
        unsettled = options.choice("unsettled", tuple(_SETTLEMENTS), "nack" if manual else "ack")
        self._wanted = Wanted(
            stream=options.required("stream"),
            queues=options.queues(),
            min_partitions=options.whole("minPartitions", 1, 1, 100_000),
            unsettled=_SETTLEMENTS[unsettled],
            fail_on_data_loss=options.flag("failOnDataLoss", True),
        )
        self._loop: LoopThread | None = None
        self._driver: StreamDriver | None = None
        self._seq = 0

    # --- in the driver ------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._run(self.driver.stop_at_now())

    def initialOffset(self) -> Offset:
        return self._run(self.driver.initial())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        # The engine may pass another kind of limit than that we asked for.
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else self._limit
        latest = self._run(self.driver.latest(start, most))
        self._seq = latest["seq"]
        return latest

    def reportLatestOffset(self) -> Offset:
        return {"stream": self._wanted.stream, "seq": self._seq, "waiting": self._run(self.driver.waiting())}

    def partitions(self, start: Offset, end: Offset) -> list[Part]:
        claims = self._run(self.driver.claims(start, end))
        return [Part(shard.number, claim.stream, claim.seq, part) for shard, claim in claims for part in claim.slices]

    def commit(self, end: Offset) -> None:
        """Mostly nothing is left to do: who asked for the next batch has acknowledged this one, or is about to."""
        self._run(self.driver.committed(end))

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
        return StreamDriver(self._shards, self._wanted)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """On one event loop, where the connections live. It runs on between calls: what is begun there goes on."""
        if self._loop is None:
            self._loop = LoopThread()
        return self._loop.wait_for(work)

    # --- in tasks -----------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """The rows of a slice, and last of all whether they were all."""
        assert isinstance(partition, Part)
        shard = self._shards[partition.shard]
        columns = chosen(stream_columns(shard.number), self._schema, "a stream")
        rows = 0
        with kept_fetcher(shard) as fetcher:
            rest, values = slice_of(fetcher.dialect, partition.stream, partition.seq, partition.part)
            for batch in fetcher.batches(select(columns, rest), values, columns):
                rows += batch.num_rows
                yield batch
        if rows != partition.part.messages and self._wanted.fail_on_data_loss:
            raise ClaimLost(
                f"stream {self._wanted.stream!r}: a slice of claim {partition.seq} on shard {partition.shard} has "
                f"{rows:,} messages, not {partition.part.messages:,}: the claim was released, or changed by hand, "
                "while this task read it; nothing of it is committed"
            )
