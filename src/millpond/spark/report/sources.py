"""A report on a lake, on databases, or on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from millpond.clock import as_datetime
from millpond.spark.options import Options
from millpond.spark.report.figures import ARCHIVE_COLUMNS, LIVE_COLUMNS
from millpond.spark.report.report import Report, report
from millpond.spark.settled import settled_messages, table
from millpond.transports.database.fetch import check, now

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def report_on(
    spark: SparkSession,
    *,
    lake: str | None = None,
    database: Mapping[str, str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Sequence[str] = (),
    every: timedelta = timedelta(hours=1),
) -> Report:
    """As `report`, of the settled messages of a lake, or without one of the databases' archive.

    `database` are options of `format("millpond")`: `{"url": …}`. With them the report also has the backlog.
    """
    settled = settled_messages(spark, lake=lake, database=database, columns=ARCHIVE_COLUMNS)
    live = table(spark, database, "messages", LIVE_COLUMNS) if database is not None else None
    moment = _moment(database) if database is not None else None
    return report(settled, live, since=since, until=until, queues=queues, every=every, now=moment)


def _moment(database: Mapping[str, str]) -> datetime:
    """By the first database's clock, which says what is due there."""
    shard = Options(database, (), of="a report").shards()[0]
    with shard.fetcher() as fetcher:
        check(fetcher, shard.url)
        return as_datetime(now(fetcher))
