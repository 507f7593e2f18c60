"""Streams, as steps: claims that a Spark query makes, reads again and acknowledges by their numbers.

Each verb of a driver is one transaction that begins by locking the stream's row and comparing its epoch, so that
whoever opened it last is the only one that writes. At most one claim is open at a time: the one after the last
acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import SECOND, micros
from millpond.errors import ClaimLost, StreamBehind, StreamFenced, UnknownStream
from millpond.message import State, short_error
from millpond.transport import NEVER_US, Recorded, Settlement, Slice, StreamClaim, StreamStatus, Waiting
from millpond.transports.database import statements
from millpond.transports.database import stream_statements as sql
from millpond.transports.database.claim import Floor, Lanes, due_lanes, walk
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Rows, Steps

_NO_LIMIT = 2**31 - 1
_SMALL, _USUAL, _LARGE = 5_000, 8, 25_000
"""Slices of fewer messages do not pay; so many do on most machines; and so large is the largest."""
_LOWEST_ID = UUID(int=0)
_NO_OUTCOME = "no outcome was recorded"


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


class _Stream(msgspec.Struct, frozen=True):
    id: int
    epoch: int
    acked: int


# --- open and fence -------------------------------------------------------------------------------------


def open_stream(
    d: Dialect, name: str, epoch: int | None, above: int, *, now: int | None, again: bool
) -> Steps[tuple[int, int]]:
    """`again`: an earlier try may have been committed, so that a given epoch may be ours already."""
    stream = yield from _find(d, name, lock=True)
    if stream is None:
        yield Query(d.sql(sql.CREATE), {"name": name})
        stream = yield from _find(d, name, lock=True)
        assert stream is not None
    if epoch is None:
        epoch = max(stream.epoch, above) + 1
    elif stream.epoch > epoch or (stream.epoch == epoch and not again):
        raise _fenced(name, epoch, stream.epoch)
    yield Query(d.sql(sql.OPEN), {"stream": stream.id, "epoch": epoch, "now": now})
    return epoch, stream.acked


def _find(d: Dialect, name: str, *, lock: bool) -> Steps[_Stream | None]:
    rows = yield Query(d.sql(sql.LOCK if lock else sql.LOOK), {"name": name})
    return _Stream(*map(int, rows[0])) if rows else None


def _fence(d: Dialect, name: str, epoch: int, *, lock: bool = True) -> Steps[_Stream]:
    stream = yield from _find(d, name, lock=lock)
    if stream is None:
        raise UnknownStream(f"there is no stream {name!r} in this database; was the database replaced?")
    if stream.epoch != epoch:
        raise _fenced(name, epoch, stream.epoch)
    return stream


def _fenced(name: str, epoch: int, other: int) -> StreamFenced:
    return StreamFenced(
        f"stream {name!r}: this driver has epoch {epoch}, and the stream was opened by another one or released "
        f"since (epoch {other}); nothing was written. Let one query alone use the name; if this is the one that "
        "should run, start it again"
    )


# --- claim ----------------------------------------------------------------------------------------------


def claim(
    d: Dialect, lanes: dict[str, Lanes], name: str, epoch: int, seq: int, wanted: Request, *, now: int | None
) -> Steps[Claimed]:
    """The claim of this number, found or made. It and its record are one transaction: neither is without the other."""
    stream = yield from _fence(d, name, epoch)
    recorded = yield from _recorded(d, stream, seq)
    if recorded is not None:
        return Claimed(recorded)
    if stream.acked != seq - 1:
        raise _behind(name, seq - 1, stream.acked)
    yield from _room(d)
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


def recorded(d: Dialect, name: str, epoch: int, seq: int) -> Steps[StreamClaim | None]:
    stream = yield from _fence(d, name, epoch, lock=False)
    return (yield from _recorded(d, stream, seq))


def _recorded(d: Dialect, stream: _Stream, seq: int) -> Steps[StreamClaim | None]:
    rows = yield Query(d.sql(sql.RECORDS), {"stream": stream.id})
    for number, messages, slices, claimed_at in rows:
        if number == seq:
            return StreamClaim(
                stream=stream.id,
                seq=seq,
                messages=messages,
                slices=msgspec.json.decode(slices, type=tuple[Slice, ...]),
                claimed_us=claimed_at,
            )
    return None


def _behind(name: str, seq: int, acked: int) -> StreamBehind:
    return StreamBehind(
        f"stream {name!r}: the checkpoint is at claim {seq}, and the stream has acknowledged claim {acked}. The "
        "checkpoint is an old copy, or another query uses the same stream's name; going on would number new "
        "messages like old ones. Start from the newest checkpoint, or with a new stream's name"
    )


# --- outcomes -------------------------------------------------------------------------------------------


def record_outcomes(d: Dialect, name: str, outcomes: Sequence[Recorded]) -> Steps[set[Any]]:
    """Note outcomes beside the open claim; returns the ids that are not of it."""
    rows = yield Query(d.sql(sql.OPEN_CLAIM), {"name": name})
    if not rows:
        raise UnknownStream(f"there is no stream {name!r} in this database; check the name and the url")
    stream, seq = rows[0]
    last = {o.id: o for o in outcomes}
    if seq is None:
        return set(last)
    key = {"stream": stream, "seq": seq}
    found = {d.id_out(row[0]) for row in (yield Query(d.sql(sql.HAS), {**key, "ids": [d.id_in(i) for i in last]}))}
    values = [
        (
            d.id_in(o.id),
            o.outcome,
            None if o.delay is None else micros(o.delay, "delay"),
            short_error(o.reason),
        )
        for o in last.values()
        if o.id in found
    ]
    if values:
        yield d.note_outcomes(key, values)
    return last.keys() - found


def ack(
    d: Dialect,
    name: str,
    epoch: int,
    seq: int,
    *,
    unsettled: Settlement,
    messages: int | None,
    now: int | None,
) -> Steps[None]:
    """Apply the outcomes of the claims up to this one, and forget them."""
    stream = yield from _fence(d, name, epoch)
    if seq < stream.acked:
        raise _behind(name, seq, stream.acked)
    if seq == stream.acked:
        return
    held: Rows = yield Query(d.sql(sql.RECORDS), {"stream": stream.id})
    counts = {int(row[0]): int(row[1]) for row in held}
    if messages is not None and counts.get(seq, 0) != messages:
        raise claim_lost(name, seq, messages, counts.get(seq, 0))
    if counts:
        yield from _room(d)
    for number in counts:
        if number <= seq:
            yield from _settle(d, {"stream": stream.id, "seq": number}, unsettled, now)
    yield Query(d.sql(sql.ACKED), {"stream": stream.id, "seq": seq})


def claim_lost(name: str, seq: int, expected: int, found: int) -> ClaimLost:
    return ClaimLost(
        f"stream {name!r}: claim {seq} held {expected:,} messages, and now holds {found:,}: it was released, or "
        "changed by hand. What was given back will be delivered again, whether the sink has it or not. To go on "
        "with what is there, start the query with failOnDataLoss=false"
    )


def _settle(d: Dialect, key: dict[str, Any], unsettled: Settlement, now: int | None) -> Steps[None]:
    (counts,) = yield Query(d.sql(sql.OUTCOMES), key)
    names: tuple[Settlement, ...] = ("ack", "nack", "reject", unsettled)
    present = {name for name, count in zip(names, counts, strict=True) if count}
    chosen = {**key, "unsettled": unsettled, "now": now}
    if "ack" in present:
        yield from _move(d, {**chosen, "outcome": "ack", "state": State.COMPLETED.value, "reason": None})
    if "reject" in present:
        yield from _move(d, {**chosen, "outcome": "reject", "state": State.FAILED.value, "reason": _NO_OUTCOME})
    if "nack" in present:
        yield Query(d.sql(sql.RETRY), {**chosen, "outcome": "nack"})
    yield from _drop(d, key)


def _room(d: Dialect) -> Steps[None]:
    if d.fused:
        yield Query(d.sql(sql.FUSED_MEMORY), {})


def _move(d: Dialect, chosen: dict[str, Any]) -> Steps[None]:
    if d.fused:
        yield Query(d.sql(sql.FUSED_COMPLETE if chosen["outcome"] == "ack" else sql.FUSED_FAIL), chosen)
    else:
        yield Query(d.sql(sql.KEEP), chosen)
        yield Query(d.sql(sql.REMOVE), chosen)


def _drop(d: Dialect, key: dict[str, Any]) -> Steps[None]:
    yield Query(d.sql(sql.DROP_MESSAGES), key)
    yield Query(d.sql(sql.DROP_CLAIM), key)


# --- the operator's verbs -------------------------------------------------------------------------------


def release(d: Dialect, name: str) -> Steps[int]:
    """Fence out the driver, if there is one, and give back what the stream holds; returns how many."""
    stream = yield from _find(d, name, lock=True)
    if stream is None:
        known = [row[0] for row in (yield Query(d.sql(sql.STATUS), {"now": None}))]
        there = f"there are {', '.join(dict.fromkeys(map(repr, known)))}" if known else "there is none"
        raise UnknownStream(f"there is no stream {name!r} in this database; {there}")
    yield Query(d.sql(sql.RELEASED), {"stream": stream.id})
    total = 0
    for seq, messages, _, _ in (yield Query(d.sql(sql.RECORDS), {"stream": stream.id})):
        key = {"stream": stream.id, "seq": seq}
        yield Query(d.sql(sql.GIVE_BACK), key)
        yield from _drop(d, key)
        total += int(messages)
    return total


def status(d: Dialect, now: int | None) -> Steps[list[StreamStatus]]:
    rows = yield Query(d.sql(sql.STATUS), {"now": now})
    by_name: dict[str, list[Sequence[Any]]] = {}
    for row in rows:
        by_name.setdefault(row[0], []).append(row)
    return [
        StreamStatus(
            name=name,
            epoch=claims[0][1],
            acked_seq=claims[0][2],
            opened_us=claims[0][3],
            held=sum(int(row[5] or 0) for row in claims),
            held_for=None if claims[0][6] is None else max(0, claims[0][7] - claims[0][6]) / SECOND,
        )
        for name, claims in by_name.items()
    ]


def waiting(d: Dialect, lanes: dict[str, Lanes], queues: Sequence[str], limit: int, now: int | None) -> Steps[Waiting]:
    """Count what is due, lane by lane and up to a limit, from where the last claim ended: a hint, as its floors are."""
    at = int((yield Query(d.sql(statements.NOW), {"now": now}))[0][0])
    total = 0
    for queue in queues:
        known = lanes.setdefault(queue, Lanes())
        for lane in (yield from due_lanes(d, known, queue, now)):
            due, id_ = known.floor(lane) or d.no_floor
            floor = {"floor_due": due, "floor_id": id_}
            here = {"queue": queue, "lane": lane, "now": now, "limit": limit - total, **floor}
            total += int((yield Query(d.sql(sql.WAITING), here))[0][0])
            if total >= limit:
                return Waiting(total, at)
    return Waiting(total, at)
