"""`python -m bench.purge [ROWS]`: purge one old day of the archive while claims and settles continue.

PostgreSQL is measured twice: with the day in a separate partition, and in the default one, where rows are deleted.
Prints the duration of the purge, and the durations of claims and settles of 20 messages before and during it.
"""

import asyncio
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import millpond
from millpond import Ack, Message
from servers import MariaDB, Postgres

DAY = 86_400_000_000
START = (time.time_ns() // 1000 // DAY - 10) * DAY
PAYLOAD = b"x" * 200

# Ids rise with time, like those of publishers.
ARCHIVED = """
INSERT INTO millpond_archive (id, queue, priority, due_at, state, payload, created_at, archived_at, deliveries,
attempts)
SELECT {id}, 'old', 50, 1, 'COMPLETED', {payload}, 1, {start} + n * {step}, 1, 1 FROM {series}
"""


def archive_sql(rows: int, **words: str) -> str:
    return ARCHIVED.format(start=START, step=DAY // (rows + 1), **words)


def fill_postgres(server: Postgres, name: str, rows: int, *, partition: bool) -> None:
    with server.connect(name) as raw:
        if partition:
            raw.execute("CREATE TABLE old_day (LIKE millpond_archive INCLUDING ALL)")
            bounds = f"FROM ('{START}') TO ('{START + DAY}')"
            raw.execute(f"ALTER TABLE millpond_archive ATTACH PARTITION old_day FOR VALUES {bounds}")
        raw.execute(
            archive_sql(
                rows,
                id="(lpad(to_hex(n), 12, '0') || substr(md5(n::text), 1, 20))::uuid",
                payload="convert_to(repeat('x', 200), 'UTF8')",
                series=f"generate_series(1, {rows}::bigint) AS s (n)",
            )
        )
        raw.execute("VACUUM ANALYZE millpond_archive")


def fill_mariadb(server: MariaDB, name: str, rows: int) -> None:
    with closing(server.connect(name)) as raw, raw.cursor() as cursor:
        cursor.execute(
            archive_sql(
                rows,
                id="unhex(concat(lpad(hex(n), 12, '0'), substr(md5(n), 1, 20)))",
                payload="repeat('x', 200)",
                series=f"(SELECT seq AS n FROM seq_1_to_{rows}) AS s",
            )
        )
        raw.commit()


def fill_sqlite(path: Path, rows: int) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.create_function("made", 1, lambda n: n.to_bytes(6, "big") + uuid4().bytes[:10])
        series = f"WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) SELECT n FROM s"
        raw.execute(archive_sql(rows, id="made(n)", payload="zeroblob(200)", series=f"({series}) AS s"))
        raw.commit()


async def measure(label: str, url: str, fill: Callable[[], None]) -> None:
    purger: Any = await millpond.connect(url, migrate=True)
    worker: Any = await millpond.connect(url)
    fill()
    for what, work in (
        ("before", lambda: asyncio.sleep(5)),
        ("purge", lambda: purger.operations.purge("old", older_than=86_400)),
    ):
        seconds, deleted, claims, settles = await claim_and_settle_during(worker, work)
        rows = f" {deleted:,} rows" if deleted else ""
        print(
            f"{label:28} {what:6} {seconds:6.2f} s{rows:15}  claim {percentiles(claims)}  settle {percentiles(settles)}"
        )
    await purger.close()
    await worker.close()


async def claim_and_settle_during(
    store: Any, work: Callable[[], Awaitable[Any]]
) -> tuple[float, int | None, list[float], list[float]]:
    """Claim and settle until the work is done; returns its seconds, its result, and the seconds of both verbs."""
    claims, settles = [], []
    started = time.perf_counter()
    task = asyncio.ensure_future(work())
    while not task.done() or not claims:
        await store.publish([Message(queue="new", payload=PAYLOAD) for _ in range(20)])
        times = [time.perf_counter()]
        claimed = await store.claim(["new"], 20)
        times.append(time.perf_counter())
        await store.settle([Ack(claim.receipt) for claim in claimed])
        times.append(time.perf_counter())
        claims.append(times[1] - times[0])
        settles.append(times[2] - times[1])
        await asyncio.sleep(0.005)
    return time.perf_counter() - started, await task, claims, settles


def percentiles(values: list[float]) -> str:
    values = sorted(values)
    middle, most, worst = (1000 * values[int(share * (len(values) - 1))] for share in (0.5, 0.99, 1))
    return f"{middle:5.1f} / {most:5.1f} / {worst:5.1f} ms"


async def main(rows: int) -> None:
    print("times of claim and settle: median / 99th of 100 / longest")
    with Postgres() as postgres:
        for partition in (True, False):
            label = "PostgreSQL, a partition" if partition else "PostgreSQL, row by row"
            url = postgres.create_database(name := f"purge_{partition}".lower())
            await measure(label, url, lambda p=partition, n=name: fill_postgres(postgres, n, rows, partition=p))
    with MariaDB() as mariadb:
        await measure("MariaDB", mariadb.create_database("purge"), lambda: fill_mariadb(mariadb, "purge", rows))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "purge.db"
        await measure("SQLite", f"sqlite:///{path}", lambda: fill_sqlite(path, rows))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
