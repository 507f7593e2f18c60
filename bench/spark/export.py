"""Exporting the archive to Parquet: our lake against Spark's JDBC reader and Parquet writer, on the same table."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.measure import Measurement, Work, ratio, single, take_turns
from bench.spark.batch import PARTS, fill, jdbc
from bench.spark.ground import Ground
from millpond.spark import lake

BAR = 1.0
TIMES = 5
"""The archive that is timed is so many times as large as the one that the driver's memory is compared with."""
MOST_ROUNDS = 3
MOST_GROWTH = 200
FEWEST = 10_000
"""Messages below which a driver's memory tells nothing of them."""


async def export(ground: Ground, rows: int, rounds: int) -> list[Measurement]:
    """Both write every column of everything into a new folder; a first round warms everything up."""
    fill(ground, rows)
    small = _peak(ground.url) if rows >= FEWEST else None
    leaf, pages = fill(ground, rows * (TIMES - 1))
    large = _peak(ground.url) if rows >= FEWEST else None
    works = {
        "ours": _work(lambda folder: _ours(ground, folder, rows * TIMES)),
        "theirs": _work(lambda folder: jdbc(ground, leaf, pages, "*").write.parquet(str(folder))),
    }
    took = await take_turns(works, min(rounds, MOST_ROUNDS) + 1)
    ground.execute("TRUNCATE message_archive", "DELETE FROM message_export")
    found = [
        ratio(
            "spark-export",
            f"export of {rows * TIMES:,} archived messages to the lake",
            f"JDBC by ranges of pages, fetchsize 10,000, {PARTS} files of Parquet",
            took["ours"][1:],
            took["theirs"][1:],
            rows * TIMES,
            at_least=BAR,
        )
    ]
    if small is not None and large is not None:
        found.append(_growth(large - small, rows))
    return found


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


def _ours(ground: Ground, folder: Path, rows: int) -> None:
    done = lake.export(ground.spark, folder, ground.url)
    assert done.rows == rows, done


def _peak(url: str) -> float:
    """MiB that a driver of its own, Python and Java, had at most."""
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
    lake.export(spark, path, url)
    java = int(spark._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
    peak = sum(_high_water(pid) for pid in (os.getpid(), java))
    spark.stop()
    print(json.dumps(peak))


def _high_water(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    _export_alone(*sys.argv[1:])
