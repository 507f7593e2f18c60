"""A stream's claims, as steps: made once, in the order of claims, and cut into slices that tasks read.

Each verb of a driver is one transaction that begins by locking the stream's row and comparing its epoch: only the
driver that opened the stream last can write. At most two claims are open at a time, those after the last
acknowledged one: the first is being acknowledged while Spark works on the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpond.errors import StreamFenced, UnknownStream, stream_behind
from millpond.message import State
from millpond.outcome import Change
from millpond.seam.streams import ClaimSlice, StreamClaim, Waiting
from millpond.seam.transport import NEVER_US
from millpond.transports.database.messages.claim import walk
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.messages.lanes import Lanes, Takes, Took
from millpond.transports.database.sql.columns import SUSPECT_LANE
from millpond.transports.database.sql.dialect import NOW, Dialect, Floor
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.sql.writes import OF_CLAIM, archive_locked
from millpond.transports.shares import Shares

_SMALL, _USUAL, _LARGE = 5_000, 8, 25_000
"""Messages below which a slice does not pay; usual number of slices; messages of the largest slice."""
_LOWEST_ID = UUID(int=0)

# Each transaction of a driver begins with this lock: it waits for the one before it, and then sees its epoch.
_LOCK = "SELECT id, epoch, acked_seq FROM {stream} WHERE name = :name {lock}"
_READ = "SELECT id, epoch, acked_seq FROM {stream} WHERE name = :name"
RECORDS = "SELECT seq, messages, slices, claimed_at, checkpoint FROM {stream_claim} WHERE stream = :stream ORDER BY seq"
_FORGET = "DELETE FROM {stream_message} WHERE stream = :stream AND seq = :seq AND id {ids}"
# The first id of the next slice, `:size` ids after the first id of this one.
_FIRST = """
SELECT s.id FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq ORDER BY s.id LIMIT 1
"""
_NEXT = """
SELECT s.id FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq AND s.id >= :first
ORDER BY s.id LIMIT 1 OFFSET :size
"""
_RECORD = """
INSERT INTO {stream_claim} (stream, seq, claimed_at, messages, slices, checkpoint)
VALUES (:stream, :seq, :claimed_at, :messages, :slices, :checkpoint)
"""
_WAITING = """
SELECT count(*), min(x.due_at) FROM (SELECT m.id, m.due_at FROM {message} m {claim_index}
WHERE m.queue = :queue AND {ready} AND m.lane = :lane AND m.due_at <= {now} {from_floor}
ORDER BY m.due_at, m.id LIMIT :limit) x
"""
# Number of the next messages of a lane, number of the first of them whose bodies fit, and the sum of these sizes.
_FITTING = """
SELECT count(*), count(CASE WHEN y.upto <= :room THEN 1 END),
coalesce(max(CASE WHEN y.upto <= :room THEN y.upto END), 0)
FROM (SELECT sum(x.size) OVER (ORDER BY x.due_at, x.id) AS upto FROM
(SELECT m.id, m.due_at, length(m.payload) AS size FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready}
AND m.lane = :lane AND m.due_at <= {now} {from_floor} ORDER BY m.due_at, m.id LIMIT :limit) x) y
"""
_SIZE = f"SELECT coalesce(sum(length(m.payload)), 0) FROM {OF_CLAIM}"


class Stream(msgspec.Struct, frozen=True):
    """A stream's row, locked."""

    id: int
    epoch: int
    acked: int


def find_stream(d: Dialect, name: str, *, lock: bool) -> Steps[Stream | None]:
    rows = yield Query(d.sql(_LOCK if lock else _READ), {"name": name})
    return Stream(*map(int, rows[0])) if rows else None


def fence(d: Dialect, name: str, epoch: int, *, lock: bool = True) -> Steps[Stream]:
    stream = yield from find_stream(d, name, lock=lock)
    if stream is None:
        raise UnknownStream(f"there is no stream {name!r} in this database; check whether the database was replaced")
    if stream.epoch != epoch:
        raise stream_fenced(name, epoch, stream.epoch)
    return stream


