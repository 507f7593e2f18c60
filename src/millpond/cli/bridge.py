"""`millpond bridge`: a queue goes from one place to another."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import typer

from millpond.bridge import Bridge
from millpond.cli.app import Json, app, connect_to, say_json
from millpond.transport import Transport

Connect = Callable[[], Awaitable[Transport]]


@app.command("bridge")
def bridge(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The URL that messages are taken from.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The URL that they are published at.")],
    queue: Annotated[list[str], typer.Option(help="The queue's name; may be given again.")],
    into: Annotated[str | None, typer.Option("--into", metavar="QUEUE", help="Into this queue instead.")] = None,
    batch: Annotated[int, typer.Option(help="Messages moved at a time.", min=1, max=10_000)] = 500,
    from_schema: Annotated[str | None, typer.Option(help="The database schema of FROM.")] = None,
    from_table_prefix: Annotated[str, typer.Option(help="What the names of FROM's tables begin with.")] = "",
    to_schema: Annotated[str | None, typer.Option(help="The database schema of TO.")] = None,
    to_table_prefix: Annotated[str, typer.Option(help="What the names of TO's tables begin with.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Move what is due now, and end.")] = False,
    json: Json = False,
) -> None:
    """Move queues between two transports, at least once and under the same ids: an outbox relay, either way."""
    giver = partial(connect_to, source, from_schema, from_table_prefix)
    taker = partial(connect_to, target, to_schema, to_table_prefix)
    moved = asyncio.run(_bridge(giver, taker, queue, into, batch, once))
    if json:
        say_json({"moved": moved})
    else:
        print(f"{moved} moved")


async def _bridge(from_: Connect, to: Connect, queues: list[str], into: str | None, batch: int, once: bool) -> int:
    giver = await from_()
    try:
        taker = await to()
        try:
            mover = Bridge(giver, taker, queues, into=into, batch=batch)
            loop = asyncio.get_running_loop()
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(signum, mover.stop)
            await (mover.drain() if once else mover.run())
            return mover.moved
        finally:
            await taker.close()
    finally:
        await giver.close()
