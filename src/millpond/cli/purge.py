"""`millpond purge`: delete archived messages."""

from millpond.cli import parse
from millpond.cli.app import Json, command, print_result
from millpond.cli.arguments import OlderThan, QueueOrAll, States
from millpond.control import Control


@command("purge", Control, action="purge")
async def purge(
    control: Control,
    queue: QueueOrAll = None,
    older_than: OlderThan = None,
    state: States = None,
    json: Json = False,
) -> None:
    """Delete archived messages. Live messages are never deleted."""
    age = parse.duration(older_than, "--older-than")
    if queue is not None:
        await control.check_queue(queue)
    count = await control.operations.purge(queue, older_than=age, states=state or None)
    print_result(f"{count} purged", {"purged": count}, json)
