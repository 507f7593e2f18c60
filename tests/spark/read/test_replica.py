"""Batch reads from a hot standby of PostgreSQL: the same rows, and no write there."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from millpond.spark.columns import batch_columns, spark_schema
from millpond.spark.read.batch import BatchReader
from servers import Postgres
from servers.server import find_program
from tests.spark.cached_readers import close_cached
from tests.spark.ponds import fill, rows
from tests.waiting import until

pytestmark = [pytest.mark.server, pytest.mark.slow]


class Standby(Postgres):
    """A copy of a primary that follows it."""

    def __init__(self, primary: Postgres) -> None:
        super().__init__()
        self._primary = primary
        self.user, self.password = primary.user, primary.password

    def prepare(self) -> None:
        self.run(
            *(find_program("pg_basebackup", "postgresql"), "--pgdata", str(self.data), "--write-recovery-conf"),
            *("--checkpoint", "fast", "--dbname", self._primary.dsn),
        )
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in self._settings.items())


def test_a_replica_serves_batch_reads() -> None:
    with Postgres() as primary:
        url = primary.create_database("pond")
        fill(url)
        with Standby(primary) as standby:
            replica = standby.url_of("pond")
            with psycopg.connect(replica, autocommit=True) as connection:
                assert connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
                wanted = rows(url, "archive"), rows(url, "messages")
                count = "SELECT count(*) FROM millpond_archive"
                asyncio.run(
                    until(lambda: connection.execute(count).fetchone() == (len(wanted[0]),), "the replica follows")
                )
            for table, found in zip(("archive", "messages"), wanted, strict=True):
                schema = spark_schema(batch_columns(table))
                read = BatchReader({"url": replica, "table": table, "minPartitions": "2"}, schema)
                ids = [id_ for part in read.partitions() for b in read.read(part) for id_ in b.column("id").to_pylist()]
                assert sorted(ids) == sorted(map(str, found)), table
            close_cached()
