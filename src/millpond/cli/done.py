"""`millpond done`: messages become COMPLETED without a run."""

from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Json, command, print_changed
from millpond.cli.arguments import Ids
from millpond.control import Control


@command("done", Control, action="done")
async def done(
    control: Control,
    ids: Ids,
    force: Annotated[bool, typer.Option("--force", help="Also messages that a worker handles now.")] = False,
    json: Json = False,
) -> None:
    """Make waiting messages COMPLETED without running them.

    With --force also claimed ones: the result of their handler is then refused.
    """
    done = await control.operations.done(parse.ids(ids), force=force)
    advice = "millpond show ID prints its state" if force else "--force also completes those that a worker handles now"
    print_changed(done, "done", json, of=len(ids), advice=advice)
