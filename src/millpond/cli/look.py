"""`millpond stats`, `list` and `show`: what is in the queues."""

from typing import Annotated, Any

import typer

from millpond.cli import values
from millpond.cli.app import Json, Refused, command, say_json
from millpond.cli.table import plain, short, table, when
from millpond.clock import as_datetime
from millpond.control import Control, body, facts
from millpond.message import State
from millpond.transport import NEVER_US, QueueStats, Row

States = Annotated[
    list[State] | None, typer.Option("--state", case_sensitive=False, help="Only in this state; may be given again.")
]


@command("stats", Control)
async def stats(
    control: Control,
    queues: Annotated[list[str] | None, typer.Argument(metavar="QUEUE", help="All queues if none is given.")] = None,
    exact: Annotated[bool, typer.Option(help="Count all of the archive, however large.")] = False,
    json: Json = False,
) -> None:
    """Count messages by queue and state."""
    found = await control.counts(queues or [], exact=exact)
    if json:
        say_json({"queues": {stats.queue: _counts(stats) for stats in found}})
    elif found:
        table(["queue", *State, "oldest due", ""], [_line(stats) for stats in found], right=range(1, 6))
    else:
        print("no messages")


def _counts(stats: QueueStats) -> dict[str, Any]:
    oldest = stats.oldest_due_us
    return {
        **{state.value: stats.counts.get(state, 0) for state in State},
        "approximate": stats.approximate,
        "paused": stats.paused,
        "oldest_due_at": None if oldest is None else when(as_datetime(oldest)),
    }


def _line(stats: QueueStats) -> list[str]:
    oldest = stats.oldest_due_us
    notes = ["paused"] * stats.paused + ["archive not fully counted: --exact"] * stats.approximate
    return [
        plain(stats.queue),
        *(f"{stats.counts.get(state, 0):,}" for state in State),
        "" if oldest is None else when(as_datetime(oldest)),
        ", ".join(notes),
    ]


@command("list", Control)
async def list_(
    control: Control,
    queue: Annotated[str | None, typer.Argument(show_default=False, help="All queues if none is given.")] = None,
    state: States = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    json: Json = False,
) -> None:
    """List messages: the live ones, then the archived ones (COMPLETED, FAILED), newest first."""
    rows = await control.messages(queue, states=state or [], limit=limit)
    if json:
        say_json({"messages": [facts(row) for row in rows]})
    elif rows:
        table(["id", "queue", "state", "when", "tries", "what"], [_entry(row) for row in rows], right=[4])
    else:
        print("no messages")


def _entry(row: Row) -> list[str]:
    what = ": ".join(text for text in (row.reason, row.error) if text) or short(body(row))
    at = row.archived_us or (row.lease_us if row.state is State.PROCESSING else None) or row.due_us
    kind = "archived" if row.archived_us else "leased until" if row.state is State.PROCESSING else "due"
    return [
        str(row.id),
        plain(row.queue),
        row.state.value,
        "held by a stream" if row.lease_us == NEVER_US else f"{kind} {when(as_datetime(at))}",
        str(row.deliveries),
        plain(what),
    ]


@command("show", Control)
async def show(
    control: Control,
    id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    json: Json = False,
) -> None:
    """Show all that is known of one message."""
    rows = await control.find(values.ids([id]))
    if not rows:
        raise Refused(f"there is no message {id}; it may have been purged, or be in another database")
    if json:
        say_json(facts(rows[0]))
        return
    for name, value in facts(rows[0]).items():
        print(f"{name:16} {short(value, limit=10_000)}")
