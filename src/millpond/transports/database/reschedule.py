"""Change waiting messages, as steps: reschedule and cancel. What somebody holds locked is left as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from millpond.message import State
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Steps

Changed = dict[UUID, str]
"""Ids that were changed, with their queues."""


def reschedule(
    d: Dialect,
    ids: Sequence[Any],
    *,
    priority: int | None,
    due: int | None,
    delay: int | None,
    attempts: int | None,
    now: int | None,
    notify: bool,
) -> Steps[Changed]:
    rows = yield Query(d.sql(sql.LOCK_WAITING), {"ids": ids})
    if rows:
        params = {"priority": priority, "due": due, "delay": delay, "attempts": attempts}
        text = _update(priority=priority, due=due, delay=delay, attempts=attempts)
        yield Query(d.sql(text), {**params, "ids": [row[0] for row in rows], "now": now})
        if notify:
            yield from announce(d, {queue for _, queue in rows})
    return {d.id_out(id_): queue for id_, queue in rows}


def _update(*, priority: int | None, due: int | None, delay: int | None, attempts: int | None) -> str:
    """The lane follows the priority, and comes first: MySQL would take the new value of a column set before it."""
    lane = "priority" if priority is None else ":priority"
    changes = []
    if attempts is not None:
        # As many deliveries as attempts: none unfinished, so that the message is not suspect.
        changes += [f"lane = {lane}", "attempts = :attempts", "deliveries = :attempts"]
        if attempts == 0:
            changes.append("first_attempt_at = NULL")  # the time that a retry policy allows begins anew
    elif priority is not None:
        changes.append("lane = lane - priority + :priority")
    if priority is not None:
        changes.append("priority = :priority")
    if due is not None:
        changes.append("due_at = :due")
    if delay is not None:
        changes.append("due_at = {now} + :delay")
    return f"UPDATE {{message}} SET {', '.join(changes)} WHERE id {{ids}}"


def cancel(d: Dialect, ids: Sequence[Any], *, reason: str, now: int | None, again: bool) -> Steps[Changed]:
    """Into the archive as FAILED, with the attempts there were. `again`: an earlier try may have done it."""
    rows = yield Query(d.sql(sql.LOCK_WAITING), {"ids": ids})
    if rows:
        keys = [row[0] for row in rows]
        change = {"attempts": 0, "state": State.FAILED.value, "reason": reason, "error": None, "now": now}
        # No receipt of an earlier delivery did this: none may take it for its own work.
        yield Query(d.sql(sql.FORGET_RECEIPTS), {"ids": keys})
        yield Query(d.sql(sql.KEEP), {"ids": keys, **change})
        yield Query(d.sql(sql.REMOVE), {"ids": keys})
    changed = {d.id_out(id_): queue for id_, queue in rows}
    if again:
        earlier = yield Query(d.sql(sql.CANCELLED), {"ids": ids, "reason": reason})
        changed |= {d.id_out(row[0]): "" for row in earlier}
    return changed


def pause(d: Dialect, queue: str) -> Steps[None]:
    yield Query(d.sql(sql.PAUSE), {"queue": queue, "paused": 1})


def resume(d: Dialect, queue: str, *, notify: bool) -> Steps[None]:
    yield Query(d.sql(sql.PAUSE), {"queue": queue, "paused": 0})
    if notify:
        yield from announce(d, [queue])


def retain(d: Dialect, queue: str, completed: int | None, failed: int | None) -> Steps[None]:
    yield Query(d.sql(sql.RETAIN), {"queue": queue, "completed": completed, "failed": failed})


def announce(d: Dialect, queues: Collection[str]) -> Steps[None]:
    """Wake those that wait for these queues, where the database can."""
    if d.fused and queues:
        yield Query(d.sql(d.fused.announce), {"channel": d.channel, "queues": list(queues)})
