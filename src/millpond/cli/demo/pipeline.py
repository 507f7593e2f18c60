"""The lake's half of the demo, on a local Spark: export, report, the fix, and a replay that Spark itself works on."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.cli.demo.ground import Ground
from millpond.cli.demo.queue import Counts, worked
from millpond.cli.demo.screen import Screen
from millpond.cli.spark import spark_session
from millpond.clock import monotonic
from millpond.control import Control

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAILED_BY_THE_BUG = "state = 'FAILED' AND error LIKE 'KeyError%'"
REPLAY = "norway"
CORES = 2


@contextlib.contextmanager
def spark(ground: Ground, screen: Screen) -> Iterator[SparkSession]:
    settings = {
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.warehouse.dir": str(ground.folder.resolve() / "warehouse"),
        # What lives for a minute need not be compiled for speed.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    conf = [f"{name}={value}" for name, value in settings.items()]
    with contextlib.ExitStack() as stack:
        with screen.waiting("starting a local Spark"), _stderr_in(ground.spark_log):
            session = stack.enter_context(spark_session("millpond demo", f"local[{CORES}]", conf))
        yield session


@contextlib.contextmanager
def _stderr_in(file: Path) -> Iterator[None]:
    """A JVM keeps the standard error that it is born with: what it has to say then goes into a file."""
    sys.stderr.flush()
    ours = os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def export(session: SparkSession, ground: Ground, screen: Screen) -> None:
    from millpond.spark.lake import export

    began = monotonic()
    with screen.waiting("exporting"):
        done = export(session, ground.lake, ground.url, decode="infer")
    screen.say(f"{done.rows:,} messages, {done.size / 1e6:.1f} MB of Parquet, in {monotonic() - began:.1f} s.")


def report(session: SparkSession, ground: Ground, screen: Screen) -> Path:
    from millpond.cli.report_tables import print_report
    from millpond.spark.report import report_on

    with screen.waiting("measuring"):
        found = report_on(session, lake=str(ground.lake), database={"url": ground.url}, every=timedelta(seconds=1))
    ground.report.mkdir(exist_ok=True)
    found.write_tables(ground.report)
    page = found.write_page(ground.report / "report.html")
    screen.say()
    print_report(found, screen.console)
    screen.say()
    return page


def replay(session: SparkSession, ground: Ground, screen: Screen) -> int:
    from millpond.spark.replay import replay, selected

    with screen.waiting("replaying"):
        chosen = selected(session, FAILED_BY_THE_BUG, lake=str(ground.lake), database={"url": ground.url})
        return replay(chosen, name=REPLAY, database={"url": ground.url}).published


async def work(session: SparkSession, control: Control, ground: Ground, screen: Screen, count: int) -> Counts:
    """The same handlers, as they are now, in tasks of Spark."""
    from millpond.spark.handlers import crew_for

    pond = runpy.run_path(str(ground.shop))["pond"]
    sys.path.insert(0, str(ground.folder.resolve()))  # a local Spark's executors look where we do
    try:
        crew = crew_for(
            pond, session, at=f"{ground.shop.stem}:pond", tasks=CORES, queues=None, grace=15.0, until_idle=False
        )
    finally:
        sys.path.pop(0)
    return await worked(control, crew, screen, count)
