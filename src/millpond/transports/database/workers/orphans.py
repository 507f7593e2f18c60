"""Claims whose worker has no row: its row was removed by hand, or the claim was committed after it.

Such a worker gets a row again. If it lives, its next beat takes the row over, and nothing was lost. Otherwise it is
silent, and judged as any other; this is no crash of its messages.
"""

from __future__ import annotations

from itertools import pairwise

from millpond.clock import SECOND
from millpond.seam.workers import DEAD_AFTER
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

_IDS = "SELECT id FROM {worker} ORDER BY id"
# Between the known workers: entries of the messages that those hold, also dead ones, are not read.
_HOLDER = """
SELECT worker FROM {message} {lease_index}
WHERE state = 'PROCESSING' AND lease_until IS NULL AND worker > :low AND worker < :high ORDER BY worker LIMIT 1
"""
_ADD = """
INSERT INTO {worker} (id, name, started_at, beat_at, beats, dead_after, lease, by_lock, stopping)
VALUES (:worker, 'unknown', {now}, {now}, 0, :dead_after, 0, 1, 1) {or_skip}
"""


def holders_without_row(d: Dialect) -> Steps[tuple[list[int], int]]:
    """The workers that hold claims and have no row, and the number of workers with a row."""
    known = [int(row[0]) for row in (yield Query(d.sql(_IDS), {}))]
    found: list[int] = []
    for low, high in pairwise([-1, *known, 2**63 - 1]):
        while rows := (yield Query(d.sql(_HOLDER), {"low": low, "high": high})):
            low = int(rows[0][0])
            found.append(low)
    return found, len(known)


def add_row(d: Dialect, worker: int, now: int | None) -> Steps[None]:
    yield Query(d.sql(_ADD), {"worker": worker, "dead_after": round(DEAD_AFTER * SECOND), "now": now})
