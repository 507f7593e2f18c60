"""The set-up of every measurement with Spark: a private PostgreSQL, and one session with the JDBC driver."""

import asyncio
import glob
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any
from urllib.parse import quote

import psycopg

import millpond
import millpond.spark
from bench.databases import PostgresDatabase
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.url import Url

JDBC = "jdbc_"
"""The prefix of the tables for JDBC, created by the same migrations."""
PAYLOAD = 200


@dataclass
class Setup:
    spark: Any
    database: PostgresDatabase
    url: str
    facts: Mapping[str, Any]

    def jdbc(self, *, rewrite: bool) -> dict[str, str]:
        """Options of Spark's JDBC source for the same database."""
        url = Url(self.url)
        # stringtype: text is accepted for a UUID column.
        parameters = f"stringtype=unspecified&reWriteBatchedInserts={str(rewrite).lower()}"
        return {
            "url": f"jdbc:postgresql://{url.host}:{url.port}{quote(url.path)}?{parameters}",
            "user": url.user or "",
            "password": url.password or "",
            "driver": "org.postgresql.Driver",
        }

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)


def jdbc_driver() -> str:
    """The path of Debian's package."""
    found = glob.glob("/usr/share/java/postgresql.jar")
    if not found:
        raise SystemExit("Spark's JDBC needs PostgreSQL's driver: apt-get install libpostgresql-jdbc-java")
    return found[0]


@contextmanager
def set_up() -> Iterator[Setup]:
    """Start PostgreSQL and Spark, once for all measurements."""
    settings = {"spark.jars": jdbc_driver(), "spark.driver.memory": "2g"}
    database = PostgresDatabase()
    try:
        spark = millpond.spark.session("millpond-bench", "local[2]", settings)
        try:
            with set_up_on(database, spark) as setup:
                yield setup
        finally:
            spark.stop()
    finally:
        database.close()


@contextmanager
def set_up_on(database: PostgresDatabase, spark: Any) -> Iterator[Setup]:
    """A set-up on a server and on a session whose JVM has the JDBC driver."""
    url = database.create()
    try:
        asyncio.run(_migrate(url))
        yield Setup(
            spark, database, url, {"spark": spark.version, "date": date.today().isoformat(), **database.facts()}
        )
    finally:
        database.drop(url)


async def _migrate(url: str) -> None:
    for prefix in (TABLE_PREFIX, JDBC):
        await (await millpond.connect(url, migrate=True, table_prefix=prefix)).close()
