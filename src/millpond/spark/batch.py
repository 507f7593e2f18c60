"""`spark.read.format("millpond")`: live messages or the archive, read by executors straight from the databases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from millpond.errors import InvalidOption, StoreError
from millpond.spark import filters
from millpond.spark.kept import kept_fetcher
from millpond.spark.options import BATCH_OPTIONS, Options, Shard
from millpond.spark.schema import batch_columns, chosen
from millpond.transports.database.fetch import Read, Slice, check
from millpond.transports.database.fetch.conditions import Condition

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


@dataclass(repr=False)
class ShardSlice(InputPartition):
    """What one task reads. Its text shows no password."""

    shard: Shard
    slice: Slice


class BatchReader(DataSourceReader):
    """Plans on the driver, reads in tasks; between the two travel only slices."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options = Options(given, BATCH_OPTIONS, of="a batch read")
        self._shards = options.shards()
        self._table = options.choice("table", ("messages", "archive"), "messages")
        self._at_least = options.whole("minPartitions", 1, 1, 100_000)
        self._snapshot = options.flag("snapshot", True)
        self._schema = schema
        self._conditions: list[Condition] = []
        chosen(batch_columns(self._table), schema, f"the table {self._table!r}")
        if options.names("columns") and schema.names != list(dict.fromkeys(options.names("columns"))):
            raise InvalidOption("give either .schema(…) or the option 'columns', not both")

    def partitions(self) -> list[ShardSlice]:
        # Rounded up: so many in all, over the shards.
        read = Read(self._table, self._conditions, -(-self._at_least // len(self._shards)), self._snapshot)
        found = []
        for shard in self._shards:
            with kept_fetcher(shard) as fetcher:
                check(fetcher, shard.url)
                found += [ShardSlice(shard, part) for part in fetcher.slices(read)]
        return found

    def read(self, partition: ShardSlice) -> Iterator[pyarrow.RecordBatch]:  # type: ignore[override]
        shard = partition.shard
        columns = chosen(batch_columns(self._table, shard.number), self._schema, f"the table {self._table!r}")
        with kept_fetcher(shard) as fetcher:
            for piece in partition.slice:
                yield from fetcher.read(piece, columns)
                if piece.unmoved is not None and fetcher.rows(piece.unmoved, {})[0][0]:
                    raise StoreError(
                        f"a partition of the archive at {shard.url} was rewritten (VACUUM FULL, CLUSTER) or emptied "
                        "while it was read: read it again"
                    )


class PushingReader(BatchReader):
    """With filters that the database answers."""

    def pushFilters(self, filters_: list[Filter]) -> Iterable[Filter]:
        columns = {column.name: column for column in batch_columns(self._table)}
        for filter_ in filters_:
            found = filters.condition(filter_, columns)
            if found is not None:
                self._conditions.append(found)
            if found is None or not filters.exact(found, columns):
                yield filter_
