"""The circumstances of one message, as steps."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from millpond.message import State
from millpond.seam.diagnosis import MOST_AHEAD, Circumstances
from millpond.transports.database.operations.browse import find_rows
from millpond.transports.database.operations.retry_marks import with_retried
from millpond.transports.database.sql.columns import SUSPECT_LANE
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.workers.status import worker_status

_WAITS = "SELECT 1 FROM {message} m {id_index} WHERE m.id {ids} AND {ready}"
_FREE = f"{_WAITS} {{locked}}"
_HOLDER = "SELECT m.worker FROM {message} m {id_index} WHERE m.id {ids}"
_REMEMBERED = "SELECT 1 FROM {dedupe} WHERE id {ids} AND expires_at > {now}"
_PAUSED = "SELECT 1 FROM {queue} WHERE name = :queue AND paused = 1"
_STREAM = """
SELECT s.name FROM {stream} s WHERE EXISTS (SELECT 1 FROM {stream_message} m WHERE m.stream = s.id AND m.id {ids})
"""
_BEFORE = """
SELECT count(*) FROM (SELECT m.id FROM {{message}} m {{claim_index}}
WHERE m.queue = :queue AND {{ready}} AND {before} AND m.due_at <= {{now}} LIMIT :most) b
"""
# Three ranges of the index: other lanes, earlier times, and the same time.
_RANGES = (
    "m.lane < :lane",
    "m.lane = :lane AND m.due_at < :due",
    "m.lane = :lane AND m.due_at = :due AND m.id < :id",
)


def is_locked(d: Dialect, id: UUID) -> Steps[bool]:
    """Whether another transaction has locked a waiting message. Its lock is tried for a moment.

    PostgreSQL refuses that to an account that may only read.
    """
    ids = {"ids": [d.id_in(id)]}
    if not (yield Query(d.sql(_WAITS), ids)):
        return False
    return not (yield Query(d.sql(_FREE), ids))


def circumstances(d: Dialect, id: UUID, now: int | None, *, locked: bool) -> Steps[Circumstances]:
    ids = {"ids": [d.id_in(id)]}
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    rows = yield from find_rows(d, ids["ids"])
    if not rows:
        known = yield Query(d.sql(_REMEMBERED), {**ids, "now": now})
        return Circumstances(row=None, now_us=at, remembered=bool(known))
    row = rows[0]
    facts: dict[str, Any] = {"row": row, "now_us": at}
    if row.state in (State.COMPLETED, State.FAILED):
        (facts["row"],) = yield from with_retried(d, [row])
        return Circumstances(**facts)
    facts["workers"] = tuple((yield from worker_status(d, now)))
    facts["paused"] = bool((yield Query(d.sql(_PAUSED), {"queue": row.queue})))
    if row.state is State.PROCESSING:
        for (worker,) in (yield Query(d.sql(_HOLDER), ids)):
            facts["worker_id"] = worker
        for (name,) in (yield Query(d.sql(_STREAM), ids)):
            facts["stream"] = name
        return Circumstances(**facts)
    facts["locked"] = locked
    if row.due_us <= at:
        lane = row.priority + (SUSPECT_LANE if row.suspect else 0)
        place = {"queue": row.queue, "lane": lane, "due": row.due_us, "id": d.id_in(row.id), "now": now}
        ahead = 0
        for range_ in _RANGES:
            if ahead < MOST_AHEAD:
                text = _BEFORE.format(before=range_)
                ahead += int((yield Query(d.sql(text), {**place, "most": MOST_AHEAD - ahead}))[0][0])
        facts["ahead"] = ahead
    return Circumstances(**facts)
