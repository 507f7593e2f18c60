"""Give back the messages of a worker that died or hung, as steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.seam.transport import NEVER_US
from millpond.transports.database.messages.reap import release_rows
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.sql.writes import DETACHED

FOREVER = 2**62
"""A silence in microseconds that is longer than any lease."""

# Found without locks and locked by id, which leaves the rows of living workers alone. Rows that another transaction has
# locked, such as a caller's ack, are left for later.
_HELD = "state = 'PROCESSING' AND worker = :worker AND lease_until IS NULL AND lease < :silent"
_FIND_HELD = f"SELECT id FROM {{message}} {{lease_index}} WHERE {_HELD} LIMIT :limit"
_LOCK_HELD = f"SELECT id FROM {{message}} WHERE id {{ids}} AND {_HELD} {{locked}}"
# With separate leases: detached, or claimed beside the worker. The bounds exclude the messages of streams.
_OWN = f"state = 'PROCESSING' AND worker = :worker AND lease_until > 0 AND lease_until < {NEVER_US}"
_FIND_OWN = f"SELECT id FROM {{message}} {{lease_index}} WHERE {_OWN} LIMIT :limit"
_LOCK_OWN = f"SELECT id FROM {{message}} WHERE id {{ids}} AND {_OWN} {{locked}}"
_DETACH = f"UPDATE {{message}} SET {DETACHED} WHERE id {{ids}}"
_BEATS = "SELECT beats FROM {worker} WHERE id = :worker {lock}"
_FORGET = "DELETE FROM {worker} WHERE id = :worker"
_FORGET_SILENT = f"""
{_FORGET} AND beats = :beats AND NOT EXISTS (SELECT 1 FROM {{message}} m {{lease_index}}
WHERE m.state = 'PROCESSING' AND m.lease_until IS NULL AND m.worker = :worker)
"""


def still_silent(d: Dialect, worker: int, beats: int) -> Steps[bool]:
    """Whether a worker has not beaten since. Its row is locked: it cannot beat until this transaction ends."""
    return [row[0] for row in (yield Query(d.sql(_BEATS), {"worker": worker}))] == [beats]


def held_ids(d: Dialect, worker: int, silent: int, limit: int) -> Steps[list[Any]]:
    """The ids of messages that a worker holds, with a lease shorter than `silent` microseconds."""
    rows = yield Query(d.sql(_FIND_HELD), {"worker": worker, "silent": silent, "limit": limit})
    return [row[0] for row in rows]


def release_held(d: Dialect, worker: int, silent: int, ids: Sequence[Any], now: int | None) -> Steps[int]:
    """Give back those that the worker still holds; returns their number."""
    params = {"worker": worker, "silent": silent, "ids": ids}
    return (yield from release_rows(d, (yield Query(d.sql(_LOCK_HELD), params)), now))


def own_ids(d: Dialect, worker: int, limit: int) -> Steps[list[Any]]:
    """The ids of a worker's messages with separate leases."""
    rows = yield Query(d.sql(_FIND_OWN), {"worker": worker, "limit": limit})
    return [row[0] for row in rows]


def release_own(d: Dialect, worker: int, ids: Sequence[Any], now: int | None) -> Steps[int]:
    """Give back those that still are the worker's; returns their number."""
    return (yield from release_rows(d, (yield Query(d.sql(_LOCK_OWN), {"worker": worker, "ids": ids})), now))


def detach_held(d: Dialect, worker: int, ids: Sequence[Any], now: int | None) -> Steps[int]:
    """Give messages that a worker holds separate leases; returns their number."""
    rows = yield Query(d.sql(_LOCK_HELD), {"worker": worker, "silent": FOREVER, "ids": ids})
    if rows:
        yield Query(d.sql(_DETACH), {"ids": [row[0] for row in rows], "now": now})
    return len(rows)


def forget(d: Dialect, worker: int) -> Steps[None]:
    yield Query(d.sql(_FORGET), {"worker": worker})


def forget_silent(d: Dialect, worker: int, beats: int) -> Steps[None]:
    """Remove the row of a worker, unless it has beaten since or holds a message."""
    yield Query(d.sql(_FORGET_SILENT), {"worker": worker, "beats": beats})
