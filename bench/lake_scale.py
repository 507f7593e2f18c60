"""`python -m bench.lake_scale`: whether the costs of a lake grow with its size or with the number of its queues.

Each day `--rows` messages of so many queues are archived and exported, and then 10 more. The first day is compared with
the last one, and few queues with many. At the end one queue of one day is counted, and a report on a day is made.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

import millpond
import millpond.spark
from bench.databases import PostgresDatabase
from millpond import ManualClock
from millpond.spark import lake
from millpond.spark.lake.export import Exporter, shards_of
from millpond.spark.lake.storage import storage_of
from millpond.spark.report import report_on
from millpond.table_prefix import TABLE_PREFIX

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)
FEW = 10
"""Messages of a small export."""
# Bodies of about 190 bytes, which differ. The messages come one after the other, the queues in turn.
FILL = """
INSERT INTO millpond_archive (id, queue, key, priority, due_at, payload, deliveries, attempts, created_at,
first_attempt_at, last_attempt_at, acquired_at, token, state, archived_at)
SELECT gen_random_uuid(), 'queue-' || n %% %(queues)s, 'key-' || n %% 1000, 50, at - 900000,
convert_to('{"sku": ' || n || ', "text": "' || repeat(md5(n::text), 5) || '"}', 'UTF8'), 1, 1, at - 900000, at - 5000,
at, at - 5000, n, CASE WHEN n %% 50 = 0 THEN 'FAILED' ELSE 'COMPLETED' END, at
FROM (SELECT n, %(start)s + n * %(length)s / %(rows)s AS at FROM generate_series(0::bigint, %(rows)s - 1) n) m
"""
Costs = dict[str, float]


class GrowingLake:
    """A lake to which days are exported from a database."""

    def __init__(self, spark: Any, url: str, path: Path, queues: int) -> None:
        self._spark, self._url, self._path, self._queues = spark, url, path, queues
        self._clock = ManualClock(FIRST)
        self._exporter = Exporter(spark, storage_of(path), shards_of(url, None, TABLE_PREFIX), margin=0)
        # The days of this history are not those of the server.
        self._exporter.store_options = {**self._exporter.store_options, "clock": self._clock}
        self._at = FIRST

    def add_day(self, rows: int) -> Costs:
        """Export the messages of a day, then a few more."""
        asyncio.run(self._make_partitions())
        start, found = self._at, Costs()
        self._fill(start, 20 * HOUR, rows)
        files, size = self._export(start + 21 * HOUR, rows, "export (s)", found)
        found |= {"files": files, "bytes a message": size / rows}
        self._fill(start + 22 * HOUR, HOUR / 60, FEW)
        self._export(start + 23 * HOUR, FEW, f"export of {FEW} more (s)", found)
        self._execute("TRUNCATE millpond_archive")
        self._advance(start + DAY)
        return found

    def read(self) -> Costs:
        found = Costs()
        day = self._at - DAY
        with timed("count a queue of a day (s)", found):
            lake.read(self._spark, self._path, queue="queue-7", day=day.date()).count()
        with timed("report on a day (s)", found):
            report_on(self._spark, lake=str(self._path), since=day, until=self._at)
        log = (self._path / "_delta_log").iterdir()
        return found | {"log (MB)": sum(file.stat().st_size for file in log) / 1e6}

    def close(self) -> None:
        self._exporter.close()

    def _export(self, at: datetime, rows: int, what: str, into: Costs) -> tuple[int, int]:
        self._advance(at)
        with timed(what, into):
            done = self._exporter.export()
        assert done.rows == rows, done
        return done.files, done.size

    def _advance(self, to: datetime) -> None:
        self._clock.advance(to - self._at)
        self._at = to

    async def _make_partitions(self) -> None:
        store: Any = await millpond.connect(self._url, clock=self._clock)
        await store.operations.purge()
        await store.close()

    def _fill(self, start: datetime, length: timedelta, rows: int) -> None:
        times = {"start": int(start.timestamp()) * 1_000_000, "length": length // timedelta(microseconds=1)}
        self._execute(FILL, {"queues": self._queues, "rows": rows, **times})
        self._execute("VACUUM ANALYZE millpond_archive")

    def _execute(self, text: str, params: dict[str, int] | None = None) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(text, params)


@contextmanager
def timed(what: str, into: Costs) -> Iterator[None]:
    began = time.perf_counter()
    yield
    into[what] = time.perf_counter() - began
    print(what, round(into[what], 1), file=sys.stderr, flush=True)


def measure(spark: Any, database: PostgresDatabase, rows: int, days: int, queues: int) -> list[Costs]:
    """The costs of the first day, of the last one, and of reading the whole lake."""
    url = database.create()

    async def migrate() -> None:
        await (await millpond.connect(url, migrate=True, clock=ManualClock(FIRST))).close()

    asyncio.run(migrate())
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        growing = GrowingLake(spark, url, Path(folder) / "lake", queues)
        try:
            found = [growing.add_day(rows) for _ in range(days)]
            return [found[0], found[-1], growing.read()]
        finally:
            growing.close()
            database.drop(url)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lake_scale", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="messages of a day; default: %(default)s")
    parser.add_argument("--days", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--queues", type=int, action="append", help="may be repeated; default: 10 and 10,000")
    options = parser.parse_args()
    database = PostgresDatabase()
    spark = millpond.spark.session("millpond-bench", "local[2]", {"spark.driver.memory": "2g"})
    try:
        measure(spark, database, min(options.rows, 10_000), 1, 10)  # a warm-up
        table = Table("cost", title=f"{options.days} days of {options.rows:,} messages")
        found = []
        for queues in options.queues or (10, 10_000):
            found.append(measure(spark, database, options.rows, options.days, queues))
            table.add_column(f"{queues:,} queues, day 1", justify="right")
            table.add_column(f"day {options.days}, or all", justify="right")
        columns = [costs for first, *rest in found for costs in (first, merged(rest))]
        for what in columns[-1]:
            table.add_row(what, *(f"{costs[what]:,.2f}" if what in costs else "" for costs in columns))
        Console(width=120).print(table)
    finally:
        spark.stop()
        database.close()


def merged(several: list[Costs]) -> Costs:
    return {what: value for one in several for what, value in one.items()}


if __name__ == "__main__":
    main()
