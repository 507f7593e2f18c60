"""A stream's claims, as steps: made once, in the order of claims, and cut into slices that tasks read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpond.errors import stream_behind
from millpond.message import State
from millpond.transport import NEVER_US, Slice, StreamClaim, Waiting
from millpond.transports.database import statements
from millpond.transports.database import stream_statements as sql
from millpond.transports.database.claim import Floor, Lanes, due_lanes, walk
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Steps
from millpond.transports.database.streams import claim_of, fence, make_room

_NO_LIMIT = 2**31 - 1
_SMALL, _USUAL, _LARGE = 5_000, 8, 25_000
"""Slices of fewer messages do not pay; so many do on most machines; and so large is the largest."""
_LOWEST_ID = UUID(int=0)


class Request(msgspec.Struct, frozen=True):
    """What a claim asks for."""

    queues: Sequence[str]
    limit: int
    slices: int
    until: int | None
    max_crashes: int | None


class Claimed(msgspec.Struct, frozen=True):
    """What came of a claim, and how many messages were FAILED on the way, since they must not run."""

    claim: StreamClaim | None
    refused: int = 0


def claim(
    d: Dialect, lanes: dict[str, Lanes], name: str, epoch: int, seq: int, wanted: Request, *, now: int | None
) -> Steps[Claimed]:
    """The claim of this number, found or made. It and its record are one transaction: neither is without the other."""
    stream = yield from fence(d, name, epoch)
    recorded = yield from claim_of(d, stream, seq)
    if recorded is not None:
        return Claimed(recorded)
    if seq not in (stream.acked + 1, stream.acked + 2):
        raise stream_behind(name, seq - 1, stream.acked)
    yield from make_room(d)
    key = {"stream": stream.id, "seq": seq}
    work = _Claiming(d, key, wanted, now)
    if not (yield from work.run(lanes)):
        # Nothing by the hints; before this is the answer, look everywhere.
        for queue in wanted.queues:
            lanes[queue].fall()
        yield from work.run(lanes)
    refused = yield from _refuse(d, key, work.refused, wanted.max_crashes, now)
    messages = work.taken - refused
    if not messages:
        return Claimed(None, refused)
    at = int((yield Query(d.sql(statements.NOW), {"now": now}))[0][0])
    slices = yield from _slices(d, key, messages, wanted.slices)
    made = StreamClaim(stream=stream.id, seq=seq, messages=messages, slices=slices, claimed_us=at)
    text = msgspec.json.encode(slices).decode()
    yield Query(d.sql(sql.RECORD), {**key, "claimed_at": at, "messages": messages, "slices": text})
    return Claimed(made, refused)


class _Claiming:
    """One claim on its way through queues and lanes."""

    def __init__(self, d: Dialect, key: dict[str, Any], wanted: Request, now: int | None) -> None:
        self._d = d
        self._key = key
        self._wanted = wanted
        self._now = now
        self.taken = 0
        self.alone = False
        self.refused: list[tuple[Any, int | None]] = []

    def run(self, lanes: dict[str, Lanes]) -> Steps[int]:
        """From several queues: each in turn goes first and has its share; what one leaves goes to the next."""
        wanted = self._wanted
        turn = self._key["seq"] % len(wanted.queues)
        hungry = [*wanted.queues[turn:], *wanted.queues[:turn]]
        while hungry and self.taken < wanted.limit:
            still_hungry = []
            for n, queue in enumerate(hungry):
                share = -(-(wanted.limit - self.taken) // (len(hungry) - n))
                if share == 0:
                    break
                got = yield from self._queue(lanes.setdefault(queue, Lanes()), queue, share)
                if self.alone:
                    return self.taken
                if got == share:
                    still_hungry.append(queue)
            hungry = still_hungry
        return self.taken

    def _queue(self, lanes: Lanes, queue: str, share: int) -> Steps[int]:
        def take(lane: int, limit: int, floor: Floor | None) -> Steps[tuple[int, Floor | None]]:
            got, last = yield from self._take(queue, lane, limit, floor)
            self.taken += got
            self.alone = self.alone or (got > 0 and lane >= statements.SUSPECT_LANE)
            # The lowest id of that moment: what is due in the same is looked at again, and no longer there.
            return got, None if last is None else (int(last), self._d.id_in(_LOWEST_ID))

        return (yield from walk(self._d, lanes, queue, share, self._now, take, suspects=not self.taken))

    def _take(self, queue: str, lane: int, limit: int, floor: Floor | None) -> Steps[tuple[int, int | None]]:
        d, wanted = self._d, self._wanted
        due, id_ = floor or d.no_floor
        here = {
            **self._key,
            "queue": queue,
            "lane": lane,
            "now": self._now,
            "max_crashes": _NO_LIMIT if wanted.max_crashes is None else wanted.max_crashes,
        }
        which = {
            "limit": limit,
            "floor_due": due,
            "floor_id": id_,
            "until": NEVER_US if wanted.until is None else wanted.until,
        }
        if d.fused:
            ((got, last, ids, crashes),) = yield Query(d.sql(sql.FUSED_TAKE), {**here, **which})
            self.refused += zip(ids or (), crashes or (), strict=True)
            return got, last
        yield Query(d.sql(sql.TAKE), {**here, **which})
        yield Query(d.sql(sql.STAMP), here)
        ((total, last, refused),) = yield Query(d.sql(sql.TAKEN), here)
        if refused:
            self.refused = [(id_, crashes) for id_, crashes in (yield Query(d.sql(sql.REFUSED), here))]
        return int(total) - self.taken, last


def _refuse(
    d: Dialect, key: dict[str, Any], rows: Sequence[tuple[Any, int | None]], limit: int | None, now: int | None
) -> Steps[int]:
    """FAIL what must not run, as any claim does."""
    reasons: dict[int | None, list[Any]] = {}
    for id_, crashes in rows:
        reasons.setdefault(crashes, []).append(id_)
    for crashes, ids in reasons.items():
        reason, error = "expired", None
        if crashes is not None:
            reason, error = "max_crashes", f"{crashes} deliveries ended without a result (limit {limit})"
        kept = {"attempts": 0, "state": State.FAILED.value, "reason": reason, "error": error, "now": now}
        yield Query(d.sql(statements.KEEP), {"ids": ids, **kept})
        yield Query(d.sql(statements.REMOVE), {"ids": ids})
        yield Query(d.sql(sql.FORGET), {**key, "ids": ids})
    return len(rows)


def _slices(d: Dialect, key: dict[str, Any], messages: int, number: int) -> Steps[tuple[Slice, ...]]:
    """Cut a claim into parts of equal size: so many at least, and as many as are worth a task."""
    usual = max(min(-(-messages // _SMALL), _USUAL), -(-messages // _LARGE))
    number = min(max(number, usual), messages)
    size = -(-messages // number)
    rows = yield Query(d.sql(sql.FIRST), key)
    firsts: list[UUID] = []
    while rows:
        firsts.append(d.id_out(rows[0][0]))
        rows = yield Query(d.sql(sql.NEXT), {**key, "first": rows[0][0], "size": size})
    return tuple(
        Slice(first, stop, min(size, messages - n * size))
        for n, (first, stop) in enumerate(zip(firsts, [*firsts[1:], None], strict=True))
    )


def slice_of(d: Dialect, stream: int, seq: int, part: Slice) -> tuple[str, dict[str, Any]]:
    """What follows the columns of a SELECT that reads a slice, and its values."""
    text = sql.SLICE if part.stop is None else sql.SLICE_UP_TO
    values = {"stream": stream, "seq": seq, "first": d.id_in(part.first)}
    return d.overrides.get(text, text), values if part.stop is None else {**values, "stop": d.id_in(part.stop)}


def waiting(d: Dialect, lanes: dict[str, Lanes], queues: Sequence[str], limit: int, now: int | None) -> Steps[Waiting]:
    """Count what is due, lane by lane and up to a limit, from where the last claim ended: a hint, as its floors are."""
    at = int((yield Query(d.sql(statements.NOW), {"now": now}))[0][0])
    total = 0
    for queue in queues:
        known = lanes.setdefault(queue, Lanes()).trusted()
        for lane in (yield from due_lanes(d, known, queue, now)):
            due, id_ = known.floor(lane) or d.no_floor
            floor = {"floor_due": due, "floor_id": id_}
            here = {"queue": queue, "lane": lane, "now": now, "limit": limit - total, **floor}
            total += int((yield Query(d.sql(sql.WAITING), here))[0][0])
            if total >= limit:
                return Waiting(total, at)
    return Waiting(total, at)
