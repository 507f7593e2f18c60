"""Forms that reschedule a message, and replay archived ones."""

from __future__ import annotations

from millpond.control import Choice
from millpond.errors import InvalidOption
from millpond.message import LOWEST_PRIORITY, SETTLED, State, check_name
from millpond.server import types
from millpond.server.dashboard.fields import Confirm, database_now, field, ids_of, moment_of, queue_of, run_route
from millpond.server.dashboard.notices import done
from millpond.server.dashboard.rendering import count, plural
from millpond.server.handlers.call import Call


async def reschedule(call: Call) -> tuple[str, str | None]:
    """Change the due time or priority of messages. A field that was left empty changes nothing."""
    text = field(call, "priority").strip()
    if text and not (text.isascii() and text.isdigit() and int(text[:6]) <= LOWEST_PRIORITY):
        raise InvalidOption(f"the priority must be from 0 (first) to {LOWEST_PRIORITY} (last), not {text[:40]!r}")
    body = types.RescheduleRequest(
        ids=ids_of(call), due_at=moment_of(call, "due_at"), priority=int(text) if text else None
    )
    changed: types.Changed = await run_route(call, "reschedule", body)
    return done("rescheduled" if changed.ids else "nothing", len(changed.ids)), None


def _wanted(call: Call) -> types.ReplayRequest:
    state, to = field(call, "state"), field(call, "to").strip()
    if state and state not in SETTLED:
        raise InvalidOption("choose completed or failed messages, or both")
    if to:
        call.need(check_name(to, "to"))
    return types.ReplayRequest(
        name=check_name(field(call, "name").strip(), "name"),
        states=[State(state)] if state else list(SETTLED),
        since=moment_of(call, "since"),
        until=moment_of(call, "until"),
        to=to or None,
    )


async def ask_replay(call: Call) -> Confirm:
    """The number of archived messages that would be published again."""
    queue, wanted = queue_of(call), _wanted(call)
    # Messages that settle while the question is open were not confirmed.
    until = wanted.until or await database_now(call, queue)
    choice = Choice(queue=queue, states=wanted.states, since=wanted.since, until=until)
    preview = await call.control.preview(choice)
    if not preview.messages:
        raise InvalidOption(f"the archive of {queue[:80]!r} has no such message, so there is nothing to replay")
    number = plural(preview.messages, "message") if preview.complete else f"{count(preview.messages)} or more messages"
    names = ("state", "since", "to", "name")
    return Confirm(
        title=f"Replay {number} of {queue}?",
        text=f"{' and '.join(wanted.states)} messages are published again to {wanted.to or queue}, with new ids. Their "
        f"handlers run again. Those that the replay {wanted.name!r} has published before are left out.",
        button=f"Replay {number}",
        fields=[("queue", queue), ("until", until.isoformat()), *((name, field(call, name)) for name in names)],
        destructive=True,
    )


async def replay(call: Call) -> tuple[str, str | None]:
    reply: types.ReplayReply = await run_route(call, "replay", _wanted(call), queue=queue_of(call))
    return done("replayed" if reply.published else "replayed_before", len(reply.published)), None
