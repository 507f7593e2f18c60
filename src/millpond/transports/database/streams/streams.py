"""The streams room: epochs, outcomes, acknowledgement by numbers, status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args
from uuid import UUID

from millpond.checks import integer
from millpond.clock import SECOND, micros
from millpond.errors import InvalidOption, UnknownStream, claim_lost, stream_behind
from millpond.message import State, check_id, check_name, short_error
from millpond.seam.streams import RecordedOutcome, Settlement, StreamClaim, StreamStatus, Waiting
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.runner import Mode, Room, Runner, read, write
from millpond.transports.database.sql.dialect import Dialect, Named
from millpond.transports.database.sql.statement import Query, Rows, Steps
from millpond.transports.database.sql.writes import CHOSEN
from millpond.transports.database.streams.claims import (
    RECORDS,
    MadeClaim,
    StreamRequest,
    claim_of,
    count_waiting,
    fence,
    find_stream,
    make_claim,
    stream_fenced,
)
from millpond.transports.validation import queue_names

_MOST_OUTCOMES = 10_000
"""Outcomes per transaction."""
_NO_OUTCOME = "no outcome was recorded"

_CREATE = "INSERT INTO {stream} (name, epoch, acked_seq) VALUES (:name, 0, 0) {or_skip}"
_OPEN = """
UPDATE {stream} SET epoch = :epoch, opened_at = {now}, shard = coalesce(shard, :shard) WHERE id = :stream
"""
_HAND_OUT = "UPDATE {stream_claim} SET checkpoint = :checkpoint WHERE stream = :stream AND seq = :seq"
_RELEASED = "UPDATE {stream} SET epoch = epoch + 1 WHERE id = :stream"
_ACKED = "UPDATE {stream} SET acked_seq = :seq WHERE id = :stream"
_STATUS = """
SELECT s.name, s.epoch, s.acked_seq, s.opened_at, c.seq, c.messages, c.claimed_at, {now}, s.shard, c.checkpoint
FROM {stream} s LEFT JOIN {stream_claim} c ON c.stream = s.id ORDER BY s.name, c.seq
"""
_OPEN_CLAIM = """
SELECT s.id, c.seq FROM {stream} s LEFT JOIN {stream_claim} c ON c.stream = s.id WHERE s.name = :name
ORDER BY c.seq DESC LIMIT 1
"""
_HAS = "SELECT id FROM {stream_message} WHERE stream = :stream AND seq = :seq AND id {ids}"
RECORD_OUTCOMES = Named(
    "record outcomes",
    """
UPDATE {stream_message} SET outcome = :outcome, delay = :delay, reason = :reason
WHERE stream = :stream AND seq = :seq AND id = :id
""",
)
# Not GROUP BY: that would sort them.
_OUTCOMES = """
SELECT count(CASE WHEN s.outcome = 'ack' THEN 1 END), count(CASE WHEN s.outcome = 'nack' THEN 1 END),
count(CASE WHEN s.outcome = 'reject' THEN 1 END), count(CASE WHEN s.outcome IS NULL THEN 1 END)
FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq
"""
_RECORDED = "(SELECT {} FROM {{stream_message}} s WHERE s.stream = :stream AND s.seq = :seq AND s.id = {}.id)"
RETRY = Named(
    "retry of stream",
    f"""
UPDATE {{message}} SET state = 'RETRYABLE', attempts = attempts + 1, crashes = 0,
due_at = {{now}} + coalesce({_RECORDED.format("s.delay", "{message}")}, 0),
first_attempt_at = coalesce(first_attempt_at, acquired_at), last_attempt_at = {{now}},
last_error = coalesce({_RECORDED.format("s.reason", "{message}")}, last_error), lease_until = NULL
WHERE id {CHOSEN}
""",
)
# As if never claimed: the release of a stream is no fault of its messages, and their lane stays.
GIVE_BACK = Named(
    "give back of stream",
    """
