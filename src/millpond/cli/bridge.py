"""`millpond bridge`: move queues from one transport to another."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from millpond.bridge import Bridge
from millpond.cli import secret_urls
from millpond.cli.app import Json, app, connect_to, print_result
from millpond.control import Control
from millpond.errors import InvalidURL, MillpondError
from millpond.seam.transport import Transport
from millpond.signals import stop_on_signals
from millpond.table_prefix import TABLE_PREFIX

log = logging.getLogger("millpond.bridge")


def _url(name: str, text: str) -> Any:
    variable = f"MILLPOND_{name}_URL"
    return typer.Argument(metavar=name, envvar=variable, show_default=False, help=text, callback=secret_urls.resolve)


def _option(name: str) -> Any:
    return typer.Option(
        metavar="NAME=VALUE",
        envvar=f"MILLPOND_{name}_OPTIONS",
        show_default=False,
        help=f"Option of the transport {name}; may be repeated.",
    )


def _require_url(url: str | None, name: str) -> str:
    if not url:
        raise InvalidURL(f"no {name} given: set MILLPOND_{name}_URL, or pass the URL, or @FILE with the URL in a file")
    return url


async def check_queues(source: Transport, queues: Sequence[str], *, may_come: bool) -> None:
    """Raise `UnknownQueue` for a queue without messages, or only warn: a relay may begin before its first message."""
    control = Control(source)
    if not may_come:
        for queue in queues:
            await control.check_queue(queue)
        return
    with contextlib.suppress(MillpondError):  # `run` waits for a database that is away
        for queue in queues:
            if (unknown := await control.unknown_queue(queue)) is not None:
                log.warning("%s; waiting for its first message", unknown)


@app.command("bridge")
def bridge(
    queue: Annotated[list[str], typer.Option(help="Name of a queue; may be repeated.")],
    source: Annotated[str | None, _url("FROM", "URL to claim messages from; @FILE reads it.")] = None,
    target: Annotated[str | None, _url("TO", "URL to publish messages to; @FILE reads it.")] = None,
    into: Annotated[
        str | None, typer.Option("--into", metavar="QUEUE", help="Publish into this queue; default: the same name.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Maximum number of messages per batch.", min=1, max=10_000)] = 500,
    from_option: Annotated[list[str] | None, _option("FROM")] = None,
    from_schema: Annotated[str | None, typer.Option(help="Database schema of FROM.")] = None,
    from_table_prefix: Annotated[str, typer.Option(help="Prefix of the table names of FROM.")] = TABLE_PREFIX,
    to_option: Annotated[list[str] | None, _option("TO")] = None,
    to_schema: Annotated[str | None, typer.Option(help="Database schema of TO.")] = None,
    to_table_prefix: Annotated[str, typer.Option(help="Prefix of the table names of TO.")] = TABLE_PREFIX,
    once: Annotated[bool, typer.Option("--once", help="Move the messages that are due now, then exit.")] = False,
    json: Json = False,
) -> None:
    """Move queues between two transports, at least once, under the same ids.

    Arguments are visible to other users of the machine: give URLs with passwords by the environment, or as @FILE.
    """

    async def work() -> Bridge:
        async with (
            connect_to(_require_url(source, "FROM"), from_schema, from_table_prefix, from_option) as giver,
            connect_to(_require_url(target, "TO"), to_schema, to_table_prefix, to_option) as taker,
        ):
            mover = Bridge(giver, taker, queue, into=into, batch=batch)
            await check_queues(giver, queue, may_come=not once)
            with stop_on_signals(mover.stop, replace=True):
                await (mover.drain() if once else mover.run())
            return mover

    ended = asyncio.run(work())
    print_result(f"{ended.moved} moved", {"moved": ended.moved, "left": ended.left}, json)