def stream_fenced(name: str, epoch: int, other: int) -> StreamFenced:
    return StreamFenced(
        f"stream {name!r}: this driver has epoch {epoch}, and the stream was opened by another one or released "
        f"since (epoch {other}); nothing was written. Let one query alone use the name; if this is the one that "
        "should run, start it again. A query that joins the stream with itself reads it twice, and fails so each time: "
        "join within foreachBatch"
    )


def claim_of(d: Dialect, stream: Stream, seq: int) -> Steps[StreamClaim | None]:
    rows = yield Query(d.sql(RECORDS), {"stream": stream.id})
    for number, messages, slices, claimed_at, checkpoint in rows:
        if number == seq:
            return StreamClaim(
                stream=stream.id,
                seq=seq,
                messages=messages,
                slices=msgspec.json.decode(slices, type=tuple[ClaimSlice, ...]),
                claimed_us=claimed_at,
                checkpoint=checkpoint,
            )
    return None


class StreamRequest(msgspec.Struct, frozen=True):
    """The arguments of a claim."""

    queues: Sequence[str]
    limit: int
    slices: int
    until: int | None
    max_bytes: int | None = None
    checkpoint: str | None = None


class MadeClaim(msgspec.Struct, frozen=True):
    """A claim, and the number of expired messages that were FAILED instead of claimed."""

    claim: StreamClaim | None
    expired: int = 0


def make_claim(
    d: Dialect, hints: Hints, name: str, epoch: int, seq: int, wanted: StreamRequest, *, now: int | None
) -> Steps[MadeClaim]:
    """Find or make the claim of this number. The claim and its record are one transaction."""
    stream = yield from fence(d, name, epoch)
    recorded = yield from claim_of(d, stream, seq)
    if recorded is not None:
        return MadeClaim(recorded)
    if seq not in (stream.acked + 1, stream.acked + 2):
        raise stream_behind(name, seq - 1, stream.acked)
    key = {"stream": stream.id, "seq": seq}
    work = _Claiming(d, key, wanted, now)
    if not (yield from work.run(hints)):
        # Nothing is due by the hints. Search below the floors before answering so.
        for queue in wanted.queues:
            hints.lanes_of(queue).fall()
        yield from work.run(hints)
    expired = yield from _fail_expired(d, key, work.expired, now)
    messages = work.taken - expired
    if not messages:
        return MadeClaim(None, expired)
    at = int((yield Query(d.sql(NOW), {"now": now}))[0][0])
    slices = yield from _slices(d, key, messages, wanted.slices)
    made = StreamClaim(
        stream=stream.id, seq=seq, messages=messages, slices=slices, claimed_us=at, checkpoint=wanted.checkpoint
    )
    text = msgspec.json.encode(slices).decode()
    record = {"claimed_at": at, "messages": messages, "slices": text, "checkpoint": wanted.checkpoint}
    yield Query(d.sql(_RECORD), {**key, **record})
    return MadeClaim(made, expired)


