"""The data source `millpond`: readers and writers for batches and streams."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from millpond.errors import InvalidOption
from millpond.spark import columns
from millpond.spark.short_traces import short_trace

_OF_STREAMS = (
    *("queue", "maxMessagesPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minMessagesPerTrigger"),
    *("minOffsetsPerTrigger", "ackMode", "unsettled", "failOnDataLoss", "includeHeaders", "adoptOpenBatch"),
)


def _refuse_stream_options(given: Mapping[str, str]) -> None:
    """Spark asks for the schema of a read and of a readStream in the same way; the user meant one of them."""
    for name in _OF_STREAMS:
        if name in given or name.lower() in given:
            raise InvalidOption(
                f"the option {name!r} is for a stream, and the option 'stream' is missing. With readStream, give this "
                """consumer a name: .option("stream", "…"). With read, select rows: .where("queue = 'orders'")"""
            )


class MillpondSource(DataSource):
    """The source that Spark finds by itself, where filters may not be pushed down.

    Readers and writers are imported on demand: Spark creates this class in many short-lived processes.
    """

    @classmethod
    def name(cls) -> str:
        return "millpond"

    @short_trace
    def schema(self) -> StructType:
        # Spark does not pass on whether it will read a batch or a stream; only a stream has a name.
        if "stream" in self.options:
            if "table" in self.options:
                raise InvalidOption("give either the option 'stream' (readStream) or 'table' (read), not both")
            schema = columns.stream_schema(self.options)
            self.streamReader(schema)  # all options are checked at load, not at start
            return schema
        _refuse_stream_options(self.options)
        return columns.batch_schema(self.options)

    @short_trace
    def reader(self, schema: StructType) -> DataSourceReader:
        from millpond.spark.read.batch import BatchReader

        return BatchReader(self.options, schema)

    @short_trace
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from millpond.spark.stream.reader import StreamReader

        return StreamReader(self.options, schema)

    @short_trace
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from millpond.spark.write.sink import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    @short_trace
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from millpond.spark.write.sink import StreamWriter

        return StreamWriter(self.options, schema, overwrite)


class PushingSource(MillpondSource):
    """The source of `register`: Spark refuses a reader that takes filters while push-down is off."""

    @short_trace
    def reader(self, schema: StructType) -> DataSourceReader:
        from millpond.spark.read.batch import PushingReader

        return PushingReader(self.options, schema)
