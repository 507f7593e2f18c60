"""`millpond pause` and `millpond resume`: stop and allow claims from a queue."""

from millpond.cli.app import Json, command, print_result
from millpond.cli.arguments import Create, Queue
from millpond.cli.table import plain
from millpond.control import Control


@command("pause", Control, action="pause")
async def pause(control: Control, queue: Queue, create: Create = False, json: Json = False) -> None:
    """Stop claims from a queue. Publishing continues."""
    if not create:
        await control.check_queue(queue)
    await control.operations.pause(queue)
    print_result(f"paused {plain(queue)}", {"queue": queue, "paused": True}, json)


@command("resume", Control, action="resume")
async def resume(control: Control, queue: Queue, json: Json = False) -> None:
    """Allow claims from a paused queue again."""
    await control.check_queue(queue)
    await control.operations.resume(queue)
    print_result(f"resumed {plain(queue)}", {"queue": queue, "paused": False}, json)
