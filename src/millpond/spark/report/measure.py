"""From messages to tables, in one pass over each source.

The pass groups settled messages by queue, period and failure, and keeps of each group sums, sketches for its
percentiles and its few extreme messages. All tables of settled messages come from these groups, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as f

from millpond.spark.report import figures

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MOST_FAILURES = 1000
"""Reasons are free text, and may be as many as messages: the most frequent are listed."""
_GROUPS_IN_MEMORY = "spark.sql.objectHashAggregate.sortBased.fallbackThreshold"
_GROUPS = 20_000
"""Of queue, period and failure, in a task. Unless told Spark sorts every message once it meets more than 128."""
_SUMS = {0: "by_queue_and_time", 1: "by_queue", 2: "by_time", 3: "summary"}
"""By Spark's number of what a row is not grouped by."""


def chosen(
    messages: DataFrame, queues: Sequence[str], since: datetime | None = None, until: datetime | None = None
) -> DataFrame:
    if queues:
        messages = messages.where(f.col("queue").isin(*queues))
    if since is not None:
        messages = messages.where(f.col("archived_at") >= f.lit(since))
    if until is not None:
        messages = messages.where(f.col("archived_at") < f.lit(until))
    return messages


def settled(archive: DataFrame, every: timedelta) -> dict[str, pa.Table]:
    """The tables of settled messages, by their names."""
    with _many_groups(archive.sparkSession):
        # Kept as rows: to build a columnar cache, as persist() does, takes twice the time of all the rest.
        groups = _groups(archive, every).localCheckpoint()
        return {
            **_sums(groups),
            "failures": _failures(groups),
            "slowest": _listed(groups, "slowest", "handling"),
            "poisonous": _listed(groups, "poisonous", "unfinished"),
        }


def backlog(live: DataFrame, now: datetime) -> pa.Table:
    """The table of live messages."""
    moment = f.lit(now)
    waits = f.col("state") != "PROCESSING"
    due = waits & (f.col("due_at") <= moment)
    # The delivery that is under way may still be finished.
    unfinished = figures.unfinished() - f.when(waits, 0).otherwise(1)
    oldest = f.min(f.when(due, f.col("due_at")))
    found = live.groupBy("queue").agg(
        *(f.count_if(f.col("state") == state.upper()).alias(state) for state in ("pending", "processing", "retryable")),
        f.count_if(due).alias("due"),
        f.count_if(waits & ~due).alias("scheduled"),
        f.count_if(unfinished >= figures.SUSPECT).alias("suspect"),
        oldest.alias("oldest_due_at"),
        figures.seconds(f.unix_micros(moment) - f.unix_micros(oldest), "overdue_s"),
    )
    return _table(found.orderBy("queue"))


# --- the pass -------------------------------------------------------------------------------------------


def _groups(archive: DataFrame, every: timedelta) -> DataFrame:
    messages = archive.select(
        *(f.col(name) for name in ("id", "queue", "state", "reason", "deliveries", "attempts", "archived_at")),
        f.substring("error", 1, figures.ERROR_SHOWN).alias("error"),
        figures.at(every).alias("at"),
        figures.exception().alias("exception"),
        figures.waiting().alias("waiting"),
        figures.handling().alias("handling"),
        figures.unfinished().alias("unfinished"),
    )
    suspect = f.when(f.col("unfinished") >= figures.SUSPECT, f.col("unfinished"))
    return messages.groupBy("queue", "at", "state", "reason", "exception").agg(
        *figures.sums(),
        f.max(f.struct("archived_at", "id"))["id"].alias("example_id"),
        _with_most(f.col("handling")).alias("slowest"),
        _with_most(suspect).alias("poisonous"),
    )


def _with_most(of: Column) -> Column:
    message = f.struct("id", "error", "deliveries", "attempts", "waiting", "handling", "unfinished", "archived_at")
    # By id as well, so that they are the same each time.
    return f.max_by(message, f.when(of.isNotNull(), f.struct(of.alias("of"), "id")), figures.LISTED)


@contextmanager
def _many_groups(spark: SparkSession) -> Iterator[None]:
    before = spark.conf.get(_GROUPS_IN_MEMORY) or ""
    spark.conf.set(_GROUPS_IN_MEMORY, str(_GROUPS))
    try:
        yield
    finally:
        spark.conf.set(_GROUPS_IN_MEMORY, before)


# --- from the groups ------------------------------------------------------------------------------------


def _sums(groups: DataFrame) -> dict[str, pa.Table]:
    sums = groups.cube("queue", "at").agg(f.grouping_id().alias("grouping"), *figures.sums_of_sums())
    found = _table(sums.select("grouping", "queue", "at", *figures.shown()).orderBy("grouping", "queue", "at"))
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
            f.max_by("example_id", f.struct("last_at", "example_id")).alias("example_id"),
        )
    )
    return _table(found.orderBy(f.desc("failed"), "queue", "reason", "exception").limit(MOST_FAILURES))


def _listed(groups: DataFrame, name: str, by: str) -> pa.Table:
    """Of each queue the few that a list holds, of all periods."""
    from pyspark.sql import Window

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
    """A small result, with its moments in UTC whatever the session's time zone is."""
    found = frame.toArrow()
    moments = [n for n, field in enumerate(found.schema) if pa.types.is_timestamp(field.type)]
    for n in moments:
        found = found.set_column(n, found.column_names[n], found.column(n).cast(pa.timestamp("us", "UTC")))
    return found
