"""`millpond streams`: list the Spark queries that consume queues; release the messages that one holds."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from millpond.cli.app import Declined, Json, command, print_json, print_result
from millpond.cli.parse import duration
from millpond.cli.table import plain, table, when
from millpond.control import Control, StreamView
from millpond.errors import InvalidOption, UnknownStream


class StreamVerb(StrEnum):
    RELEASE = "release"


@command("streams", Control, action="streams")
async def streams(
    control: Control,
    verb: Annotated[
        StreamVerb | None,
        typer.Argument(show_default=False, metavar="release", help="release NAME: give back the stream's messages."),
    ] = None,
    name: Annotated[str | None, typer.Argument(show_default=False, help="Name of the stream.")] = None,
    alert: Annotated[
        str | None,
        typer.Option(show_default=False, help="Exit with 1 if a stream held messages longer, such as 10m."),
    ] = None,
    json: Json = False,
) -> None:
    """List the Spark queries that consume queues, or release one."""
    if verb is not None:
        await _release(control, name, json)
        return
    longest = duration(alert, "--alert")
    found = await control.stream_views()
    stuck = [] if longest is None else [v.status for v in found if (v.status.held_for or 0) > longest.total_seconds()]
    if stuck:
        names = ", ".join(plain(status.name) for status in stuck)
        raise Declined(
            f"held for more than {alert}: {names}. If the query will not return, run: millpond streams release NAME"
        )
    if json:
        print_json({"streams": [_facts(view) for view in found]})
    else:
        heads = ["stream", "held", "for", "waiting", "behind", "acked claim", "epoch", "opened"]
        table(heads, [_line(view) for view in found], right=range(1, 7), empty="no streams")


async def _release(control: Control, name: str | None, json: bool) -> None:
    if name is None:
        raise InvalidOption("no stream given: pass its name; millpond streams lists them")
    try:
        count = await control.streams.release(name)
    except UnknownStream as e:
        raise Declined(str(e)) from None
    print_result(f"{count} given back by {plain(name)}", {"stream": name, "released": count}, json)


def _facts(view: StreamView) -> dict[str, Any]:
    status = view.status
    return {
        "name": status.name,
        "held": status.held,
        "held_for": status.held_for,
        "queues": list(view.queues),
        "waiting": view.waiting,
        "complete": view.complete,
        "behind": view.behind,
        "acked_seq": status.acked_seq,
        "epoch": status.epoch,
        "opened_at": when(status.opened_us),
    }


def _line(view: StreamView) -> list[str]:
    status = view.status
    return [
        plain(status.name),
        f"{status.held:,}",
        _span(status.held_for),
        "" if view.waiting is None else f"{view.waiting:,}{'' if view.complete else '+'}",
        _span(view.behind),
        str(status.acked_seq),
        str(status.epoch),
        when(status.opened_us) or "",
    ]


def _span(seconds: float | None) -> str:
    return "" if seconds is None else str(timedelta(seconds=int(seconds)))
