"""`millpond cancel`: waiting messages become FAILED without a run; running ones are interrupted by their workers."""

from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Json, command, print_changed, print_result
from millpond.cli.arguments import Ids
from millpond.control import Control


@command("cancel", Control, action="cancel")
async def cancel(
    control: Control,
    ids: Ids,
    reason: Annotated[str, typer.Option(help="Reason stored in the archive.")] = "cancelled",
    running: Annotated[
        bool, typer.Option("--running", help="Also cancel messages that run, by their workers.")
    ] = False,
    json: Json = False,
) -> None:
    """Make waiting messages FAILED without running them."""
    chosen = parse.ids(ids)
    done = list(await control.operations.cancel(chosen, reason=reason))
    asked = await control.workers.cancel([id_ for id_ in chosen if id_ not in done], reason=reason) if running else []
    if not asked:
        advice = (
            "and none runs; millpond show ID prints its state"
            if running
            else "--running also cancels messages that run"
        )
        print_changed(done, "cancelled", json, of=len(ids), advice=advice)
        return
    facts = {"cancelled": [str(id_) for id_ in done], "requested": [str(id_) for id_ in asked]}
    print_result(f"{len(done)} cancelled, {len(asked)} running ones are cancelled by their workers", facts, json)
