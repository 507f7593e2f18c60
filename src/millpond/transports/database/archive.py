"""Purge the archive and replay from it, as steps.

Purge deletes in small transactions, each a range of the index, so that claims and settles pass between them;
where the database keeps a partition for each day, whole days go first (see partitions).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond.message import SETTLED, State, replayed_headers, replayed_id
from millpond.transports.database import statements as sql
from millpond.transports.database.browse import archived_queues
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.exports import bound
from millpond.transports.database.partitions import Cutoffs
from millpond.transports.database.publish import unpublished
from millpond.transports.database.reschedule import announce
from millpond.transports.database.statement import Many, Query, Steps

PURGE_BATCH = 5000
REPLAY_BATCH = 500


# --- purge ----------------------------------------------------------------------------------------------


def cutoffs(
    d: Dialect, queue: str | None, *, older_than: int | None, states: Sequence[State], now: int | None
) -> Steps[Cutoffs]:
    """What a purge may delete, by the caller's word or by each queue's own, and never what a lake does not hold yet."""
    found = yield from _allowed(d, queue, older_than=older_than, states=states, now=now)
    exported = yield from bound(d)
    return found if exported is None else {pair: min(until, exported) for pair, until in found.items()}


def _allowed(
    d: Dialect, queue: str | None, *, older_than: int | None, states: Sequence[State], now: int | None
) -> Steps[dict[tuple[str, State], int]]:
    at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
    if older_than is not None:
        names = [queue] if queue is not None else (yield from archived_queues(d))
        return {(name, state): at - older_than for name in names for state in states}
    found = {}
    for name, _, completed, failed in (yield Query(d.sql(sql.SETTINGS), {})):
        for state, keep in zip(SETTLED, (completed, failed), strict=True):
            if keep is not None and state in states and queue in (None, name):
                found[name, state] = at - keep
    return found


def purge_some(d: Dialect, queue: str, state: State, until: int) -> Steps[int]:
    """Delete the oldest; returns how many, less than `PURGE_BATCH` when none is left."""
    yield Query(d.sql(sql.PURGE_TURN), {})
    chosen = {"queue": queue, "state": state.value}
    rows = yield Query(d.sql(sql.PURGEABLE), {**chosen, "until": until, "limit": PURGE_BATCH})
    if rows:
        at, id_ = rows[-1]
        yield Query(d.sql(sql.PURGE), {**chosen, "at": at, "id": id_})
    return len(rows)


def forget_ids(d: Dialect, now: int | None) -> Steps[int]:
    """Delete some of the ids whose dedupe window is over; returns how many."""
    rows = yield Query(d.sql(sql.EXPIRED_IDS), {"now": now, "limit": PURGE_BATCH})
    if rows:
        # Looked at again: a publisher may have entered one anew.
        yield Query(d.sql(sql.FORGET_EXPIRED_IDS), {"ids": [row[0] for row in rows], "now": now})
    return len(rows)


# --- replay ---------------------------------------------------------------------------------------------


def missing(d: Dialect, ids: Sequence[UUID]) -> Steps[list[UUID]]:
    """Which ids are not in the archive."""
    rows = yield Query(d.sql(sql.REPLAYABLE), {"ids": [d.id_in(id_) for id_ in ids]})
    found = {d.id_out(row[0]) for row in rows}
    return [id_ for id_ in ids if id_ not in found]


def replay(
    d: Dialect,
    ids: Sequence[UUID],
    *,
    name: str,
    queue: str | None,
    now: int | None,
    dedupe_for: int,
    notify: bool,
) -> Steps[dict[UUID, str]]:
    """Publish archived messages again; returns the new ids of those that are new, with their queues."""
    rows = yield Query(d.sql(sql.REPLAYABLE), {"ids": [d.id_in(id_) for id_ in ids]})
    # An id that was used again after its dedupe window stands in the archive twice: the last one counts.
    last = {d.id_out(row[0]): row for row in sorted(rows, key=lambda row: row[1])}
    new = yield from unpublished(d, [replayed_id(id_, name) for id_ in last], now, dedupe_for)
    published: dict[UUID, str] = {}
    values: list[tuple[Any, ...]] = []
    for id_, (key, archived_at, old_queue, headers) in last.items():
        new_id = replayed_id(id_, name)
        if new_id in new:
            published[new_id] = queue or old_queue
            values.append((d.id_in(new_id), published[new_id], replayed_headers(headers, id_), key, archived_at, now))
    if values:
        yield Many(d.sql(sql.REPLAY), ("new_id", "queue", "headers", "id", "archived_at", "now"), values)
        if notify:
            yield from announce(d, set(published.values()))
    return published
