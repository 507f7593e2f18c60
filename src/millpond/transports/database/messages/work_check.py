"""Check a database that a worker does not attend: one read shows whether it is worth a claim."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

_CLAIMED = "SELECT 1 FROM {message} {lease_index} WHERE state = 'PROCESSING'"
_PERIODIC = "SELECT 1 FROM {periodic} WHERE paused = 0 AND next_at <= {now} LIMIT 1"
_HELD = f"{_CLAIMED} AND lease_until IS NULL AND worker = :worker LIMIT 1"


class WorkFound(IntEnum):
    """Result of a check."""

    NONE = 0
    CLAIMED = 1
    """Only claimed messages, perhaps of a dead worker."""
    DUE = 2
    """Messages that may be claimed, or a periodic message that is to be published."""


def check_work(d: Dialect, hints: Hints, queues: Sequence[str], now: int | None) -> Steps[WorkFound]:
    for queue in queues:
        if (yield from hints.lanes_of(queue).places(d, queue, now)):
            return WorkFound.DUE
    if (yield Query(d.sql(_PERIODIC), {"now": now})):
        return WorkFound.DUE
    return WorkFound.CLAIMED if (yield Query(d.sql(f"{_CLAIMED} LIMIT 1"), {})) else WorkFound.NONE


def holds(d: Dialect, worker: int) -> Steps[bool]:
    """Whether a worker's row holds claims."""
    return bool((yield Query(d.sql(_HELD), {"worker": worker})))
