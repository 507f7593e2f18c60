"""`millpond replay`: publish archived messages again."""

from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Json, command, print_changed
from millpond.cli.arguments import SomeIds, States, ToQueue
from millpond.control import Control
from millpond.errors import InvalidMessage


@command("replay", Control, action="replay")
async def replay(
    control: Control,
    name: Annotated[str, typer.Option(help="Name of the replay; the same name publishes each message once.")],
    ids: SomeIds = None,
    queue: Annotated[str | None, typer.Option(help="Replay archived messages of this queue.")] = None,
    state: States = None,
    since: Annotated[str | None, typer.Option(help="With --queue: archived at this time or later.")] = None,
    until: Annotated[str | None, typer.Option(help="With --queue: archived before this time.")] = None,
    to: ToQueue = None,
    json: Json = False,
) -> None:
    """Publish archived messages again under new ids.

    A new id is made of the old id and the name of the replay.
    """
    if ids and queue:
        raise InvalidMessage("give ids or --queue, not both")
    if not (ids or queue):
        raise InvalidMessage("no messages chosen: give ids, or --queue QUEUE")
    if ids and (state or since or until):
        raise InvalidMessage("--state, --since and --until choose from a --queue; leave them out with ids")
    if queue:
        await control.check_queue(queue)
    if ids:
        published = [p.id for p in await control.operations.replay(parse.ids(ids), name=name, queue=to) if p.new]
    else:
        published = await control.replay_queue(
            queue or "",
            name=name,
            states=state or [],
            since=parse.parse_time(since, "--since"),
            until=parse.parse_time(until, "--until"),
            to=to,
        )
    print_changed(published, "published", json)
