"""`millpond streams`: the Spark queries that consume queues, and how to take back what one holds."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from millpond.cli.app import Json, Refused, command, say_json
from millpond.cli.table import plain, table, when
from millpond.cli.values import duration
from millpond.clock import as_datetime
from millpond.control import Control
from millpond.errors import InvalidOption, UnknownStream
from millpond.transport import StreamStatus


class Verb(StrEnum):
    RELEASE = "release"


@command("streams", Control)
async def streams(
    control: Control,
    verb: Annotated[Verb | None, typer.Argument(show_default=False, help="Give back what a stream holds.")] = None,
    name: Annotated[str | None, typer.Argument(show_default=False, help="The stream's name.")] = None,
    alert: Annotated[
        str | None,
        typer.Option(show_default=False, help="Fail if one holds messages for longer, such as 10m: for monitoring."),
    ] = None,
    json: Json = False,
) -> None:
    """List the Spark queries that consume queues, or release what a dead one holds."""
    if verb is not None:
        await _release(control, name, json)
        return
    longest = duration(alert, "--alert")
    found = await control.streams()
    stuck = [] if longest is None else [s for s in found if (s.held_for or 0) > longest.total_seconds()]
    if stuck:
        names = ", ".join(plain(status.name) for status in stuck)
        raise Refused(f"held for more than {alert}: {names}. If its query is not coming back: millpond streams release")
    if json:
        say_json({"streams": [_facts(status) for status in found]})
    elif found:
        table(
            ["stream", "held", "for", "acked claim", "epoch", "opened"],
            [_line(status) for status in found],
            right=(1, 2, 3, 4),
        )
    else:
        print("no streams")


async def _release(control: Control, name: str | None, json: bool) -> None:
    if name is None:
        raise InvalidOption("release which stream? Give its name; millpond streams lists them")
    try:
        count = await control.release_stream(name)
    except UnknownStream as e:
        raise Refused(str(e)) from None
    say_json({"stream": name, "released": count}) if json else print(f"{count} given back by {plain(name)}")


def _facts(status: StreamStatus) -> dict[str, Any]:
    return {
        "name": status.name,
        "held": status.held,
        "held_for": status.held_for,
        "acked_seq": status.acked_seq,
        "epoch": status.epoch,
        "opened_at": None if status.opened_us is None else when(as_datetime(status.opened_us)),
    }


def _line(status: StreamStatus) -> list[str]:
    return [
        plain(status.name),
        f"{status.held:,}",
        "" if status.held_for is None else str(timedelta(seconds=int(status.held_for))),
        str(status.acked_seq),
        str(status.epoch),
        "" if status.opened_us is None else when(as_datetime(status.opened_us)),
    ]
