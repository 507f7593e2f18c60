"""`millpond periodic`: list the periodic messages, and change, pause, resume or remove one."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from millpond.cli.app import Declined, Json, command, print_json, print_result
from millpond.cli.table import plain, table, when
from millpond.clock import utc_text
from millpond.control import Control
from millpond.errors import InvalidOption
from millpond.schedule import Missed, PeriodicRow


class PeriodicDeed(StrEnum):
    SET = "set"
    PAUSE = "pause"
    RESUME = "resume"
    REMOVE = "remove"


class MissedChoice(StrEnum):
    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


@command("periodic", Control, action="periodic")
async def periodic(
    control: Control,
    verb: Annotated[
        PeriodicDeed | None, typer.Argument(show_default=False, help="Change one; without a verb all are listed.")
    ] = None,
    name: Annotated[str | None, typer.Argument(show_default=False, help="Name of the periodic message.")] = None,
    schedule: Annotated[
        str | None, typer.Option(show_default=False, help="With set: cron expression, or 'every 300' in seconds.")
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(show_default=False, help="With set: time zone, such as Europe/Berlin.")
    ] = None,
    missed: Annotated[
        MissedChoice | None, typer.Option(show_default=False, help="With set: policy for missed times.")
    ] = None,
    queue: Annotated[str | None, typer.Option(show_default=False, help="With set: queue of the messages.")] = None,
    json: Json = False,
) -> None:
    """List periodic messages, or set, pause, resume or remove one."""
    given = {"schedule": schedule, "timezone": timezone, "missed": missed and missed.value, "queue": queue}
    changes: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    if changes and verb is not PeriodicDeed.SET:
        raise InvalidOption(f"--{next(iter(changes))} is for: millpond periodic set NAME")
    if verb is None:
        await _list(control, json)
        return
    if name is None:
        raise InvalidOption("no name given; millpond periodic lists the names")
    if verb is PeriodicDeed.REMOVE:
        done = await control.periodic.remove(name)
    else:
        paused = {PeriodicDeed.PAUSE: True, PeriodicDeed.RESUME: False}.get(verb)
        done = await control.periodic.change(name, paused=paused, **changes)
    if not done:
        raise Declined(f"there is no periodic message {name!r}; millpond periodic lists them")
    word = {
        PeriodicDeed.SET: "changed",
        PeriodicDeed.PAUSE: "paused",
        PeriodicDeed.RESUME: "resumed",
        PeriodicDeed.REMOVE: "removed",
    }[verb]
    print_result(f"{word} {plain(name)}", {"name": name, word: True}, json)


async def _list(control: Control, json: bool) -> None:
    rows = await control.periodic.all()
    if json:
        print_json({"periodic": [_facts(row) for row in rows]})
        return
    heads = ["name", "queue", "schedule", "time zone", "missed", "next", "last"]
    table(heads, [_line(row) for row in rows], right=[], empty="no periodic messages")


def _facts(row: PeriodicRow) -> dict[str, Any]:
    p = row.periodic
    missed: Missed = p.missed
    return {
        "name": p.name,
        "queue": p.queue,
        "schedule": p.schedule,
        "timezone": p.timezone,
        "missed": missed,
        "paused": row.paused,
        "next_at": utc_text(row.next_at),
        "last_at": None if row.last_at is None else utc_text(row.last_at),
        "error": row.error,
    }


def _line(row: PeriodicRow) -> list[str]:
    p = row.periodic
    following = "paused" if row.paused else plain(row.error or when(row.next_us) or "-")
    last = when(row.last_us) or "-"
    return [plain(p.name), plain(p.queue), p.schedule, p.timezone, p.missed, following, last]
