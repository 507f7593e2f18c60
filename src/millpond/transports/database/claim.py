"""Claim, as steps: lane by lane, oldest due first, each row locked, counted and stamped in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from millpond.clock import SECOND, monotonic
from millpond.message import Claim, Message, Receipt, decode_headers
from millpond.outcome import SUSPECT
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import LONGEST_LIST, Query, Rows, Steps

REAP_BATCH = 1000
_LAST_LANE = 2 * sql.SUSPECT_LANE
_LOOK_BELOW_EVERY = 1.0
_QUICK = 0.005
_ALL_LEASES_EVERY = 10.0
_COMMIT_WITHIN_US = 5 * SECOND

Floor = tuple[int, Any]
_BY_DUE = itemgetter(9, 0)


class Stamp(msgspec.Struct, frozen=True):
    """What one claim writes on the rows it takes."""

    token: int
    worker: int | None
    lease: int
    now: int | None


class Lanes:
    """What a process remembers of one queue's lanes: hints only.

    Lanes once seen, so that a probe need not step over the dead rows at their heads, and a floor in each: where
    the last claim ended. Late commits, give-backs and reschedules appear below any floor, so that claims look
    below them once a second, whenever somebody here put something there, and after a claim that was not full,
    unless the last such look was long: then there are many dead rows, and the second is waited for.
    Suspects and the others take turns in going first, so that neither starves the other.
    Most queues have one lane; then a claim asks itself whether that is so, and needs no probe.
    """

    def __init__(self) -> None:
        self.known: list[int] = []
        self.suspects_turn = True
        self.was_full = False
        """The last claim got all it wanted, so that there may be more."""
        self._floors: dict[int, Floor] = {}
        self._fell = True
        self._looked_at = 0.0
        self._took = 0.0

    def begin(self) -> dict[int, Floor] | None:
        """The floors that this claim looks below, or None: it need not. They count no longer, as it may end early."""
        if self._floors_count():
            return None
        self._fell = False  # what falls from now on is for the next claim
        before, self._floors = self._floors, {}
        return before

    def _floors_count(self) -> bool:
        return bool(self._floors) and not self._fell and monotonic() - self._looked_at < _LOOK_BELOW_EVERY

    def only(self) -> tuple[int, Floor | None] | None:
        """The lane to claim from without a probe, and the floor to begin at: none, unless there are many dead rows."""
        if len(self.known) != 1 or self.known[0] >= sql.SUSPECT_LANE or not self._floors_count():
            return None
        (lane,) = self.known
        return lane, self.floor(lane) if self.was_full or self._took >= _QUICK else None

    def looked_below(self, before: dict[int, Floor], due: Sequence[int], began: float, took: float) -> None:
        """A probe from below the floors has ended: where nothing is due, they count again."""
        self._looked_at, self._took = began, took
        self._floors.update((lane, floor) for lane, floor in before.items() if lane not in due)

    def look_again(self, took: float) -> bool:
        """Whether to look below at once, after a claim that was not full and whose probe took so long."""
        # Compared with the probe above the floors too: on a busy machine everything takes long.
        return self._took < max(_QUICK, 5 * took)

    def fall(self) -> None:
        """Something may have appeared below the floors."""
        self._fell = True

    def trusted(self) -> Lanes:
        """These, or the same without floors while something may be below them: for a look that is no claim."""
        if self._floors_count():
            return self
        bare = Lanes()
        bare.known = list(self.known)
        return bare

    def floor(self, lane: int) -> Floor | None:
        return self._floors.get(lane)

    def claimed(self, lane: int, last: Floor, before: Floor | None) -> None:
        """A claim in this lane ended there; `before`: a floor below which it left nothing."""
        self._floors[lane] = max(last, before or last)

    def add(self, lane: int) -> None:
        if lane not in self.known:
            self.known.append(lane)
            self.known.sort()

    def gaps(self) -> list[tuple[int, int]]:
        """The known lanes as (lane, lane), and the ranges between them."""
        gaps, low = [], 0
        for lane in self.known:
            if low < lane:
                gaps.append((low, lane - 1))
            gaps.append((lane, lane))
            low = lane + 1
        gaps.append((low, _LAST_LANE))
        return gaps


Take = Callable[[int, int, Floor | None], Steps[tuple[int, Floor | None]]]
"""Claim from a lane, at most so many, from a floor on: how many it were, and where the last one stood."""


def claim_queue(
    d: Dialect, lanes: Lanes, queue: str, limit: int, stamp: Stamp, *, suspects: bool
) -> Steps[list[Claim]]:
    """Up to `limit` messages of one queue, or one suspect alone."""
    claims: list[Claim] = []

    def take(lane: int, wanted: int, floor: Floor | None) -> Steps[tuple[int, Floor | None]]:
        rows = yield from _claim_lane(d, queue, lane, wanted, stamp, floor)
        claims.extend(rows)
        return len(rows), _last(d, rows)

    if d.fused and (only := lanes.only()):
        lane, floor = only
        claims += yield from _claim_lane(d, queue, lane, limit, stamp, floor, only=True)
        lanes.was_full = len(claims) == limit
        if last := _last(d, claims):
            lanes.claimed(lane, last, None if lanes.was_full else lanes.floor(lane))
            lanes.suspects_turn = True
            if lanes.was_full or floor is None:
                return claims
    yield from walk(d, lanes, queue, limit - len(claims), stamp.now, take, suspects=suspects and not claims)
    lanes.was_full = len(claims) == limit
    return claims


def _last(d: Dialect, claims: Sequence[Claim]) -> Floor | None:
    return (claims[-1].due_us, d.id_in(claims[-1].receipt.id)) if claims else None


def walk(
    d: Dialect, lanes: Lanes, queue: str, limit: int, now: int | None, take: Take, *, suspects: bool
) -> Steps[int]:
    """Take from the lanes of a queue in their order, or one suspect alone; returns how many were taken."""
    before = lanes.begin()
    began = monotonic()
    due = yield from due_lanes(d, lanes, queue, now)
    took = monotonic() - began
    if before is not None:
        lanes.looked_below(before, due, began, took)
    suspect = [lane for lane in due if lane >= sql.SUSPECT_LANE] if suspects else []
    if lanes.suspects_turn and (yield from _take_suspect(lanes, suspect, take)):
        return 1
    taken = 0
    for lane in due:
        if lane >= sql.SUSPECT_LANE:
            break
        wanted = limit - taken
        count, last = yield from take(lane, wanted, lanes.floor(lane))
        if last is not None:
            lanes.claimed(lane, last, (before or {}).get(lane) if count < wanted else None)
        taken += count
        lanes.suspects_turn = lanes.suspects_turn or count > 0
        if taken == limit:
            return taken
    if before is None and lanes.look_again(took):
        lanes.fall()
        taken += yield from walk(d, lanes, queue, limit - taken, now, take, suspects=suspects and not taken)
    return taken or (yield from _take_suspect(lanes, suspect, take))


def _take_suspect(lanes: Lanes, due: Sequence[int], take: Take) -> Steps[int]:
    for lane in due:
        count, _ = yield from take(lane, 1, None)
        if count:
            lanes.suspects_turn = False
            return count
    return 0


def claim_ids(d: Dialect, queues: Sequence[str], ids: Sequence[Any], limit: int, stamp: Stamp) -> Steps[list[Claim]]:
    """The given messages, as far as they are due and nobody has them."""
    params = {"ids": ids, "queues": list(queues), "limit": limit, "now": stamp.now}
    if d.fused:
        rows = yield Query(d.sql(d.fused.claim_ids), {**params, **_stamped(stamp)})
        return _claims(d, sorted(rows, key=_by_lane), stamp)
    rows = yield Query(d.sql(sql.LOCK_IDS), params | {"lease": stamp.lease})
    if len(ids) > LONGEST_LIST:  # asked in parts, each in its own order and with its own limit
        rows = sorted(rows, key=_by_lane)[:limit]
    return (yield from _stamp(d, rows, stamp))


def _by_lane(row: Sequence[Any]) -> tuple[Any, ...]:
    """A suspect comes after the others. (Deliveries, of which the last is this one, and attempts.)"""
    return (row[6] - 1 - row[7] >= SUSPECT, row[3], row[9], row[0])


def adopt(d: Dialect, stamp: Stamp) -> Steps[list[Claim]]:
    """The rows of a claim whose reply was lost."""
    rows = yield Query(d.sql(sql.ADOPT), {"token": stamp.token})
    return _claims(d, rows, stamp)


class Leases:
    """Where a reaper looks for lapsed leases: a hint only, to step over the dead entries of past ones.

    Once it found none, older ones can only come from transactions that committed late or held their rows
    locked: it leaves those some time, and looks everywhere every few seconds.
    """

    def __init__(self) -> None:
        self.floor = 0
        self._since = 0.0

    def refresh(self) -> None:
        if monotonic() - self._since >= _ALL_LEASES_EVERY:
            self.floor = 0

    def none_before(self, at: int) -> None:
        self.floor, self._since = at - _COMMIT_WITHIN_US, monotonic()


def lapsed(d: Dialect, leases: Leases, now: int | None, limit: int) -> Steps[list[Any]]:
    """The ids of messages whose lease is over."""
    leases.refresh()
    at = None if leases.floor or now is not None else (yield Query(d.sql(sql.NOW), {"now": None}))[0][0]
    rows = yield Query(d.sql(sql.LAPSED), {"floor": leases.floor, "now": now, "limit": limit})
    if at is not None and not rows:
        leases.none_before(at)
    return [row[0] for row in rows]


def release_lapsed(d: Dialect, ids: Sequence[Any], now: int | None) -> Steps[int]:
    """Give back those whose lease is still over; returns how many."""
    return (yield from release(d, (yield Query(d.sql(sql.LOCK_LAPSED), {"ids": ids, "now": now}))))


def release(d: Dialect, rows: Rows) -> Steps[int]:
    if rows:
        yield Query(d.sql(sql.RELEASE), {"ids": [row[0] for row in rows], "suspect": SUSPECT})
    return len(rows)


def next_due(d: Dialect, lanes: Lanes, queue: str, now: int | None) -> Steps[int | None]:
    """Microseconds until the next message of a queue falls due."""
    soonest = None
    for lane in lanes.known:
        for (wait,) in (yield Query(d.sql(sql.NEXT_DUE), {"queue": queue, "lane": lane, "now": now})):
            soonest = int(wait) if soonest is None else min(soonest, int(wait))
    return soonest


def due_lanes(d: Dialect, lanes: Lanes, queue: str, now: int | None) -> Steps[list[int]]:
    while True:
        gaps = lanes.gaps()
        floors = [lanes.floor(low) if low == high else None for low, high in gaps]
        rows = yield d.probe({"queue": queue, "now": now}, gaps, floors)
        found = {int(row[0]) for row in rows if row[0] is not None}
        new = found.difference(lanes.known)
        if not new:
            return sorted(found)
        for lane in new:
            lanes.add(lane)


def _claim_lane(
    d: Dialect, queue: str, lane: int, limit: int, stamp: Stamp, floor: Floor | None, *, only: bool = False
) -> Steps[list[Claim]]:
    """From one lane; `only`: if no other has anything."""
    due, id_ = floor or d.no_floor
    params = {
        "queue": queue,
        "lane": lane,
        "limit": limit,
        "now": stamp.now,
        "floor_due": due,
        "floor_id": id_,
    }
    if d.fused:
        text = d.fused.claim_only if only else d.fused.claim_lane
        rows = yield Query(d.sql(text), {**params, **_stamped(stamp)})
        return _claims(d, sorted(rows, key=_BY_DUE), stamp)
    rows = yield Query(d.sql(sql.LOCK_LANE), params | {"lease": stamp.lease})
    return (yield from _stamp(d, rows, stamp))


def _stamped(stamp: Stamp) -> dict[str, Any]:
    return {"token": stamp.token, "worker": stamp.worker, "lease": stamp.lease}


def _stamp(d: Dialect, rows: Rows, stamp: Stamp) -> Steps[list[Claim]]:
    if not rows:
        return []
    ids, (at, until) = [row[0] for row in rows], rows[0][12:14]
    yield Query(d.sql(sql.STAMP), {"ids": ids, "token": stamp.token, "worker": stamp.worker, "at": at, "until": until})
    return _claims(d, rows, stamp)


def _claims(d: Dialect, rows: Rows, stamp: Stamp) -> list[Claim]:
    token, id_out = stamp.token, d.id_out
    claims = []
    for (
        key_,
        queue,
        key,
        priority,
        headers,
        payload,
        deliveries,
        attempts,
        created,
        due,
        first,
        expires,
        acquired,
        until,
    ) in rows:
        id_ = id_out(key_)
        claims.append(
            Claim(
                Message(
                    queue=queue,
                    payload=payload,
                    id=id_,
                    key=key,
                    priority=priority,
                    headers=decode_headers(headers) if headers else _NO_HEADERS,
                ),
                Receipt(id_, token),
                deliveries,
                attempts,
                created,
                due,
                acquired,
                until,
                first,
                expires,
            )
        )
    return claims


_NO_HEADERS = decode_headers(None)
