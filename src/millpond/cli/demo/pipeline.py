"""The Spark part of the demo: export, report, replay, and handlers on executors."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.cli.demo.demo_folder import DemoFolder
from millpond.cli.demo.queue import Counts, run_until_done
from millpond.cli.demo.screen import Screen
from millpond.cli.spark_session import spark_session
from millpond.clock import monotonic
from millpond.control import Control

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAILED_BY_THE_BUG = "state = 'FAILED' AND error LIKE 'KeyError%'"
REPLAY = "norway"
CORES = 2


@contextlib.contextmanager
def spark(demo: DemoFolder, screen: Screen) -> Iterator[SparkSession]:
    settings = {
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.warehouse.dir": str(demo.folder.resolve() / "warehouse"),
        # The JVM lives for a minute: full optimisation would cost more than it saves.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    conf = [f"{name}={value}" for name, value in settings.items()]
    with contextlib.ExitStack() as stack:
        with screen.waiting("starting a local Spark"), _stderr_to(demo.spark_log):
            session = stack.enter_context(spark_session("millpond demo", f"local[{CORES}]", conf))
        yield session


@contextlib.contextmanager
def _stderr_to(file: Path) -> Iterator[None]:
    """Redirect stderr to a file while a JVM starts: the JVM keeps the stderr that it inherits."""
    sys.stderr.flush()
    ours = os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def export(session: SparkSession, demo: DemoFolder, screen: Screen) -> None:
    from millpond.spark.lake import export

    began = monotonic()
    with screen.waiting("exporting"):
        # No margin: there is no other server that could take over.
        done = export(session, demo.lake, demo.url, decode="infer", margin=0)
    screen.print(f"{done.rows:,} messages, {done.size / 1e6:.1f} MB of Parquet, in {monotonic() - began:.1f} s.")


def report(session: SparkSession, demo: DemoFolder, screen: Screen) -> Path:
    from millpond.cli.report_tables import print_report
    from millpond.spark.report import report_on

    with screen.waiting("measuring"):
        found = report_on(session, lake=str(demo.lake), database={"url": demo.url}, every=timedelta(seconds=1))
    demo.report.mkdir(exist_ok=True)
    found.write_tables(demo.report)
    page = found.write_page(demo.report / "report.html")
    screen.print()
    print_report(found, screen.console)
    screen.print()
    return page


def replay(session: SparkSession, demo: DemoFolder, screen: Screen) -> int:
    from millpond.spark.replay import replay, selected

    with screen.waiting("replaying"):
        chosen = selected(session, FAILED_BY_THE_BUG, lake=str(demo.lake), database={"url": demo.url})
        return replay(chosen, name=REPLAY, database={"url": demo.url}).published


async def work(session: SparkSession, control: Control, demo: DemoFolder, screen: Screen, count: int) -> Counts:
    """Run the changed handlers in tasks of Spark."""
    from millpond.spark.handlers.run import supervisor_for

    pond = runpy.run_path(str(demo.shop))["pond"]
    sys.path.insert(0, str(demo.folder.resolve()))  # executors of a local Spark inherit this path
    try:
        supervisor = supervisor_for(
            pond, session, at=f"{demo.shop.stem}:pond", tasks=CORES, queues=None, grace=15.0, until_idle=False
        )
    finally:
        sys.path.pop(0)
    return await run_until_done(control, supervisor, screen, count)