class _Claiming:
    """One claim on its way through queues and lanes."""

    def __init__(self, d: Dialect, key: dict[str, Any], wanted: StreamRequest, now: int | None) -> None:
        self._d = d
        self._key = key
        self._wanted = wanted
        self._now = now
        self.taken = 0
        self.alone = False
        self.expired: set[Any] = set()

    def run(self, hints: Hints) -> Steps[int]:
        """Claim from each queue its share of the limit, and return the number of messages."""
        shares = Shares(self._wanted.queues, self._wanted.limit, self._key["seq"])
        for queue, share in shares:
            lanes, fitting = hints.lanes_of(queue), share
            if self._wanted.max_bytes is not None:
                fitting = yield from self._fitting(lanes, queue, share, self._wanted.max_bytes)
            if not fitting:
                break
            shares.taken += yield from self._queue(lanes, queue, fitting)
            if self.alone:
                break
        return self.taken

    def _fitting(self, lanes: Lanes, queue: str, share: int, most: int) -> Steps[int]:
        """Number of the next messages whose bodies fit. The first message of a claim may be larger."""
        d, fitting = self._d, 0
        room = most - int((yield Query(d.sql(_SIZE), self._key))[0][0])
        for lane, floor in (yield from lanes.places(d, queue, self._now)):
            due, id_ = floor or d.no_floor
            here = {"queue": queue, "lane": lane, "now": self._now, "floor_due": due, "floor_id": id_}
            here["limit"] = share - fitting
            ((there, count, size),) = yield Query(d.sql(_FITTING), {**here, "room": max(0, room)})
            fitting, room = fitting + int(count), room - int(size)
            if fitting == share or count < there:
                break
        return min(share, fitting if self.taken else max(1, fitting))

    def _queue(self, lanes: Lanes, queue: str, share: int) -> Steps[int]:
        def take(lane: int, limit: int, floor: Floor | None) -> Steps[Took]:
            got, last = yield from self._take(queue, lane, limit, floor)
            self.taken += got
            self.alone = self.alone or (got > 0 and lane >= SUSPECT_LANE)
            if last is None or self._wanted.until is not None:
                return Took(got, None)  # later messages that are due earlier were left
            # The lowest id of that due time: messages due at the same time are searched again next time.
            return Took(got, (int(last), self._d.id_in(_LOWEST_ID)))

        return (yield from walk(self._d, lanes, queue, share, self._now, Takes(take), suspects=not self.taken))

    def _take(self, queue: str, lane: int, limit: int, floor: Floor | None) -> Steps[tuple[int, int | None]]:
        d, wanted = self._d, self._wanted
        due, id_ = floor or d.no_floor
        here = {**self._key, "queue": queue, "lane": lane, "now": self._now}
        which = {
            "limit": limit,
            "floor_due": due,
            "floor_id": id_,
            "until": NEVER_US if wanted.until is None else wanted.until,
        }
        got = yield from d.writes.take_for_stream({**here, **which}, self.taken)
        self.expired.update(got.expired)
        return got.messages, got.last_due


def _fail_expired(d: Dialect, key: dict[str, Any], expired: set[Any], now: int | None) -> Steps[int]:
    """FAIL expired messages, as any claim does."""
    if expired:
        ids = list(expired)
        yield from d.lock_archive()
        yield from archive_locked(d, Change(State.FAILED, 0, reason="expired"), ids, now)
        yield Query(d.sql(_FORGET), {**key, "ids": ids})
    return len(expired)


def _slices(d: Dialect, key: dict[str, Any], messages: int, number: int) -> Steps[tuple[ClaimSlice, ...]]:
    """Cut a claim into slices of equal size: at least `number`, and as many as are worth a task."""
    usual = max(min(-(-messages // _SMALL), _USUAL), -(-messages // _LARGE))
    number = min(max(number, usual), messages)
    size = -(-messages // number)
    rows = yield Query(d.sql(_FIRST), key)
    firsts: list[UUID] = []
    while rows:
        firsts.append(d.id_out(rows[0][0]))
        rows = yield Query(d.sql(_NEXT), {**key, "first": rows[0][0], "size": size})
    return tuple(
        ClaimSlice(first, stop, min(size, messages - n * size))
        for n, (first, stop) in enumerate(zip(firsts, [*firsts[1:], None], strict=True))
    )


def count_waiting(d: Dialect, hints: Hints, queues: Sequence[str], limit: int, now: int | None) -> Steps[Waiting]:
    """Count due messages, lane by lane up to a limit, from the floors of the last claim on. The result is a hint."""
    at = int((yield Query(d.sql(NOW), {"now": now}))[0][0])
    total, oldest = 0, None
    for queue in queues:
        for lane, floor in (yield from hints.lanes_of(queue).places(d, queue, now)):
            due, id_ = floor or d.no_floor
            here = {"queue": queue, "lane": lane, "now": now, "limit": limit - total}
            ((count, first),) = yield Query(d.sql(_WAITING), {**here, "floor_due": due, "floor_id": id_})
            total += int(count)
            if first is not None:
                oldest = int(first) if oldest is None else min(oldest, int(first))
            if total >= limit:
                return Waiting(total, at, oldest)
    return Waiting(total, at, oldest)
