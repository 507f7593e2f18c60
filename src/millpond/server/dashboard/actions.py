"""Changes by operators: each is confirmed with the number of its messages, and recorded as the HTTP interface does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, get_args

import msgspec
from starlette.responses import RedirectResponse, Response

from millpond.control import Choice
from millpond.errors import InvalidOption
from millpond.message import SETTLED, State, check_name
from millpond.schedule import Missed
from millpond.server import types
from millpond.server.dashboard.change_forms import ask_replay, replay, reschedule
from millpond.server.dashboard.fields import Confirm, database_now, field, ids_of, moment_of, queue_of, run_route
from millpond.server.dashboard.login import inner_path
from millpond.server.dashboard.notices import done
from millpond.server.dashboard.rendering import HOME, Links, View, count, plural
from millpond.server.dashboard.retry_forms import (
    ask_retry,
    ask_retry_failures,
    ask_retry_matching,
    due_now,
    retry,
    retry_failures,
    retry_matching,
)
from millpond.server.handlers import operations
from millpond.server.handlers.call import Call


async def confirm(call: Call) -> View:
    """The number of messages that an act would change, and a button to do it."""
    asked = await _chosen(_QUESTIONS, call)(call)
    back = inner_path(field(call, "back"))
    return View("confirm.html", {"confirm": asked, "act": field(call, "act"), "back": back})


async def act(call: Call) -> Response:
    """Retry, reschedule, complete, cancel, pause, purge, replay, release, or change a schedule."""
    links = Links(call.request)
    what, to = await _chosen(_ACTS, call)(call)
    back = to or inner_path(field(call, "back"))
    path, _, query = back.partition("?")
    kept = "&".join(part for part in query.split("&") if part and not part.startswith("done="))
    return RedirectResponse(f"{links.root}{path}?{kept + '&' if kept else ''}done={what}", 303)


def _chosen(acts: dict[str, Any], call: Call) -> Any:
    name = field(call, "act")
    if name not in acts:
        raise InvalidOption(f"there is no act {name[:40]!r}; load the page again")
    return acts[name]


# --- cancel ------------------------------------------------------------------------


async def _ask_cancel(call: Call) -> Confirm:
    number = len(ids_of(call))
    return Confirm(
        title=f"Cancel {plural(number, 'message')}?",
        text="No worker will run it. It is kept in the archive as FAILED, and you can retry it from there.",
        button=f"Cancel {plural(number, 'message')}",
        fields=[("id", str(id_)) for id_ in ids_of(call)],
        destructive=True,
    )


async def _cancel(call: Call) -> tuple[str, str | None]:
    changed: types.Changed = await run_route(call, "cancel", types.CancelRequest(ids=ids_of(call)))
    return done("cancelled" if changed.ids else "nothing", len(changed.ids)), None


async def _ask_done(call: Call) -> Confirm:
    number = len(ids_of(call))
    return Confirm(
        title=f"Make {plural(number, 'message')} COMPLETED?",
        text="No worker will run it: use this if the work was done by hand. It is kept in the archive as COMPLETED.",
        button=f"Complete {plural(number, 'message')}",
        fields=[("id", str(id_)) for id_ in ids_of(call)],
        destructive=True,
    )


async def _done(call: Call) -> tuple[str, str | None]:
    changed: types.Changed = await run_route(call, "done", types.DoneRequest(ids=ids_of(call)))
    return done("completed" if changed.ids else "nothing", len(changed.ids)), None


async def _ask_interrupt(call: Call) -> Confirm:
    number = len(ids_of(call))
    return Confirm(
        title=f"Cancel {plural(number, 'running message')}?",
        text="Its worker is asked to stop the handler, which may have done part of its work. The message stays in the "
        "archive as FAILED.",
        button=f"Cancel {plural(number, 'running message')}",
        fields=[("id", str(id_)) for id_ in ids_of(call)],
        destructive=True,
    )


async def _interrupt(call: Call) -> tuple[str, str | None]:
    reply: types.CancelledReply = await run_route(call, "cancel", types.CancelRequest(ids=ids_of(call), running=True))
    if reply.requested:
        return done("interrupted", len(reply.requested)), None
    return done("cancelled" if reply.ids else "nothing", len(reply.ids)), None


# --- periodic ---------------------------------------------------------------------------------------------


async def _periodic_change(call: Call) -> tuple[str, str | None]:
    missed = field(call, "missed")
    if missed not in get_args(Missed):
        raise InvalidOption("choose what happens with missed times: skip, once or all")
    changes = {name: field(call, name).strip() or None for name in ("schedule", "timezone")}
    await _change(call, missed=missed, **changes)
    return done("schedule"), f"{HOME}/periodic"


async def _periodic_pause(call: Call) -> tuple[str, str | None]:
    await _change(call, paused=True)
    return done("halted"), f"{HOME}/periodic"


async def _periodic_resume(call: Call) -> tuple[str, str | None]:
    await _change(call, paused=False)
    return done("continued"), f"{HOME}/periodic"


async def _change(call: Call, **changes: Any) -> None:
    name = check_name(field(call, "name"), "name")
    await run_route(call, "change_periodic", types.PeriodicRequest(name=name, **changes))


# --- pause, purge, release --------------------------------------------------------------------------------


async def _ask_pause(call: Call) -> Confirm:
    queue = queue_of(call)
    found = await operations.queue(msgspec.structs.replace(call, path={"queue": queue}))
    waiting = sum(found.counts.get(state, 0) for state in (State.PENDING, State.RETRYABLE))
    return Confirm(
        title=f"Pause {queue}?",
        text=f"{plural(waiting, 'message')} will wait until you resume the queue. Messages that workers have claimed "
        "are finished, and publishing continues.",
        button="Pause the queue",
        fields=[("queue", queue)],
    )


async def _pause(call: Call) -> tuple[str, str | None]:
    await run_route(call, "pause", queue=queue_of(call))
    return done("paused"), None


async def _resume(call: Call) -> tuple[str, str | None]:
    await run_route(call, "resume", queue=queue_of(call))
    return done("resumed"), None


def _purged(call: Call) -> list[State]:
    state = field(call, "state")
    if state and state not in SETTLED:
        raise InvalidOption("choose completed or failed messages, or both")
    return [State(state)] if state else list(SETTLED)


async def _ask_purge(call: Call) -> Confirm:
    queue, states = queue_of(call), _purged(call)
    days = field(call, "days")
    if not (days.isascii() and days.isdigit() and int(days[:6]) < 36_500):
        raise InvalidOption("choose an age in days")
    before = await database_now(call, queue) - timedelta(days=int(days))
    choice = Choice(queue=queue, states=states, until=before)
    preview = await call.control.preview(choice)
    if not preview.messages:
        raise InvalidOption(f"the archive of {queue[:80]!r} has no such message, so there is nothing to delete")
    number = plural(preview.messages, "message") if preview.complete else f"{count(preview.messages)} or more messages"
    which = " and ".join(states)
    if int(days):
        which = f"{which} messages in the archive that are older than {plural(int(days), 'day')}"
    else:
        which = f"All {which} messages that are in the archive now"
    return Confirm(
        title=f"Delete {number} of {queue}?",
        text=f"{which} are deleted. They cannot be retried, replayed or exported afterwards.",
        button=f"Delete {number}",
        fields=[("queue", queue), ("before", before.isoformat()), ("state", field(call, "state"))],
        destructive=True,
    )


async def _purge(call: Call) -> tuple[str, str | None]:
    queue, before = queue_of(call), moment_of(call, "before")
    if before is None or before > await database_now(call, queue):
        raise InvalidOption("the time of this form is missing; go back and choose an age")
    # Not the age: messages that became old enough while the question was open were not confirmed.
    body = types.PurgeRequest(until=before, states=_purged(call))
    purged: types.Purged = await run_route(call, "purge", body, queue=queue)
    return done("purged", purged.purged), None


async def _ask_release(call: Call) -> Confirm:
    call.need_all_queues("the release of a stream")
    name = field(call, "stream")
    held = {status.name: status.held for status in await call.control.streams.status()}
    return Confirm(
        title=f"Release the stream {name}?",
        text=f"{plural(held.get(name, 0), 'message')} will be given back to the queues. A driver that still runs is "
        "stopped by its next call, and may have written part of them.",
        button=f"Give back {plural(held.get(name, 0), 'message')}",
        fields=[("stream", name)],
        destructive=True,
    )


async def _release(call: Call) -> tuple[str, str | None]:
    released: types.Released = await run_route(call, "release_stream", stream=field(call, "stream"))
    return done("released", released.released), None


_QUESTIONS: dict[str, Callable[[Call], Awaitable[Confirm]]] = {
    "retry": ask_retry,
    "retry_failures": ask_retry_failures,
    "retry_matching": ask_retry_matching,
    "done": _ask_done,
    "cancel": _ask_cancel,
    "interrupt": _ask_interrupt,
    "pause": _ask_pause,
    "purge": _ask_purge,
    "replay": ask_replay,
    "release": _ask_release,
}
_ACTS: dict[str, Callable[[Call], Awaitable[tuple[str, str | None]]]] = {
    "retry": retry,
    "retry_failures": retry_failures,
    "retry_matching": retry_matching,
    "done": _done,
    "due_now": due_now,
    "cancel": _cancel,
    "interrupt": _interrupt,
    "periodic_change": _periodic_change,
    "periodic_pause": _periodic_pause,
    "periodic_resume": _periodic_resume,
    "pause": _pause,
    "resume": _resume,
    "purge": _purge,
    "replay": replay,
    "reschedule": reschedule,
    "release": _release,
}