UPDATE {message} SET state = 'PENDING', deliveries = deliveries - 1, lease_until = NULL
WHERE id {in_select} SELECT s.id FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq {end_select}
""",
)
_DROP_MESSAGES = "DELETE FROM {stream_message} WHERE stream = :stream AND seq = :seq"
_DROP_CLAIM = "DELETE FROM {stream_claim} WHERE stream = :stream AND seq = :seq"


class DatabaseStreams(Room):
    def __init__(self, runner: Runner, hints: Hints) -> None:
        super().__init__(runner)
        self._hints = hints

    # --- open and claim -----------------------------------------------------------------------------

    async def open(
        self, name: str, *, epoch: int | None = None, above: int = 0, shard: int | None = None
    ) -> tuple[int, int]:
        label = check_name(name, "stream")
        return await self.runner.run(lambda again: self.open_steps(label, epoch, above, shard, again=again), Mode.WRITE)

    def open_steps(
        self, name: str, epoch: int | None, above: int, shard: int | None = None, *, again: bool
    ) -> Steps[tuple[int, int]]:
        """`again`: an earlier try may have been committed, and a given epoch may be ours already."""
        d = self.d
        stream = yield from find_stream(d, name, lock=True)
        if stream is None:
            yield Query(d.sql(_CREATE), {"name": name})
            stream = yield from find_stream(d, name, lock=True)
            assert stream is not None
        if epoch is None:
            epoch = max(stream.epoch, above) + 1
        elif stream.epoch > epoch or (stream.epoch == epoch and not again):
            raise stream_fenced(name, epoch, stream.epoch)
        yield Query(d.sql(_OPEN), {"stream": stream.id, "epoch": epoch, "now": self.now, "shard": shard})
        return epoch, stream.acked

    async def claim(
        self,
        name: str,
        epoch: int,
        seq: int,
        queues: Sequence[str],
        limit: int,
        *,
        slices: int = 1,
        until_us: int | None = None,
        max_bytes: int | None = None,
        checkpoint: str | None = None,
    ) -> StreamClaim | None:
        names = queue_names(queues)
        integer(limit, "limit")
        if not names:
            raise InvalidOption("a stream needs a queue")
        wanted = StreamRequest(names, limit, slices, until_us, max_bytes, checkpoint)
        while True:
            made = await self._claim(name, epoch, seq, wanted)
            if made.claim is not None or not made.expired:
                return made.claim

    @write
    def _claim(self, name: str, epoch: int, seq: int, wanted: StreamRequest) -> Steps[MadeClaim]:
        return make_claim(self.d, self._hints, name, epoch, seq, wanted, now=self.now)

    @write
    def hand_out(self, name: str, epoch: int, seq: int, checkpoint: str) -> Steps[None]:
        stream = yield from fence(self.d, name, epoch)
        yield Query(self.d.sql(_HAND_OUT), {"stream": stream.id, "seq": seq, "checkpoint": checkpoint})

    @read
    def recorded(self, name: str, epoch: int, seq: int) -> Steps[StreamClaim | None]:
        stream = yield from fence(self.d, name, epoch, lock=False)
        return (yield from claim_of(self.d, stream, seq))

    async def waiting(self, queues: Sequence[str], limit: int = 100_000) -> Waiting:
        names = queue_names(queues)
        integer(limit, "limit")
        return await self._waiting(names, limit)

    @read
    def _waiting(self, queues: Sequence[str], limit: int) -> Steps[Waiting]:
        return count_waiting(self.d, self._hints, queues, limit, self.now)

    # --- outcomes -----------------------------------------------------------------------------------

    async def record(self, name: str, outcomes: Sequence[RecordedOutcome]) -> list[UUID]:
        for outcome in outcomes:
            check_id(outcome.id)
            if outcome.outcome not in get_args(Settlement):
                raise InvalidOption(f"an outcome is ack, nack or reject, not {outcome.outcome!r}")
        unknown: set[UUID] = set()
        for start in range(0, len(outcomes), _MOST_OUTCOMES):
            unknown |= await self.record_some(name, outcomes[start : start + _MOST_OUTCOMES])
        return [id_ for id_ in dict.fromkeys(o.id for o in outcomes) if id_ in unknown]

    @write
    def record_some(self, name: str, outcomes: Sequence[RecordedOutcome]) -> Steps[set[UUID]]:
        """Record outcomes beside the last open claim; returns the ids that are not in it."""
        d = self.d
        rows = yield Query(d.sql(_OPEN_CLAIM), {"name": name})
        if not rows:
            raise UnknownStream(f"there is no stream {name!r} in this database; check the name and the url")
        stream, seq = rows[0]
        last = {o.id: o for o in outcomes}
        if seq is None:
            return set(last)
        key = {"stream": stream, "seq": seq}
        found = {d.id_out(row[0]) for row in (yield Query(d.sql(_HAS), {**key, "ids": [d.id_in(i) for i in last]}))}
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
            yield from d.many(RECORD_OUTCOMES, key, ("id", "outcome", "delay", "reason"), values)
        return last.keys() - found

    @write
    def ack(
        self, name: str, epoch: int, seq: int, *, unsettled: Settlement = "ack", messages: int | None = None
    ) -> Steps[None]:
        d = self.d
        stream = yield from fence(d, name, epoch)
        if seq < stream.acked:
            raise stream_behind(name, seq, stream.acked)
        if seq == stream.acked:
            return
        held: Rows = yield Query(d.sql(RECORDS), {"stream": stream.id})
        counts = {int(row[0]): int(row[1]) for row in held}
        if messages is not None and counts.get(seq, 0) != messages:
            raise claim_lost(name, seq, messages, counts.get(seq, 0))
        for number in counts:
            if number <= seq:
                yield from _settle(d, {"stream": stream.id, "seq": number}, unsettled, self.now)
        yield Query(d.sql(_ACKED), {"stream": stream.id, "seq": seq})

    # --- operators' verbs ---------------------------------------------------------------------------

    async def release(self, name: str) -> int:
        count = await self.release_all(name)
        self._hints.drop_floors()
        return count

    @write
    def release_all(self, name: str) -> Steps[int]:
        d = self.d
        stream = yield from find_stream(d, name, lock=True)
        if stream is None:
            known = [row[0] for row in (yield Query(d.sql(_STATUS), {"now": None}))]
            there = f"there are {', '.join(dict.fromkeys(map(repr, known)))}" if known else "there is none"
            raise UnknownStream(f"there is no stream {name!r} in this database; {there}")
        yield Query(d.sql(_RELEASED), {"stream": stream.id})
        total = 0
        for seq, messages, *_ in (yield Query(d.sql(RECORDS), {"stream": stream.id})):
            key = {"stream": stream.id, "seq": seq}
            yield Query(d.sql(GIVE_BACK), key)
            yield from _drop(d, key)
            total += int(messages)
        return total

    @read
    def status(self) -> Steps[list[StreamStatus]]:
        rows = yield Query(self.d.sql(_STATUS), {"now": self.now})
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
                shard=claims[0][8],
                open_claims=tuple((int(row[4]), row[9]) for row in claims if row[4] is not None),
            )
            for name, claims in by_name.items()
        ]


def _settle(d: Dialect, key: dict[str, Any], unsettled: Settlement, now: int | None) -> Steps[None]:
    (counts,) = yield Query(d.sql(_OUTCOMES), key)
    names: tuple[Settlement, ...] = ("ack", "nack", "reject", unsettled)
    present = {name for name, count in zip(names, counts, strict=True) if count}
    chosen = {**key, "unsettled": unsettled, "now": now}
    if "ack" in present:
        done = {"outcome": "ack", "state": State.COMPLETED.value, "reason": None}
        yield from d.writes.settle_stream({**chosen, **done})
    if "reject" in present:
        failed = {"outcome": "reject", "state": State.FAILED.value, "reason": _NO_OUTCOME}
        yield from d.writes.settle_stream({**chosen, **failed})
    if "nack" in present:
        yield Query(d.sql(RETRY), {**chosen, "outcome": "nack"})
    yield from _drop(d, key)


def _drop(d: Dialect, key: dict[str, Any]) -> Steps[None]:
    yield Query(d.sql(_DROP_MESSAGES), key)
    yield Query(d.sql(_DROP_CLAIM), key)
