"""Settled messages as a DataFrame, from a lake or from the archive of the databases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def settled_messages(
    spark: SparkSession,
    *,
    lake: str | None = None,
    database: Mapping[str, str] | None = None,
    columns: Sequence[str] = (),
    queues: Sequence[str] = (),
    since: datetime | None = None,
    until: datetime | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read the lake if there is one, otherwise the archive; `database` has options of `format("millpond")`.

    `queues`, `since` and `until` leave out files of the lake; the archive's reader gets filters from Spark.
    """
    if lake is not None:
        from millpond.spark.lake import read

        given: dict[str, Any] = {"since": since, "until": until, "storage_options": storage_options}
        found = read(spark, lake, queue=queues or None, **given)
        return found.select(*columns) if columns else found
    if database is None:
        raise InvalidOption("no source of settled messages: give the folder of a lake, or a database")
    return table(spark, database, "archive", columns)


def table(spark: SparkSession, database: Mapping[str, str], name: str, columns: Sequence[str] = ()) -> DataFrame:
    """A table of the databases. Only named columns are read: Spark does not pass on which ones a query uses."""
    read = spark.read.format("millpond").options(**database).option("table", name)
    return (read.option("columns", ",".join(columns)) if columns else read).load()
