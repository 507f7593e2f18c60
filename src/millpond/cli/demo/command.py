"""The command, and the order of its steps."""

import asyncio
import contextlib
import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli.app import app, connect_to
from millpond.cli.demo import pipeline, queue
from millpond.cli.demo.demo_folder import QUEUE, DemoFolder
from millpond.cli.demo.screen import Screen
from millpond.cli.list_messages import list_
from millpond.cli.stats import stats
from millpond.control import Control
from millpond.message import State
from millpond.table_prefix import TABLE_PREFIX

FOLDER = Path("millpond-demo")
_ORDER = '{"number": 1, "customer": "you", "country": "NO", "sku": "lamp", "total": 9}'


@app.command("demo")
def demo(
    orders: Annotated[int, typer.Option(min=1000, max=1_000_000, help="Number of messages to publish.")] = 30_000,
    folder: Annotated[Path, typer.Option(help="Folder for all files; replaced if it exists.")] = FOLDER,
) -> None:
    """Show publish, handlers, export, report and replay, on SQLite and Spark."""
    from millpond.spark.sessions import check

    screen, demo = Screen(), DemoFolder(folder)
    check()  # fail now, not after half of the demo
    demo.prepare()
    with _log_to(demo.log):
        asyncio.run(_show(demo, screen, orders))


@contextlib.contextmanager
def _log_to(file: Path) -> Iterator[None]:
    """Send log lines to a file: the screen belongs to the demo."""
    logger, handler = logging.getLogger("millpond"), logging.FileHandler(file)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.propagate = before


async def _show(demo: DemoFolder, screen: Screen, orders: int) -> None:
    screen.step(f"Publish {orders:,} orders into a SQLite file, {demo.folder / 'orders.db'}")
    await queue.publish(demo, screen, orders)
    async with connect_to(demo.url, None, TABLE_PREFIX) as transport:
        control = Control(transport)
        await _work(control, demo, screen, orders)
        screen.step(f"Export the archive to a lake, {demo.lake}")
        with pipeline.spark(demo, screen) as spark:
            await _analyse(control, spark, demo, screen)
    _print_next_steps(demo, screen)


async def _work(control: Control, demo: DemoFolder, screen: Screen, orders: int) -> None:
    screen.step(f"Work on them with two processes that run the handler in {demo.shop}")
    done = await queue.work(control, demo, screen, orders)
    screen.print(f"{done[State.COMPLETED]:,} are shipped and {done[State.FAILED]:,} failed; none is lost or waits.")
    screen.print("Failed messages are kept, with their reason and last error:")
    screen.print()
    await list_(control, QUEUE, state=[State.FAILED], limit=5)
    screen.print()


async def _analyse(control: Control, spark: Any, demo: DemoFolder, screen: Screen) -> None:
    await asyncio.to_thread(pipeline.export, spark, demo, screen)
    screen.step("Report on it with Spark")
    page = await asyncio.to_thread(pipeline.report, spark, demo, screen)
    screen.notice(f"The same with charts: {page.resolve().as_uri()}")
    screen.step(f"Fix the bug that the report shows, in {demo.shop}, and replay the failed orders")
    screen.print("Norway was missing (KeyError: 'NO'). The line is now:")
    screen.print(f"    {demo.fix()}")
    screen.print(f'millpond lake replay --name {pipeline.REPLAY} --where "{pipeline.FAILED_BY_THE_BUG}"')
    again = await asyncio.to_thread(pipeline.replay, spark, demo, screen)
    screen.print(f"{again:,} orders are published again, under new ids; a header names the original.")
    screen.step("Work on them where the data team has its machines: the same handler, on Spark's executors")
    await pipeline.work(spark, control, demo, screen, again)
    screen.print()
    await stats(control)


def other_readers(lake: Path) -> list[str]:
    """Lines of a shell that read the lake without Spark, Java and Millpond."""
    duckdb = f"import duckdb; duckdb.sql(\"SELECT state, count(*) FROM delta_scan('{lake}') GROUP BY 1\").show()"
    polars = f"import polars; print(polars.scan_delta('{lake}').group_by('state').len().collect())"
    return [
        f"python -c {shlex.quote(duckdb)}    # pip install duckdb",
        f"python -c {shlex.quote(polars)}    # pip install polars deltalake",
    ]


def _print_next_steps(demo: DemoFolder, screen: Screen) -> None:
    screen.console.print(f"\n[bold]The demo took {screen.seconds:.0f} s.[/bold] What to try next:\n")
    found = [] if shutil.which("millpond") else [f"export PATH={Path(sys.executable).parent}:$PATH"]
    for line in (
        f"cd {demo.folder}                # everything is in this folder",
        *found,
        f"export MILLPOND_URL={demo.url} MILLPOND_LAKE={demo.lake.resolve()}",
        f"millpond list {QUEUE} --state failed",
        f"millpond publish {QUEUE} '{_ORDER}'",
        "millpond run demo_shop:pond      # Ctrl-C ends it",
        f"millpond run demo_shop:pond --on spark --master 'local[{pipeline.CORES}]'",
        "millpond lake export && millpond lake report --html report.html",
        *other_readers(demo.lake.resolve()),
    ):
        screen.console.print(f"  {line}", markup=False)
    screen.console.print(f"\nThe page: {(demo.report / 'report.html').resolve().as_uri()}", markup=False)
    screen.console.print("The dashboard on these orders, at http://127.0.0.1:8420 after this command:", markup=False)
    screen.console.print(f"  {shlex.join(serve_command(demo))}\n", style="bold yellow", markup=False)


def serve_command(demo: DemoFolder) -> list[str]:
    """The command that serves the dashboard, from any folder."""
    program = [shutil.which("millpond")] if shutil.which("millpond") else [sys.executable, "-m", "millpond"]
    return [*map(str, program), "serve", "--url", demo.url, "--lake", str(demo.lake.resolve())]
