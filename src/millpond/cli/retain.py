"""`millpond retain`: how long the archive of a queue is kept."""

from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Json, command, print_result
from millpond.cli.arguments import Create, Queue
from millpond.cli.table import plain
from millpond.control import Control


@command("retain", Control, action="retain")
async def retain(
    control: Control,
    queue: Queue,
    completed: Annotated[
        str | None, typer.Option(help="Retention of COMPLETED messages, such as 7d; default: kept permanently.")
    ] = None,
    failed: Annotated[
        str | None, typer.Option(help="Retention of FAILED messages, such as 7d; default: kept permanently.")
    ] = None,
    create: Create = False,
    json: Json = False,
) -> None:
    """Set how long the archive of a queue is kept.

    Workers and `millpond purge` delete older messages.
    """
    keep = {"completed": parse.duration(completed, "--completed"), "failed": parse.duration(failed, "--failed")}
    if not create:
        await control.check_queue(queue)
    await control.operations.retain(queue, **keep)
    seconds = {state: None if age is None else age.total_seconds() for state, age in keep.items()}
    text = f"{plain(queue)} keeps COMPLETED {_kept_for(completed)}, FAILED {_kept_for(failed)}"
    print_result(text, {"queue": queue, **seconds}, json)


def _kept_for(duration: str | None) -> str:
    return "permanently" if duration is None else f"for {duration}"
