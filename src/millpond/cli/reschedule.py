"""`millpond reschedule`: change due time, priority or attempts of waiting messages."""

from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Json, command, print_changed
from millpond.cli.arguments import Ids
from millpond.control import Control
from millpond.errors import InvalidOption


@command("reschedule", Control, action="reschedule")
async def reschedule(
    control: Control,
    ids: Ids,
    priority: Annotated[int | None, typer.Option(help="New priority, 0 (first) to 100 (last).")] = None,
    delay: Annotated[str | None, typer.Option(help="Time from now until due: 30s, 15m, 12h, 7d.")] = None,
    due_at: Annotated[str | None, typer.Option(help="Time when due: 2030-01-31T08:00:00Z.")] = None,
    attempts: Annotated[int | None, typer.Option(help="New number of counted handler runs, and of deliveries.")] = None,
    json: Json = False,
) -> None:
    """Change due time, priority or attempts of waiting messages."""
    if priority is None and delay is None and due_at is None and attempts is None:
        raise InvalidOption("no change given: pass --priority, --delay, --due-at or --attempts")
    changed = await control.operations.reschedule(
        parse.ids(ids),
        priority=priority,
        delay=parse.duration(delay, "--delay"),
        due_at=parse.parse_time(due_at, "--due-at"),
        attempts=attempts,
    )
    print_changed(changed, "rescheduled", json, of=len(ids))
