"""Workers and the number of messages that each holds, as steps."""

from __future__ import annotations

import msgspec

from millpond.clock import SECOND
from millpond.seam.workers import WorkerStatus
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Query, Steps

_WORKERS = "SELECT id, name, started_at, beat_at, dead_after, stopping, queues FROM {worker} ORDER BY name, id"
# Claimed messages are few, and an index has them.
_HELD = """
SELECT m.worker, count(*), min(m.acquired_at) FROM {message} m {lease_index}
WHERE {held} AND m.worker IS NOT NULL GROUP BY m.worker
"""


def worker_status(d: Dialect, now: int | None) -> Steps[list[WorkerStatus]]:
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    held = {worker: (int(number), oldest) for worker, number, oldest in (yield Query(d.sql(_HELD), {}))}
    found = []
    for id_, name, started, beat, dead_after, stopping, queues in (yield Query(d.sql(_WORKERS), {})):
        number, oldest = held.get(id_, (0, None))
        found.append(
            WorkerStatus(
                id=id_,
                name=name,
                started_us=started,
                beat_us=beat,
                silent_for=max(0, at - beat) / SECOND,
                dead_after=dead_after / SECOND,
                stopping=bool(stopping),
                queues=_queues(queues),
                held=number,
                oldest_held_us=oldest,
            )
        )
    return found


def _queues(text: str | None) -> tuple[str, ...] | None:
    try:
        return None if text is None else msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError:  # another program wrote it
        return None
