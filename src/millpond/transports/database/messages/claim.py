"""Claim, as steps: lane by lane, oldest due first. Each row is locked, counted and stamped in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.clock import SECOND
from millpond.message import Claim
from millpond.transports.database.messages.lanes import Lanes, LaneSearch, Takes, Took
from millpond.transports.database.sql.columns import CLAIMED, SUSPECT_LANE, claims, names
from millpond.transports.database.sql.dialect import Dialect, Floor
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.sql.writes import Stamp

# After a lost connection: a claim whose commit happened although its reply never came. Leases of its own end within
# `:lease` from now: neither waiting messages are read nor those of streams.
_ADOPT = f"""
SELECT {names(CLAIMED, "m.")}, m.acquired_at, m.acquired_at + m.lease FROM {{message}} m {{lease_index}}
WHERE m.state = 'PROCESSING' AND %s AND m.token = :token ORDER BY m.lane, m.due_at, m.id
"""
_ADOPT_OWN = _ADOPT % "m.lease_until > {now} AND m.lease_until <= {now} + :lease"
_ADOPT_BY_WORKER = _ADOPT % "m.lease_until IS NULL AND m.worker = :worker"
# Not min(): planned while the table is empty, it would read every row of the lane from then on. Messages that are
# overdue for longer are not read: dead rows are there, and a paused queue would never let a worker rest.
_NEXT_DUE = """
SELECT m.due_at - {now} FROM {message} m {claim_index}
WHERE m.queue = :queue AND {ready} AND m.lane = :lane AND m.due_at > {now} - :overdue ORDER BY m.due_at, m.id LIMIT 1
"""


_OVERDUE = 2 * SECOND
"""Longer than the time between two reads of the next due message, so that none falls due unseen between them."""


def claim_queue(
    d: Dialect, lanes: Lanes, queue: str, limit: int, stamp: Stamp, *, suspects: bool
) -> Steps[list[Claim]]:
    """Claim up to `limit` messages of one queue, or one suspect alone."""
    found: list[Claim] = []

    def take(lane: int, wanted: int, floor: Floor | None) -> Steps[Took]:
        got = yield from d.writes.claim_lane(queue, lane, wanted, stamp, floor)
        found.extend(got)
        if not got:
            return Took(0, None)
        return Took(len(got), (got[-1].due_us, d.id_in(got[-1].receipt.id)), got[-1].claimed_us)

    def take_ids(ids: Sequence[Any], wanted: int) -> Steps[set[Any]]:
        got = yield from d.writes.claim_ids([queue], ids, wanted, stamp)
        found.extend(got)
        return {d.id_in(claim.receipt.id) for claim in got}

    yield from walk(d, lanes, queue, limit, stamp.now, Takes(take, take_ids), suspects=suspects)
    return found


def walk(
    d: Dialect, lanes: Lanes, queue: str, limit: int, now: int | None, takes: Takes, *, suspects: bool
) -> Steps[int]:
    """Take from the lanes of a queue in their order, or one suspect alone; returns the number taken."""
    found = yield from lanes.search(d, queue, now)
    suspect = [lane for lane in found.due if lane >= SUSPECT_LANE] if suspects else []
    if lanes.suspects_turn and (yield from _take_suspect(lanes, found, suspect, takes)):
        return 1
    taken = 0
    for lane in found.due:
        if lane >= SUSPECT_LANE:
            break
        count = yield from lanes.take(found, lane, limit - taken, takes)
        taken += count
        lanes.suspects_turn = lanes.suspects_turn or count > 0
        if taken == limit:
            return taken
    if lanes.read_again(found, taken):
        lanes.fall()
        taken += yield from walk(d, lanes, queue, limit - taken, now, takes, suspects=suspects and not taken)
    return taken or (yield from _take_suspect(lanes, found, suspect, takes))


def _take_suspect(lanes: Lanes, found: LaneSearch, due: Sequence[int], takes: Takes) -> Steps[int]:
    for lane in due:
        count = yield from lanes.take(found, lane, 1, takes)
        if count:
            lanes.suspects_turn = False
            return count
    return 0


def adopt(d: Dialect, stamp: Stamp) -> Steps[list[Claim]]:
    """The rows of a claim whose reply was lost."""
    params = {"token": stamp.token, "worker": stamp.worker, "lease": stamp.lease, "now": stamp.now}
    text = _ADOPT_BY_WORKER if stamp.by_worker else _ADOPT_OWN
    return claims((yield Query(d.sql(text), params)), stamp.token, d.id_out)


def next_due(d: Dialect, lanes: Lanes, queue: str, now: int | None) -> Steps[int | None]:
    """Microseconds until the next message of a queue falls due. Negative: it fell due in the last seconds."""
    soonest = None
    for lane in lanes.known:
        for (wait,) in (yield Query(d.sql(_NEXT_DUE), {"queue": queue, "lane": lane, "now": now, "overdue": _OVERDUE})):
            soonest = int(wait) if soonest is None else min(soonest, int(wait))
    return soonest
