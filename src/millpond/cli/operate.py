"""The commands that change something: retry, replay, reschedule, cancel, pause, resume, retain, purge."""

from typing import Annotated
from uuid import UUID

import typer

from millpond.cli import values
from millpond.cli.app import Json, Refused, command, say_json
from millpond.cli.look import States
from millpond.cli.table import plain
from millpond.control import Control, Retried
from millpond.errors import InvalidMessage, InvalidOption

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of messages.")]
SomeIds = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of messages.", show_default=False)]
Queue = Annotated[str, typer.Argument(help="The queue's name.")]


@command("retry", Control)
async def retry(
    control: Control,
    ids: SomeIds = None,
    queue: Annotated[str | None, typer.Option(help="All FAILED messages of this queue.")] = None,
    reason: Annotated[str | None, typer.Option(help="With --queue: only those that failed for this reason.")] = None,
    json: Json = False,
) -> None:
    """Give FAILED messages another run under a new id, and make RETRYABLE ones due now. Twice is harmless."""
    if bool(ids) == bool(queue) or (reason and not queue):
        raise InvalidMessage("retry which messages? Give ids, or --queue QUEUE (with --reason REASON if you like)")
    result = await control.retry(values.ids(ids)) if ids else await control.retry_queue(queue or "", reason=reason)
    if json:
        say_json(
            {
                "published": [str(id_) for id_ in result.published],
                "hastened": [str(id_) for id_ in result.hastened],
                "before": [str(id_) for id_ in result.before],
                "left": {str(id_): why for id_, why in result.left.items()},
            }
        )
    else:
        _tell(result)
    if result.left and not (result.published or result.hastened or result.before):
        raise Refused("nothing could be retried")


def _tell(result: Retried) -> None:
    print(f"{len(result.published)} published again")
    if result.hastened:
        print(f"{len(result.hastened)} due now")
    if result.before:
        print(f"{len(result.before)} had been retried before")
    for id_, why in result.left.items():
        print(f"{id_} left alone: {why}")


@command("replay", Control)
async def replay(
    control: Control,
    name: Annotated[str, typer.Option(help="Of this replay: running it again under the same name is harmless.")],
    ids: SomeIds = None,
    queue: Annotated[str | None, typer.Option(help="All archived messages of this queue.")] = None,
    state: States = None,
    since: Annotated[str | None, typer.Option(help="With --queue: archived at this moment or later.")] = None,
    until: Annotated[str | None, typer.Option(help="With --queue: archived before this moment.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="QUEUE", help="Into this queue instead.")] = None,
    json: Json = False,
) -> None:
    """Publish archived messages again, each under a new id made of the old one and the name."""
    if bool(ids) == bool(queue):
        raise InvalidMessage("replay which messages? Give ids, or --queue QUEUE")
    if ids and (state or since or until):
        raise InvalidMessage("--state, --since and --until choose from a --queue; leave them out with ids")
    if ids:
        published = await control.replay(values.ids(ids), name=name, queue=to)
    else:
        published = await control.replay_queue(
            queue or "",
            name=name,
            states=state or [],
            since=values.moment(since, "--since"),
            until=values.moment(until, "--until"),
            to=to,
        )
    _changed(published, "published", json)


@command("reschedule", Control)
async def reschedule(
    control: Control,
    ids: Ids,
    priority: Annotated[int | None, typer.Option(help="0 (first) to 100 (last).")] = None,
    delay: Annotated[str | None, typer.Option(help="Due this long from now: 30s, 15m, 12h, 7d.")] = None,
    due_at: Annotated[str | None, typer.Option(help="Due at this moment: 2030-01-31T08:00:00Z.")] = None,
    attempts: Annotated[int | None, typer.Option(help="So many handler runs shall count as made.")] = None,
    json: Json = False,
) -> None:
    """Change when, and how urgently, waiting messages run."""
    if priority is None and delay is None and due_at is None and attempts is None:
        raise InvalidOption("change what? Give --priority, --delay, --due-at or --attempts")
    changed = await control.reschedule(
        values.ids(ids),
        priority=priority,
        delay=values.duration(delay, "--delay"),
        due_at=values.moment(due_at, "--due-at"),
        attempts=attempts,
    )
    _changed(changed, "rescheduled", json, of=len(ids))


@command("cancel", Control)
async def cancel(
    control: Control,
    ids: Ids,
    reason: Annotated[str, typer.Option(help="Kept in the archive.")] = "cancelled",
    json: Json = False,
) -> None:
    """Make waiting messages FAILED without running them."""
    _changed(await control.cancel(values.ids(ids), reason=reason), "cancelled", json, of=len(ids))


@command("pause", Control)
async def pause(control: Control, queue: Queue, json: Json = False) -> None:
    """Let nobody claim from a queue; publishing goes on."""
    await control.pause(queue)
    say_json({"queue": queue, "paused": True}) if json else print(f"paused {plain(queue)}")


@command("resume", Control)
async def resume(control: Control, queue: Queue, json: Json = False) -> None:
    """End a pause."""
    await control.resume(queue)
    say_json({"queue": queue, "paused": False}) if json else print(f"resumed {plain(queue)}")


@command("retain", Control)
async def retain(
    control: Control,
    queue: Queue,
    completed: Annotated[
        str | None, typer.Option(help="Keep COMPLETED ones so long: 12h, 7d. Default: for ever.")
    ] = None,
    failed: Annotated[str | None, typer.Option(help="Keep FAILED ones so long: 12h, 7d. Default: for ever.")] = None,
    json: Json = False,
) -> None:
    """Say how long a queue's archive is kept. Workers purge it now and then, and so does `millpond purge`."""
    keep = {"completed": values.duration(completed, "--completed"), "failed": values.duration(failed, "--failed")}
    await control.retain(queue, **keep)
    if json:
        seconds = {state: None if age is None else age.total_seconds() for state, age in keep.items()}
        say_json({"queue": queue, **seconds})
    else:
        print(f"{plain(queue)} keeps COMPLETED {_for(completed)}, FAILED {_for(failed)}")


def _for(duration: str | None) -> str:
    return "for ever" if duration is None else f"for {duration}"


@command("purge", Control)
async def purge(
    control: Control,
    queue: Annotated[str | None, typer.Argument(show_default=False, help="All queues if none is given.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Archived longer ago than this: 30s, 15m, 12h, 7d. Default: each retention.")
    ] = None,
    state: States = None,
    json: Json = False,
) -> None:
    """Delete from the archive. Live messages are never touched."""
    count = await control.purge(queue, older_than=values.duration(older_than, "--older-than"), states=state or [])
    say_json({"purged": count}) if json else print(f"{count} purged")


def _changed(ids: list[UUID], what: str, json: bool, *, of: int | None = None) -> None:
    if json:
        say_json({what: [str(id_) for id_ in ids]})
    else:
        print(f"{len(ids)} {what}" + (f" of {of}; the others are not waiting" if of and len(ids) < of else ""))
    if of and not ids:
        raise Refused(f"nothing was {what}: none of these messages is waiting (millpond show ID tells their state)")
