"""Reads a lake: exactly the committed files, and no others in its folder. The log has the ones that a query needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from millpond.clock import time_us
from millpond.errors import InvalidTime
from millpond.spark.lake.body import Decoder
from millpond.spark.lake.compact import read_file
from millpond.spark.lake.storage import Storage, storage_of
from millpond.spark.lake.table import Chosen, Lake
from millpond.spark.lake.writers import file_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_BODY = {"boolean": "BooleanType", "bigint": "LongType", "double": "DoubleType", "string": "StringType"}
"""Type of a decoded column, by Spark's name in SQL -> class in `pyspark.sql.types`."""


def files(
    path: str | os.PathLike[str],
    *,
    queue: str | Sequence[str] | None = None,
    day: str | date | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[str]:
    """The Parquet files of a lake that may hold the chosen messages: absolute paths, or URLs.

    Other tools read the lake as a Delta table: `duckdb.sql("FROM delta_scan('lake')")`, `polars.scan_delta("lake")`.
    """
    storage = storage_of(path, storage_options)
    found = Lake.open(storage).paths(_chosen(queue, day, since, until))
    return [f"{storage.root}/{one}" for one in found]


def read(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    queue: str | Sequence[str] | None = None,
    day: str | date | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The lake as a DataFrame: the columns of `format("millpond")` with `table=archive`, `day` (the UTC date of
    archiving), and `body` and `unreadable` if bodies were decoded.

    `queue` (one or several), `day`, and the times of archiving `since` and `until` select messages. Unlike a `where`,
    they also select files: others are not planned and not opened.
    """
    storage = storage_of(path, storage_options)
    lake = Lake.open(storage)
    chosen = _chosen(queue, day, since, until)
    paths, schema = lake.paths(chosen), spark_schema_of(lake.body)
    if not paths:
        return spark.createDataFrame([], schema)
    if _reads(spark, storage):
        found = spark.read.schema(schema).parquet(*(storage.uri(one) for one in paths))
    else:
        found = _by_executors(spark, storage, paths, lake.body, schema)
    for condition in _conditions(chosen):
        found = found.where(condition)
    return found


def unreadable(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    queue: str | Sequence[str] | None = None,
    day: str | date | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A view that counts messages with values that did not fit their fields: `queue`, `day`, `messages`, `example_id`.

    `example_id` is the id of the last one. The arguments are those of `read`. A lake without decoded bodies has none.
    """
    from pyspark.sql.functions import col, count, max_by

    found = read(spark, path, queue=queue, day=day, since=since, until=until, storage_options=storage_options)
    some = found.where(col("unreadable").isNotNull()) if "unreadable" in found.columns else found.limit(0)
    return some.groupBy("queue", "day").agg(
        count("*").alias("messages"), max_by("id", "archived_at").alias("example_id")
    )


def _chosen(
    queue: str | Sequence[str] | None, day: str | date | None, since: datetime | None, until: datetime | None
) -> Chosen:
    queues = () if queue is None else (queue,) if isinstance(queue, str) else tuple(queue)
    for name, time in (("since", since), ("until", until)):
        if time is not None:
            time_us(time, name)
    try:
        chosen = date.fromisoformat(day) if isinstance(day, str) else day
    except ValueError:
        raise InvalidTime(f"day must be a date like 2026-11-16, not {day!r}") from None
    return Chosen(queues, since, until, chosen)


def _conditions(chosen: Chosen) -> Iterator[Column]:
    from pyspark.sql.functions import col, lit

    if chosen.queues:
        yield col("queue").isin(*chosen.queues)
    if chosen.day is not None:
        yield col("day") == lit(chosen.day)
    if chosen.since is not None:
        yield col("archived_at") >= lit(chosen.since)
    if chosen.until is not None:
        yield col("archived_at") < lit(chosen.until)


def _reads(spark: SparkSession, storage: Storage) -> bool:
    """Whether Spark itself can read files there. For object stores it needs a jar of Hadoop's."""
    scheme = storage.uri("x").partition("://")[0]
    if scheme == "file":
        return True
    try:
        context: Any = spark.sparkContext
        context._jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, context._jsc.hadoopConfiguration())
    except Exception:  # no such class, or a client of Spark Connect
        return False
    return True


def _by_executors(
    spark: SparkSession, storage: Storage, paths: Sequence[str], body: Mapping[str, str], schema: StructType
) -> DataFrame:
    """Read the files in Python tasks, one file a task."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        wanted = file_schema(Decoder(body) if body else None)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_file(storage, paths[number], wanted)

    return spark.range(0, len(paths), 1, len(paths)).mapInArrow(task, schema)


def spark_schema_of(body: Mapping[str, str]) -> StructType:
    from pyspark.sql import types

    from millpond.spark.columns import batch_columns, spark_schema

    fields = [*spark_schema(batch_columns("archive")).fields, types.StructField("day", types.DateType())]
    if body:
        inner = [types.StructField(name, getattr(types, _BODY[type_])()) for name, type_ in body.items()]
        fields.append(types.StructField("body", types.StructType(inner)))
        fields.append(types.StructField("unreadable", types.StringType()))
    return types.StructType(fields)
