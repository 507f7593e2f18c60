"""From messages to tables, in one pass over each source.

The pass groups settled messages by queue, period and failure. Each group has sums, sketches for percentiles and a few
extreme messages. All tables of settled messages are made from these groups, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from millpond.message import SUSPECT
from millpond.spark.report import figures

MOST_FAILURES = 1000
"""Reasons are free text, perhaps one per message: only the most frequent are listed."""
_GROUPS_IN_MEMORY = "spark.sql.objectHashAggregate.sortBased.fallbackThreshold"
_GROUPS = 20_000
"""Groups in the memory of a task. By default Spark sorts all messages once it has more than 128 groups."""
_SUMS = {0: "by_queue_and_time", 1: "by_queue", 2: "by_time", 3: "summary"}
"""Spark's grouping_id -> table."""


def filter_messages(
    messages: DataFrame, queues: Sequence[str], since: datetime | None = None, until: datetime | None = None
) -> DataFrame:
    if queues:
        messages = messages.where(f.col("queue").isin(*queues))
    if since is not None:
        messages = messages.where(f.col("archived_at") >= f.lit(since))
    if until is not None:
        messages = messages.where(f.col("archived_at") < f.lit(until))
    return messages


def measure_archive(archive: DataFrame, every: timedelta) -> dict[str, pa.Table]:
    """The tables of settled messages, by their names."""
    with _many_groups(archive.sparkSession):
        # As rows: building a columnar cache, as persist() does, takes twice the time of all the rest.
        groups = _groups(archive, every).localCheckpoint()
        return {
            **_sums(groups),
            "failures": _failures(groups),
            "slowest": _list_messages(groups, "slowest", "handling"),
            "poisonous": _list_messages(groups, "poisonous", "unfinished"),
        }


def backlog(live: DataFrame, now: datetime) -> pa.Table:
    """The table of live messages."""
    at = f.lit(now)
    waits = f.col("state") != "PROCESSING"
    due = waits & (f.col("due_at") <= at)
    oldest = f.min(f.when(due, f.col("due_at")))
    found = live.groupBy("queue").agg(
        *(f.count_if(f.col("state") == state.upper()).alias(state) for state in ("pending", "processing", "retryable")),
        f.count_if(due).alias("due"),
        f.count_if(waits & ~due).alias("scheduled"),
        f.count_if(f.col("crashes") >= SUSPECT).alias("suspect"),
        oldest.alias("oldest_due_at"),
        figures.seconds(f.unix_micros(at) - f.unix_micros(oldest), "overdue_s"),
    )
    return _table(found.orderBy("queue"))


def _groups(archive: DataFrame, every: timedelta) -> DataFrame:
    messages = archive.select(
        *(f.col(name) for name in ("id", "queue", "state", "reason", "deliveries", "attempts", "archived_at")),
        f.substring("error", 1, figures.ERROR_SHOWN).alias("error"),
        figures.period_start(every).alias("at"),
        figures.exception().alias("exception"),
        figures.waiting().alias("waiting"),
        figures.handling().alias("handling"),
        figures.unfinished().alias("unfinished"),
    )
    poisonous = f.when(f.col("unfinished") >= figures.POISONOUS, f.col("unfinished"))
    return messages.groupBy("queue", "at", "state", "reason", "exception").agg(
        *figures.sums(),
        f.max(f.struct("archived_at", "id", "error")).alias("example"),
        _with_most(f.col("handling")).alias("slowest"),
        _with_most(poisonous).alias("poisonous"),
    )


def _with_most(of: Column) -> Column:
    message = f.struct("id", "error", "deliveries", "attempts", "waiting", "handling", "unfinished", "archived_at")
    # By id as well: then the result is the same each time.
    return f.max_by(message, f.when(of.isNotNull(), f.struct(of.alias("of"), "id")), figures.LISTED)


@contextmanager
def _many_groups(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get(_GROUPS_IN_MEMORY) or ""
    spark.conf.set(_GROUPS_IN_MEMORY, str(_GROUPS))
    try:
        yield
    finally:
        spark.conf.set(_GROUPS_IN_MEMORY, before)


def _sums(groups: DataFrame) -> dict[str, pa.Table]:
    sums = groups.cube("queue", "at").agg(f.grouping_id().alias("grouping"), *figures.merged_sums())
    found = _table(sums.select("grouping", "queue", "at", *figures.table_columns()).orderBy("grouping", "queue", "at"))
    return {
        name: found.filter(pc.equal(found["grouping"], number)).select(
            [column for column in figures.TABLES[name] if column in found.column_names]
        )
        for number, name in _SUMS.items()
    }


def _failures(groups: DataFrame) -> pa.Table:
    found = (
        groups.where(figures.failed())
        .groupBy("queue", "reason", "exception")
        .agg(
            f.sum("settled").alias("failed"),
            f.min("first_at").alias("first_at"),
            f.max("last_at").alias("last_at"),
            f.max("example").alias("example"),
        )
        .select(
            *("queue", "reason", "exception", "failed", "first_at", "last_at"),
            f.col("example.id").alias("example_id"),
            f.col("example.error").alias("error"),
        )
    )
    return _table(found.orderBy(f.desc("failed"), "queue", "reason", "exception").limit(MOST_FAILURES))


def _list_messages(groups: DataFrame, name: str, by: str) -> pa.Table:
    """The listed messages of each queue, over all periods."""
    each = groups.select("queue", "state", "reason", f.explode(name).alias("message"))
    order = [f.desc(f"message.{by}"), f.desc("message.id")]
    few = each.withColumn("place", f.row_number().over(Window.partitionBy("queue").orderBy(*order)))
    found = few.where(f.col("place") <= figures.LISTED).orderBy(*order)
    times = {"waiting_s": "waiting", "handling_s": "handling"}
    return _table(
        found.select(
            *(
                figures.seconds(f.col(f"message.{times[column]}"), column)
                if column in times
                else f.col(column if column in ("queue", "state", "reason") else f"message.{column}")
                for column in figures.TABLES[name]
            )
        )
    )


def _table(frame: DataFrame) -> pa.Table:
    """A small result with times in UTC, also if the session has another time zone."""
    found = frame.toArrow()
    times = [n for n, field in enumerate(found.schema) if pa.types.is_timestamp(field.type)]
    for n in times:
        found = found.set_column(n, found.column_names[n], found.column(n).cast(pa.timestamp("us", "UTC")))
    return found
