"""`millpond why`: the reasons why a message does not run."""

from typing import Annotated

import msgspec
import typer

from millpond.cli import parse
from millpond.cli.app import Json, command, print_json
from millpond.cli.table import plain
from millpond.control import Control


@command("why", Control)
async def why(
    control: Control,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")],
    json: Json = False,
) -> None:
    """Explain why a message does not run, the reason to act on first."""
    (wanted,) = parse.ids([id])
    answer = await control.why(wanted)
    if json:
        print_json(msgspec.to_builtins(answer))
        return
    if answer.queue is not None:
        print(f"{answer.id} in {plain(answer.queue)} is {answer.state}")
    for number, reason in enumerate(answer.reasons, 1):
        print(f"{number}. {plain(reason.text)}")
        if reason.remedy:
            print(f"   {plain(reason.remedy)}")
