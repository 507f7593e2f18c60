"""`millpond show`: all fields of one message."""

from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Declined, Json, command, print_json
from millpond.cli.table import plain, short
from millpond.control import Control, facts


@command("show", Control)
async def show(
    control: Control,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")],
    json: Json = False,
) -> None:
    """Show all fields of one message, and its last failed attempts."""
    rows = await control.operations.find(parse.ids([id]))
    if not rows:
        raise Declined(f"there is no message {id}: it may have been purged, or it is in another database")
    if json:
        print_json(facts(rows[0]))
        return
    shown = facts(rows[0])
    attempts = shown.pop("failed_attempts", [])
    for name, value in shown.items():
        print(f"{name:16} {short(value, limit=10_000)}")
    for attempt in attempts:
        took = f" after {attempt['took']:.3f} s" if "took" in attempt else ""
        print(f"failed at        {attempt['ended_at']}{took}: {plain(attempt.get('error', ''))}")
        for line in attempt.get("traceback", "").splitlines():
            print(f"                 {plain(line)}")
