"""Whether a lake holds what it says it does, by looking at all of it."""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from millpond.clock import as_datetime
from millpond.spark.lake.export import shards_of
from millpond.spark.lake.manifest import Lake
from millpond.spark.lake.read import read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millpond.spark.options import Shard


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What a check has found."""

    looked_at: int
    """Archived messages in the databases that the lake should hold."""
    missing: int
    """Those of them that it does not."""
    twice: int
    """Messages that the lake holds more than once."""


def check(
    spark: SparkSession,
    path: str | os.PathLike[str],
    url: str | None = None,
    *,
    schema: str | None = None,
    table_prefix: str = "",
) -> Checked:
    """Compare the lake with what its databases still have, message by message."""
    lake = Lake(path)
    # An id that was used again after its dedupe window was archived at another moment.
    held = read(spark, path).select("shard", "id", "archived_at")
    wanted = held.limit(0)
    for shard in shards_of(url, schema, table_prefix):
        if shard.number in lake.state.until:
            until = as_datetime(lake.state.until[shard.number])
            wanted = wanted.unionByName(_archived(spark, shard, until))
    missing = wanted.join(held, ["shard", "id", "archived_at"], "left_anti").count()
    return Checked(looked_at=wanted.count(), missing=missing, twice=held.count() - held.distinct().count())


def _archived(spark: SparkSession, shard: Shard, until: datetime) -> DataFrame:
    from pyspark.sql.functions import col, lit

    given = {"url": shard.url.raw, "schema": shard.schema or "", "tablePrefix": shard.table_prefix}
    source = spark.read.format("millpond").options(table="archive", columns="id,archived_at")
    frame = source.options(**{name: value for name, value in given.items() if value}).load()
    return frame.where(col("archived_at") < lit(until)).withColumn("shard", lit(shard.number))
