"""The data source `millpond`: which reader or writer serves which of Spark's four ways in and out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from millpond.errors import InvalidOption, Unsupported
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
        made: DataSourceReader = _of("batch", "BatchReader", self.options, schema)
        return made

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        made: DataSourceStreamReader = _of("stream", "StreamReader", self.options, schema)
        return made

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        made: DataSourceWriter = _of("sink", "BatchWriter", self.options, schema, overwrite)
        return made

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        made: DataSourceStreamWriter = _of("sink", "StreamWriter", self.options, schema, overwrite)
        return made


class PushingSource(MillpondSource):
    """As `register` makes it known: Spark refuses a reader that takes filters while its push-down is off."""

    def reader(self, schema: StructType) -> DataSourceReader:
        made: DataSourceReader = _of("batch", "PushingReader", self.options, schema)
        return made


def _of(module: str, name: str, *arguments: Any) -> Any:
    try:
        return getattr(importlib.import_module(f"millpond.spark.{module}"), name)(*arguments)
    except ModuleNotFoundError as e:
        if e.name != f"millpond.spark.{module}":
            raise
        raise Unsupported(f"this version of Millpond has no {module} for Spark") from None
