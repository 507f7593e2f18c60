"""Settled messages as a DataFrame, wherever they are kept: in a lake, or still in the archive of the databases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millpond.errors import InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def settled_messages(
    spark: SparkSession,
    *,
    lake: str | None = None,
    database: Mapping[str, str] | None = None,
    columns: Sequence[str] = (),
) -> DataFrame:
    """Of the lake if there is one, else of the archive; `database` are options of `format("millpond")`."""
    if lake is not None:
        from millpond.spark.lake import read

        found = read(spark, lake)
        return found.select(*columns) if columns else found
    if database is None:
        raise InvalidOption("settled messages of what? Give a lake's folder, or a database")
    return table(spark, database, "archive", columns)


def table(spark: SparkSession, database: Mapping[str, str], name: str, columns: Sequence[str] = ()) -> DataFrame:
    """A table of the databases. Named columns are all that leaves them: Spark does not tell what a query uses."""
    read = spark.read.format("millpond").options(**database).option("table", name)
    return (read.option("columns", ",".join(columns)) if columns else read).load()
