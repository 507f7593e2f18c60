"""A report on a lake, on databases, or on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql import SparkSession

from millpond.spark.archive import settled_messages, table
from millpond.spark.options import SparkOptions
from millpond.spark.report.figures import ARCHIVE_COLUMNS, LIVE_COLUMNS
from millpond.spark.report.report import Report, report


def report_on(
    spark: SparkSession,
    *,
    lake: str | None = None,
    database: Mapping[str, str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Sequence[str] = (),
    every: timedelta = timedelta(hours=1),
    storage_options: Mapping[str, str] | None = None,
) -> Report:
    """A report on the settled messages of a lake, or without a lake on the archive of the databases.

    `database` has options of `format("millpond")`: `{"url": …}`. With them the report also has the backlog.
    `storage_options` are those of `deltalake` for a lake in an object store.
    """
    # A lake's files that the report does not cover are not even planned.
    chosen: dict[str, Any] = {"queues": queues, "since": since, "until": until, "storage_options": storage_options}
    settled = settled_messages(spark, lake=lake, database=database, columns=ARCHIVE_COLUMNS, **chosen)
    live = now = None
    names = [f"lake {lake}"] if lake is not None else []
    if database is not None:
        live = table(spark, database, "messages", LIVE_COLUMNS)
        shards = SparkOptions(database, (), of="a report").shards()
        now = shards[0].now()
        names += [str(shard.url) for shard in shards]  # a URL hides its password
    source = ", ".join(names)
    return report(settled, live, since=since, until=until, queues=queues, every=every, now=now, source=source)
