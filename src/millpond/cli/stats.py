"""`millpond stats`: number of messages by queue and state."""

from typing import Annotated, Any

import typer

from millpond.cli.app import Json, command, print_json
from millpond.cli.table import plain, table, when
from millpond.control import Control
from millpond.message import State
from millpond.seam.operations import QueueStats


@command("stats", Control)
async def stats(
    control: Control,
    queues: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="Names of queues; default: all queues.")
    ] = None,
    exact: Annotated[bool, typer.Option(help="Count the whole archive, even above a million messages.")] = False,
    json: Json = False,
) -> None:
    """Count messages by queue and state."""
    found = await control.operations.count(queues or None, exact=exact)
    if json:
        print_json({"queues": {stats.queue: _counts(stats) for stats in found}})
    else:
        rows = [_line(stats) for stats in found]
        table(["queue", *State, "oldest due", ""], rows, right=range(1, 6), empty="no messages")
    for queue in queues or ():
        await control.check_queue(queue)


def _counts(stats: QueueStats) -> dict[str, Any]:
    return {
        **{state.value: stats.counts.get(state) for state in State},
        "retried": stats.retried,
        "approximate": stats.approximate,
        "paused": stats.paused,
        "oldest_due_at": when(stats.oldest_due_us),
        **({"missing_shards": list(stats.missing)} if stats.missing else {}),
    }


def _line(stats: QueueStats) -> list[str]:
    notes = ["paused"] * stats.paused + [f"{stats.retried:,} retried"] * (stats.retried > 0)
    notes += ["archive not fully counted: --exact"] * stats.approximate
    return [
        plain(stats.queue),
        *(f"{stats.counts[state]:,}" if state in stats.counts else "?" for state in State),
        when(stats.oldest_due_us) or "",
        ", ".join(notes),
    ]
