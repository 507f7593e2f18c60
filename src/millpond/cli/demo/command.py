"""The command, and the order of what is shown."""

import asyncio
import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from millpond.cli.app import app
from millpond.cli.demo import pipeline, queue
from millpond.cli.demo.ground import QUEUE, Ground
from millpond.cli.demo.screen import Screen
from millpond.cli.look import list_, stats
from millpond.control import Control
from millpond.message import State
from millpond.transports import connect

FOLDER = Path("millpond-demo")
_ORDER = '{"number": 1, "customer": "you", "country": "NO", "sku": "lamp", "total": 9}'


@app.command("demo")
def demo(
    orders: Annotated[int, typer.Option(min=1000, max=1_000_000, help="How many messages to publish.")] = 30_000,
    folder: Annotated[Path, typer.Option(help="Where all its files go; made anew.")] = FOLDER,
) -> None:
    """See orders published, worked on, exported, reported on and replayed, on SQLite and a local Spark."""
    screen, ground = Screen(), Ground(folder)
    _check_spark()  # now, and not after half of the demo
    ground.prepare()
    with _logs_in(ground.log):
        asyncio.run(_Demo(ground, screen, orders).show())


def _check_spark() -> None:
    from millpond.spark.start import check

    check()


@contextlib.contextmanager
def _logs_in(file: Path) -> Iterator[None]:
    """The screen is the demo's; what is logged meanwhile goes into a file."""
    logger, handler = logging.getLogger("millpond"), logging.FileHandler(file)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.propagate = before


class _Demo:
    def __init__(self, ground: Ground, screen: Screen, orders: int) -> None:
        self._ground = ground
        self._screen = screen
        self._orders = orders

    async def show(self) -> None:
        ground, screen, orders = self._ground, self._screen, self._orders
        screen.step(f"Publish {orders:,} orders into a SQLite file, {ground.folder / 'orders.db'}")
        await queue.publish(ground, screen, orders)
        transport = await connect(ground.url)
        try:
            control = Control(transport)
            await self._work(control)
            screen.step(f"Export the archive to a lake, {ground.lake}")
            with pipeline.spark(ground, screen) as spark:
                await self._analyse(control, spark)
        finally:
            await transport.close()
        self._say_what_next()

    async def _work(self, control: Control) -> None:
        ground, screen = self._ground, self._screen
        screen.step(f"Work on them with two processes that run the handler in {ground.shop}")
        done = await queue.work(control, ground, screen, self._orders)
        screen.say(f"{done[State.COMPLETED]:,} are shipped and {done[State.FAILED]:,} failed; none is lost or waits.")
        screen.say("What failed is kept, with its reason and its last error:")
        screen.say()
        await list_(control, QUEUE, state=[State.FAILED], limit=5)
        screen.say()

    async def _analyse(self, control: Control, spark: Any) -> None:
        ground, screen = self._ground, self._screen
        await asyncio.to_thread(pipeline.export, spark, ground, screen)
        screen.step("Report on it with Spark")
        page = await asyncio.to_thread(pipeline.report, spark, ground, screen)
        screen.notice(f"The same with charts: {page.resolve().as_uri()}")
        screen.step(f"Fix the bug that the report shows, in {ground.shop}, and replay what it cost")
        screen.say("Norway was missing (KeyError: 'NO'). The line is now:")
        screen.say(f"    {ground.fix()}")
        screen.say(f'millpond lake replay --name {pipeline.REPLAY} --where "{pipeline.FAILED_BY_THE_BUG}"')
        again = await asyncio.to_thread(pipeline.replay, spark, ground, screen)
        screen.say(f"{again:,} orders are published again, under new ids that say which they replay.")
        screen.step("Work on them where the data team has its machines: the same handler, on Spark's executors")
        await pipeline.work(spark, control, ground, screen, again)
        screen.say()
        await stats(control)

    def _say_what_next(self) -> None:
        ground, screen = self._ground, self._screen
        screen.console.print(f"\n[bold]All of this took {screen.seconds:.0f} s.[/bold] What to try next:\n")
        found = [] if shutil.which("millpond") else [f"export PATH={Path(sys.executable).parent}:$PATH"]
        for line in (
            f"cd {ground.folder}                # everything is in this folder",
            *found,
            f"export MILLPOND_URL={ground.url} MILLPOND_LAKE={ground.lake.resolve()}",
            f"millpond list {QUEUE} --state failed",
            f"millpond publish {QUEUE} '{_ORDER}'",
            "millpond run demo_shop:pond      # Ctrl-C ends it",
            f"millpond run demo_shop:pond --on spark --master 'local[{pipeline.CORES}]'",
            "millpond lake export && millpond lake report --html report.html",
        ):
            screen.console.print(f"  {line}", markup=False)
        screen.console.print(f"\nThe page: {(ground.report / 'report.html').resolve().as_uri()}\n", markup=False)
