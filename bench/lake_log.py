"""`python -m bench.lake_log [FILES]`: costs of a lake's log with 1,000 and with many files, default 100,000.

Every day has 1,000 files. Measured are a commit of one more file, choosing the files of one day, and planning a read
of that day in Spark, each as the median of several times; and the size of the log. The exit code is 1 if planning takes
more than twice as long with many files.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import millpond.spark
from millpond.spark import lake
from millpond.spark.lake.files import Bounds, File, Progress
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake
from millpond.spark.lake.writers import file_schema

PER_DAY = 1000
PLAN = "plan their read (ms)"
MOST = 2.0
"""The time to plan the same read of a lake with many files, at most, against one with 1,000."""
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
TIMES = 5


def fill(path: Path, days: int) -> None:
    """A lake whose log has so many days. Only the files of the first day exist."""
    table = Lake.create(storage_of(path), file_schema(None))
    schema = file_schema(None)
    row = {"id": "x", "queue": "q", "state": "COMPLETED", "payload": b"x", "shard": 0, "archived_at": FIRST}
    full = {name: row.get(name) for name in schema.names} | {"day": FIRST.date()}
    folder = path / f"day={FIRST:%Y-%m-%d}"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([full], schema), folder / "0.parquet")
    for number in range(1, PER_DAY):
        os.link(folder / "0.parquet", folder / f"{number}.parquet")
    size = (folder / "0.parquet").stat().st_size
    until: int | None = None
    for day in range(days):
        at = FIRST + timedelta(days=day)
        files = [new_file(at, str(number), size) for number in range(PER_DAY)]
        progress = Progress(until, int((at + timedelta(days=1)).timestamp()) * 1_000_000, PER_DAY)
        table.export(files, {0: progress})
        until = progress.until


def new_file(at: datetime, name: str, size: int) -> File:
    bounds = Bounds("q", "COMPLETED", int(at.timestamp()) * 1_000_000, 0)
    return File(f"day={at:%Y-%m-%d}/{name}.parquet", f"{at:%Y-%m-%d}", 1, size, bounds, bounds)


def median_ms(do: Callable[[], Any]) -> float:
    took = []
    for _ in range(TIMES):
        began = time.perf_counter()
        do()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1000


def measure(spark: Any, path: Path, days: int) -> dict[str, float]:
    fill(path, days)
    day = f"{FIRST:%Y-%m-%d}"
    files = len(lake.files(path, day=day))
    assert files == PER_DAY, files

    def commit() -> None:
        table = Lake.open(storage_of(path))
        since = table.until(0)
        assert since is not None
        table.export([new_file(FIRST + timedelta(days=days), str(since), 1)], {0: Progress(since, since + 1, 1)})

    return {
        "open, commit a file (ms)": median_ms(commit),
        "choose 1,000 files (ms)": median_ms(lambda: lake.files(path, day=day)),
        PLAN: median_ms(lambda: lake.read(spark, path, day=day)._jdf.queryExecution().executedPlan()),
        "log (MB)": sum(file.stat().st_size for file in (path / "_delta_log").iterdir()) / 1e6,
    }


def main(files: int) -> int:
    spark = millpond.spark.session("millpond-bench", "local[2]")
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        measure(spark, Path(folder) / "warm-up", 1)
        for days in (1, files // PER_DAY):
            found[days * PER_DAY] = measure(spark, Path(folder) / f"lake-{days}", days)
    spark.stop()
    for what in next(iter(found.values())):
        print(f"{what:28}", *(f"{number:>9,} files: {one[what]:9.1f}" for number, one in found.items()))
    plans = [one[PLAN] for one in found.values()]
    ratio = plans[-1] / plans[0]
    print(f"planning with many files against 1,000: {ratio:.2f}, at most {MOST:g}")
    return 1 if ratio > MOST else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
