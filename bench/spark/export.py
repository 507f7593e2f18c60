"""Exporting the archive to Parquet: our lake against Spark's JDBC reader and Parquet writer, on the same table."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from bench.measure import Measurement, Work, ratio, single, take_turns
from bench.spark.batch import PARTS, fill, jdbc
from bench.spark.setup import Setup
from millpond.spark import lake
from millpond.spark.lake.table import Lake

BAR = 1.5
MOST_COMMIT = 5
"""Percent of an export's time that the commit to the table's log may take."""
TIMES = 5
"""The timed archive is this many times as large as the one of the memory comparison."""
MOST_ROUNDS = 3
MOST_GROWTH = 200
FEWEST = 10_000
"""With fewer messages the driver's memory does not depend on them."""


async def export(setup: Setup, rows: int, rounds: int) -> list[Measurement]:
    """Both sides write every column of all rows into a new folder; the first round is a warm-up."""
    fill(setup, rows)
    small = _peak(setup.url) if rows >= FEWEST else None
    leaf, pages = fill(setup, rows * (TIMES - 1))
    large = _peak(setup.url) if rows >= FEWEST else None
    works = {
        "ours": _work(lambda folder: _ours(setup, folder, rows * TIMES)),
        "theirs": _work(lambda folder: jdbc(setup, leaf, pages, "*").write.parquet(str(folder))),
    }
    took = await take_turns(works, min(rounds, MOST_ROUNDS) + 1)
    setup.execute("TRUNCATE millpond_archive", "DELETE FROM millpond_export", "DELETE FROM millpond_export_range")
    found = [
        _commit_share(),
        ratio(
            "spark-export",
            f"export of {rows * TIMES:,} archived messages to the lake",
            f"JDBC by ranges of pages, fetchsize 10,000, {PARTS} files of Parquet",
            took["ours"][1:],
            took["theirs"][1:],
            rows * TIMES,
            at_least=BAR,
        ),
    ]
    if small is not None and large is not None:
        found.append(_growth(large - small, rows))
    return found


_COMMITS: list[tuple[float, float]] = []
"""Seconds of each export's commit, and of the whole export."""


def _commit_share() -> Measurement:
    share = sorted(100 * commit / whole for commit, whole in _COMMITS[1:] or _COMMITS)
    what = "share of the commit to the table's log in the time of an export, in percent"
    return single("spark-export-commit", what, "the whole export", share[len(share) // 2], "%", at_most=MOST_COMMIT)


def _growth(mib: float, rows: int) -> Measurement:
    what = f"growth of the driver's memory, Python and Java, from {rows:,} to {rows * TIMES:,} messages"
    return single("spark-export-memory", what, "the smaller export", mib, "MiB", at_most=MOST_GROWTH)


def _work(write: Callable[[Path], None]) -> Work:
    async def timed() -> float:
        folder = Path(tempfile.mkdtemp(prefix="millpond-bench-"))
        began = time.monotonic()
        write(folder / "lake")
        took = time.monotonic() - began
        shutil.rmtree(folder)
        return took

    return timed


def _ours(setup: Setup, folder: Path, rows: int) -> None:
    commit = 0.0
    original = Lake.export

    def timed(*given: Any) -> None:
        nonlocal commit
        began = time.monotonic()
        original(*given)
        commit += time.monotonic() - began

    began = time.monotonic()
    with mock.patch.object(Lake, "export", timed):
        done = lake.export(setup.spark, folder, setup.url, margin=0)
    _COMMITS.append((commit, time.monotonic() - began))
    assert done.rows == rows, done


def _peak(url: str) -> float:
    """Peak memory of a separate driver process, Python and Java, in MiB."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "bench.spark.export", url, f"{folder}/lake"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return float(json.loads(done.stdout.splitlines()[-1]))


def _export_alone(url: str, path: str) -> None:
    import os

    import millpond.spark

    spark = millpond.spark.session("millpond-bench", "local[2]", {"spark.driver.memory": "2g"})
    lake.export(spark, path, url, margin=0)
    java = int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
    peak = sum(_high_water(pid) for pid in (os.getpid(), java))
    spark.stop()
    print(json.dumps(peak))


def _high_water(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    _export_alone(*sys.argv[1:])
