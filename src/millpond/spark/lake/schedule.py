"""The steps of a lake again and again, in one long-lived Spark application, until told to stop."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.clock import as_datetime, monotonic
from millpond.errors import InvalidOption, StoreError
from millpond.spark.lake.compact import compact_opened
from millpond.spark.lake.export import Exported, Exporter, beside_the_loop, shards_of
from millpond.spark.options import Shard

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("millpond.lake")

STEPS = ("export", "purge", "compact", "report")
_FEWEST = 8
"""Small files of a queue and day that are merged: with two, every round would write all of the day again."""
Tell = Callable[[str, str], None]
"""Told the step and what came of it."""


def run(
    spark: SparkSession,
    path: str | os.PathLike[str],
    url: str | None = None,
    *,
    steps: Sequence[str] | None = None,
    every: timedelta = timedelta(minutes=10),
    rounds: int | None = None,
    stop: threading.Event | None = None,
    tell: Tell | None = None,
    report_to: str | os.PathLike[str] | None = None,
    schema: str | None = None,
    table_prefix: str = "",
    decode: str | None = None,
) -> None:
    """Do the steps, all unless some are named, then again so long after they began; `rounds` limits how often.

    `report_to` is the folder of the report: `report.html`, and a Parquet file for each table. Without it there is none.

    A step that fails because of a database, or in a task, is told, and tried again in the next round: nothing is lost.
    When `stop` is set the step under way is finished, and that is all. Being fenced ends it with `LakeFenced`.
    """
    steps = steps or [step for step in STEPS if step != "report" or report_to is not None]
    if unknown := [step for step in steps if step not in STEPS]:
        raise InvalidOption(f"a lake's steps are {', '.join(STEPS)}; not {', '.join(unknown)}")
    if "report" in steps and report_to is None:
        raise InvalidOption("the step report needs a folder to write to: report_to, --report-to DIR")
    shards, told_to_stop = shards_of(url, schema, table_prefix), stop or threading.Event()

    def go_on() -> None:
        job = _Job(Exporter(spark, path, shards, decode=decode), spark, Path(report_to or "."), shards)
        done = 0
        try:
            while not told_to_stop.is_set() and done != rounds:
                began = monotonic()
                for step in steps:
                    if not told_to_stop.is_set():
                        _do(job, step, tell or _log)
                done += 1
                if done != rounds:
                    told_to_stop.wait(max(0.0, began + every.total_seconds() - monotonic()))
        finally:
            job.exporter.close()

    beside_the_loop(go_on)


def _do(job: _Job, step: str, tell: Tell) -> None:
    from pyspark.errors import PySparkException

    try:
        tell(step, getattr(job, step)())
    except StoreError as e:
        tell(step, f"not now: {e}")
    except PySparkException as e:  # a task failed, and so often that Spark gave up
        tell(step, f"not now: Spark says: {' '.join(str(e).strip().splitlines()[-1:])}")


def _log(step: str, what: str) -> None:
    log.info("%s: %s", step, what, extra={"event": "Lake", "step": step})


class _Job:
    """Each step, and what it says of itself."""

    def __init__(self, exporter: Exporter, spark: SparkSession, report_to: Path, shards: Sequence[Shard]) -> None:
        self.exporter = exporter
        self._spark = spark
        self._report_to = report_to
        self._shards = shards

    def export(self) -> str:
        return told(self.exporter.export())

    def purge(self) -> str:
        return f"{self.exporter.purge():,} messages deleted that the lake holds"

    def compact(self) -> str:
        done = compact_opened(self._spark, self.exporter.opened(), fewest=_FEWEST)
        return f"{done.replaced:,} small files became {done.by:,}; {done.deleted:,} deleted that nobody needs"

    def report(self) -> str:
        from millpond.spark.report import report_on

        given = {"url": " ".join(shard.url.raw for shard in self._shards), "schema": self._shards[0].schema}
        given["tablePrefix"] = self._shards[0].table_prefix
        database = {name: value for name, value in given.items() if value}
        found = report_on(self._spark, lake=str(self.exporter.lake.root), database=database)
        found.write_tables(self._report_to)
        return f"written to {found.write_page(self._report_to / 'report.html')}"


def told(exported: Exported) -> str:
    """
    >>> told(Exported(rows=1200, files=2, size=52_428_800, until_us={0: 1_000_000}))
    '1,200 messages in 2 files, 50.0 MiB; the lake holds what was archived before 1970-01-01T00:00:01Z'
    """
    text = f"{exported.rows:,} messages in {exported.files:,} files, {exported.size / (1 << 20):.1f} MiB"
    if exported.until_us:
        until = as_datetime(min(exported.until_us.values())).isoformat(timespec="seconds").replace("+00:00", "Z")
        text += f"; the lake holds what was archived before {until}"
    if exported.held:
        which = ", ".join(map(str, exported.held))
        text += f"; a transaction that is not committed holds back what came after it (shard {which})"
    return text
