"""Argument and option types that several commands share."""

from typing import Annotated

import typer

from millpond.message import State

Queue = Annotated[str, typer.Argument(help="Name of the queue.")]
Create = Annotated[bool, typer.Option("--create", help="Allow a queue that has no messages yet.")]
QueueOrAll = Annotated[str | None, typer.Argument(show_default=False, help="Name of the queue; default: all queues.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of messages.")]
SomeIds = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of messages.", show_default=False)]
ToQueue = Annotated[
    str | None, typer.Option("--to", metavar="QUEUE", help="Publish into this queue; default: the original one.")
]
OlderThan = Annotated[
    str | None, typer.Option(help="Minimum age in the archive: 12h, 7d. Default: each queue's retention.")
]
States = Annotated[
    list[State] | None,
    typer.Option("--state", case_sensitive=False, help="Only messages in this state; may be repeated."),
]
