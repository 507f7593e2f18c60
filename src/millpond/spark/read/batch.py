"""`spark.read.format("millpond")`: executors read live messages or the archive directly from the databases."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from millpond.errors import InvalidOption
from millpond.seam.arrow import Condition, Read, Slice
from millpond.spark.columns import batch_columns, select_columns
from millpond.spark.connection_cache import IDLE, cached_reader
from millpond.spark.options import BATCH_OPTIONS, SparkOptions, SparkShard
from millpond.spark.read import filters
from millpond.spark.short_traces import short_trace

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


log = logging.getLogger("millpond")

T = TypeVar("T")


def dealt(parts: Sequence[T], most: int | None) -> list[Sequence[T]]:
    """The parts of a read, dealt out to at most this number of tasks.

    >>> dealt("abcde", 2)
    ['ace', 'bd']
    """
    tasks = min(len(parts), most or len(parts))
    return [parts[n::tasks] for n in range(tasks)]


@dataclass(repr=False)
class ShardSlice(InputPartition):
    """The slice of one task. Its repr shows no password."""

    shard: SparkShard
    slice: Slice


class BatchReader(DataSourceReader):
    """Plans on the driver and reads in tasks; only slices are sent between the two."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options = SparkOptions(given, BATCH_OPTIONS, of="a batch read")
        self._table = options.choice("table", ("messages", "archive"), "messages")
        self._at_least = options.integer("minPartitions", 1, 1, 100_000)
        self._snapshot = options.flag("snapshot", True)
        self._max_connections = options.max_connections()
        self._idle = options.seconds("idleTimeout", IDLE)
        self._shards = options.shards()  # last: it may connect, and the other options are right then
        self._schema = schema
        self._conditions: list[Condition] = []
        select_columns(batch_columns(self._table), schema, f"the table {self._table!r}")
        named = options.names("columns")
        if named and named != schema.names:
            raise InvalidOption("give either .schema(…) or the option 'columns', not both")

    @short_trace
    def partitions(self) -> list[ShardSlice]:
        # The minimum is the total over all shards, rounded up.
        read = Read(self._table, self._conditions, -(-self._at_least // len(self._shards)), self._snapshot)
        most = self._max_connections and max(1, self._max_connections // len(self._shards))
        found = []
        for shard in self._shards:
            with cached_reader(shard, self._idle) as reader:
                reader.check()
                slices = dealt(reader.slices(read), most)
                found += [ShardSlice(shard, [piece for part in some for piece in part]) for some in slices]
        if self._snapshot and len(found) < min(self._at_least, self._max_connections or self._at_least):
            log.warning(
                "minPartitions=%d, and the read has %d parts, because one snapshot of %s is one statement here; "
                "snapshot=false reads more parts, each with its own snapshot",
                *(self._at_least, len(found), self._table),
            )
        return found

    def read(self, partition: ShardSlice) -> Iterator[pyarrow.RecordBatch]:  # type: ignore[override]
        shard = partition.shard
        columns = select_columns(batch_columns(self._table, shard.number), self._schema, f"the table {self._table!r}")
        with cached_reader(shard, self._idle) as reader:
            yield from reader.read(partition.slice, columns)


class PushingReader(BatchReader):
    """A reader with filters that the database evaluates."""

    def pushFilters(self, filters_: list[Filter]) -> Iterable[Filter]:
        columns = {column.name: column for column in batch_columns(self._table)}
        for filter_ in filters_:
            found = filters.condition(filter_, columns)
            if found is not None:
                self._conditions.append(found)
            if found is None or not filters.exact(found, columns):
                yield filter_
