"""The data source `millpond`: which reader or writer serves which of Spark's four ways in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from millpond.errors import InvalidOption
from millpond.spark import schema as columns

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class MillpondSource(DataSource):
    """As Spark finds it by itself, where nobody has said that filters may be pushed down.

    Each reader and writer is imported when it is asked for: Spark makes this class in many small processes.
    """

    @classmethod
    def name(cls) -> str:
        return "millpond"

    def schema(self) -> StructType:
        # Spark asks without saying whether it will read a batch or a stream; only a stream has a name.
        if "stream" in self.options:
            if "table" in self.options:
                raise InvalidOption("give either the option 'stream' (readStream) or 'table' (read), not both")
            return columns.stream_schema(self.options)
        return columns.batch_schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from millpond.spark.batch import BatchReader

        return BatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from millpond.spark.stream import StreamReader

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from millpond.spark.sink import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from millpond.spark.sink import StreamWriter

        return StreamWriter(self.options, schema, overwrite)


class PushingSource(MillpondSource):
    """As `register` makes it known: Spark refuses a reader that takes filters while its push-down is off."""

    def reader(self, schema: StructType) -> DataSourceReader:
        from millpond.spark.batch import PushingReader

        return PushingReader(self.options, schema)
