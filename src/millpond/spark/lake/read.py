"""Reading a lake: exactly the files that are committed, whatever else lies in its folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from millpond.spark.lake.manifest import Lake, State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_BODY = {"boolean": "BooleanType", "bigint": "LongType", "double": "DoubleType", "string": "StringType"}
"""The types of decoded columns, by Spark's names in SQL."""


def files(path: str | os.PathLike[str], *, queue: str | None = None, day: str | None = None) -> list[str]:
    """The Parquet files of a lake, as absolute paths; of one queue, of one day (2026-11-16), or of both.

    For tools that read lists of files: `duckdb.read_parquet(files("lake"), union_by_name=True)`, and
    `polars.scan_parquet(files("lake"), missing_columns="insert")`.
    """
    found = Lake(path)
    return _paths(found.state, found.root, queue, day)


def read(
    spark: SparkSession, path: str | os.PathLike[str], *, queue: str | None = None, day: str | None = None
) -> DataFrame:
    """The lake as a DataFrame: the columns of `format("millpond")` with `table=archive`, and `day`, the UTC date of
    archiving; then `body`, where bodies were decoded. `queue` and `day` choose files, so that no others are opened.
    """
    found = Lake(path)
    schema = spark_schema_of(found.state)
    paths = _paths(found.state, found.root, queue, day)
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*paths)


def spark_schema_of(state: State) -> StructType:
    from pyspark.sql import types

    from millpond.spark.schema import batch_columns, spark_schema

    fields = [*spark_schema(batch_columns("archive")).fields, types.StructField("day", types.DateType())]
    if state.body:
        body = [types.StructField(name, getattr(types, _BODY[type_])()) for name, type_ in state.body.items()]
        fields.append(types.StructField("body", types.StructType(body)))
    return types.StructType(fields)


def _paths(state: State, root: os.PathLike[str], queue: str | None, day: str | None) -> list[str]:
    return [
        os.path.join(root, file.path)
        for file in sorted(state.files.values(), key=lambda file: (file.day, file.path))
        if queue in (None, file.queue) and day in (None, file.day)
    ]
