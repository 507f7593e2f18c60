"""Periodic messages over HTTP."""

from __future__ import annotations

from millpond.schedule import PeriodicRow
from millpond.server import types
from millpond.server.handlers.call import Call, not_found


async def periodic(call: Call) -> types.PeriodicReply:
    """Periodic messages with their schedules and next times."""
    rows = await call.control.periodic.all()
    return types.PeriodicReply(periodic=[_entry(row) for row in rows if call.grant.reaches(row.periodic.queue)])


async def change_periodic(call: Call) -> types.Done:
    """Change the schedule, time zone or policy of a periodic message, pause or resume it."""
    call.need_all_queues("a change of a schedule")
    body: types.PeriodicRequest = call.body
    name = body.name
    done = await call.control.periodic.change(
        name, schedule=body.schedule, timezone=body.timezone, missed=body.missed, queue=body.queue, paused=body.paused
    )
    if not done:
        raise not_found(f"there is no periodic message {name[:80]!r}")
    return types.Done(done=True)


def _entry(row: PeriodicRow) -> types.PeriodicEntry:
    p = row.periodic
    return types.PeriodicEntry(
        name=p.name,
        queue=p.queue,
        schedule=p.schedule,
        timezone=p.timezone,
        missed=p.missed,
        paused=row.paused,
        next_at=row.next_at,
        last_at=row.last_at,
        error=row.error,
    )
