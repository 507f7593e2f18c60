"""Runs the steps of a lake on a schedule, in one Spark application, until stopped."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.clock import Seconds, SystemClock, as_datetime, monotonic, utc_text
from millpond.errors import InvalidOption, LakeError, StoreError
from millpond.loop import outside_loop
from millpond.spark.lake.compact import compact
from millpond.spark.lake.export import Exported, Exporter, shards_of
from millpond.spark.lake.export_task import RedactBody
from millpond.spark.lake.storage import Storage, storage_of
from millpond.spark.lake.table import KEEP
from millpond.spark.options import SparkShard, database_options
from millpond.table_prefix import TABLE_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("millpond.lake")

STEPS = ("export", "purge", "compact", "report")
_FEWEST = 8
"""Minimum number of small files to merge: with two, every round would rewrite the whole day."""
_SWEEP_EVERY = 86_400.0
"""Seconds between two searches for files that no commit needs: each lists the whole lake."""
_REPORTED = timedelta(days=7)
OnStep = Callable[[str, str], None]
"""Called with the step and a summary of its result."""


def run(
    spark: SparkSession,
    path: str | os.PathLike[str],
    url: str | None = None,
    *,
    steps: Sequence[str] | None = None,
    every: timedelta = timedelta(minutes=10),
    rounds: int | None = None,
    stop: threading.Event | None = None,
    on_step: OnStep | None = None,
    report_to: str | os.PathLike[str] | None = None,
    schema: str | None = None,
    table_prefix: str = TABLE_PREFIX,
    decode: str | None = None,
    redact: RedactBody | None = None,
    margin: Seconds | None = None,
    report_on: timedelta = _REPORTED,
    connections: int | None = None,
    pooler: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Run the steps, by default all of them, then again `every` after they began; `rounds` is the maximum number.

    `report_to` is the folder of the report: `report.html`, and a Parquet file for each table. Without it there is no
    report. It covers the messages settled in the time `report_on` before the step, by default a week.

    A step that fails because of a database or the lake, or in a task, is passed to `on_step` and repeated in the next
    round: nothing is lost. When `stop` is set, the current step is finished.
    """
    steps = steps or [step for step in STEPS if step != "report" or report_to is not None]
    if unknown := [step for step in steps if step not in STEPS]:
        raise InvalidOption(f"a lake's steps are {', '.join(STEPS)}; not {', '.join(unknown)}")
    if "report" in steps and report_to is None:
        raise InvalidOption("the step report needs a folder to write to: report_to, --report-to DIR")
    shards, stopping = shards_of(url, schema, table_prefix, pooler=pooler), stop or threading.Event()
    storage = storage_of(path, storage_options)

    def go_on() -> None:
        given: dict[str, Any] = {"decode": decode, "redact": redact, "margin": margin, "connections": connections}
        exporter = Exporter(spark, storage, shards, **given)
        job = _Job(exporter, spark, storage, Path(report_to or "."), report_on, shards)
        done = 0
        try:
            while not stopping.is_set() and done != rounds:
                began = monotonic()
                for step in steps:
                    if not stopping.is_set():
                        _do(job, step, on_step or _log)
                done += 1
                if done != rounds:
                    stopping.wait(max(0.0, began + every.total_seconds() - monotonic()))
        finally:
            job.exporter.close()

    outside_loop(go_on)


def _do(job: _Job, step: str, on_step: OnStep) -> None:
    from pyspark.errors import PySparkException

    try:
        on_step(step, getattr(job, step)())
    except (StoreError, LakeError, OSError) as e:
        on_step(step, f"postponed: {e}")
    except PySparkException as e:  # a task failed so often that Spark gave up
        on_step(step, f"postponed: Spark: {' '.join(str(e).strip().splitlines()[-1:])}")


def _log(step: str, what: str) -> None:
    log.info("%s: %s", step, what, extra={"event": "Lake", "step": step})


@dataclass
class _Job:
    """A method for each step; each returns a summary."""

    exporter: Exporter
    spark: SparkSession
    storage: Storage
    report_to: Path
    report_on: timedelta
    shards: Sequence[SparkShard]
    swept_at: float | None = None

    def export(self) -> str:
        return summary(self.exporter.export())

    def purge(self) -> str:
        text = f"{self.exporter.purge():,} messages deleted that the lake holds"
        return text + _without({number: str(error) for number, error in self.exporter.away.items()})

    def compact(self) -> str:
        sweep = self.swept_at is None or monotonic() - self.swept_at > _SWEEP_EVERY
        keep = KEEP if sweep else None
        done = compact(self.spark, self.storage.root, fewest=_FEWEST, keep=keep, storage_options=self.storage.options)
        self.swept_at = monotonic() if sweep else self.swept_at
        return done.summary()

    def report(self) -> str:
        from millpond.spark.report import report_on

        since = as_datetime(SystemClock().now()) - self.report_on
        source: dict[str, Any] = {"lake": self.storage.root, "storage_options": self.storage.options}
        found = report_on(self.spark, **source, database=database_options(self.shards), since=since)
        found.write_tables(self.report_to)
        return f"written to {found.write_page(self.report_to / 'report.html')}"


def summary(exported: Exported) -> str:
    """
    >>> summary(Exported(rows=1200, files=2, size=52_428_800, until_us={0: 1_000_000}))
    '1,200 messages in 2 files, 50.0 MiB; the lake holds all messages archived before 1970-01-01T00:00:01Z'
    >>> summary(Exported(rows=0, files=0, size=0, until_us={}, margin=60))
    '0 messages in 0 files, 0.0 MiB; those of the last 60 s are left to the next export'
    """
    text = f"{exported.rows:,} messages in {exported.files:,} files, {exported.size / (1 << 20):.1f} MiB"
    if exported.until_us:
        until = utc_text(as_datetime(min(exported.until_us.values())), "seconds")
        text += f"; the lake holds all messages archived before {until}"
    if exported.margin and not exported.rows:
        text += f"; those of the last {exported.margin:g} s are left to the next export"
    if exported.held:
        which = ", ".join(map(str, exported.held))
        text += f"; an open transaction holds back later messages (shard {which})"
    return text + _without(exported.away)


def _without(away: Mapping[int, str]) -> str:
    return "".join(f"; shard {number} was left out: {error}" for number, error in away.items())
