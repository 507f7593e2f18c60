"""What is in a pond, and what happens to it: the meaning of the seam, written as plainly as possible.

A dict of records, and per queue the order in which they are to be claimed. Stores are compared with this.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

import msgspec

from millpond.clock import Clock, Seconds, SystemClock, micros
from millpond.errors import InvalidOption
from millpond.message import (
    BODY_LIMIT,
    SETTLED,
    Claim,
    Draft,
    Message,
    Published,
    Receipt,
    State,
    decode_headers,
    encode_headers,
    short_error,
)
from millpond.outcome import SUSPECT, Change
from millpond.transport import Row


class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `connect` takes beside the URL."""

    body_limit: int = BODY_LIMIT
    dedupe_for: Seconds = 7 * 86_400
    """How long an id given by a caller is remembered after publishing."""
    clock: Clock = SystemClock()


class Record(msgspec.Struct, kw_only=True):
    """A message and all that happened to it: a `Row` that can change, and its receipt's token."""

    id: UUID
    queue: str
    key: str | None
    priority: int
    headers: str | None
    payload: bytes
    due_us: int
    created_us: int
    expires_us: int | None
    state: State = State.PENDING
    deliveries: int = 0
    attempts: int = 0
    first_attempt_us: int | None = None
    last_attempt_us: int | None = None
    acquired_us: int | None = None
    lease_us: int | None = None
    archived_us: int | None = None
    reason: str | None = None
    error: str | None = None
    token: int | None = None
    """Stays after nack and give-back, so that the same settle, repeated, recognises its own work."""

    @property
    def suspect(self) -> bool:
        """Two or more deliveries came to no result, so that the message is claimed alone."""
        return self.deliveries - self.attempts >= SUSPECT

    @property
    def waiting(self) -> bool:
        return self.state is not State.PROCESSING and self.archived_us is None


class Line:
    """The waiting messages of one queue, or its suspects, in their order.

    An entry says how a record stood when it was added; one that no longer holds is dropped when it is met.
    """

    def __init__(self, live: Mapping[UUID, Record], *, suspects: bool) -> None:
        self._live = live
        self._suspects = suspects
        self._future: list[tuple[int, UUID]] = []
        self._due: list[tuple[int, int, UUID]] = []

    def add(self, record: Record) -> None:
        heapq.heappush(self._future, (record.due_us, record.id))

    def take(self, limit: int, now: int) -> Iterator[Record]:
        """Up to `limit` records that are due; whoever takes one makes it PROCESSING at once."""
        self._fall_due(now)
        while self._due and limit > 0:
            priority, due, id_ = heapq.heappop(self._due)
            record = self._holding(due, id_)
            if record and record.priority == priority:
                limit -= 1
                yield record

    def next_due(self, now: int) -> int | None:
        """When the next message falls due; those that are due already are the claim's business."""
        self._fall_due(now)
        while self._future and not self._holding(*self._future[0]):
            heapq.heappop(self._future)
        return self._future[0][0] if self._future else None

    def _fall_due(self, now: int) -> None:
        while self._future and self._future[0][0] <= now:
            due, id_ = heapq.heappop(self._future)
            if record := self._holding(due, id_):
                heapq.heappush(self._due, (record.priority, due, id_))

    def _holding(self, due: int, id_: UUID) -> Record | None:
        record = self._live.get(id_)
        holds = record and record.waiting and record.due_us == due and record.suspect == self._suspects
        return record if holds else None


class Setting(msgspec.Struct):
    """What an operator decided about a queue."""

    paused: bool
    keep: dict[State, int | None]


class Pond:
    """What everybody connected to one `memory://name` shares."""

    def __init__(self, options: MemoryOptions) -> None:
        self.options = options
        self.live: dict[UUID, Record] = {}
        self.archive: dict[UUID, list[Record]] = {}
        """By id: a name may be used again when the dedupe window has passed."""
        self.held: dict[UUID, Record] = {}
        """Those of `live` that are PROCESSING."""
        self.given_ids: dict[UUID, int] = {}
        """Until when each is remembered, in that order."""
        self.lines: dict[tuple[str, bool], Line] = {}
        self.settings: dict[str, Setting] = {}
        self.changes: dict[str, int] = {}
        """How often something may have become claimable in a queue."""
        self.waiting: set[asyncio.Event] = set()

    def now(self) -> int:
        now = self.options.clock.now()
        if now is None:
            raise InvalidOption("memory:// has no database whose clock could decide; give a SystemClock or ManualClock")
        return now

    def setting(self, queue: str, *, change: bool = False) -> Setting:
        setting = self.settings.get(queue) or Setting(False, dict.fromkeys(SETTLED))
        if change:
            self.settings[queue] = setting
        return setting

    def line(self, queue: str, *, suspects: bool) -> Line:
        line = self.lines.get((queue, suspects))
        if line is None:
            line = self.lines[queue, suspects] = Line(self.live, suspects=suspects)
        return line

    def enqueue(self, record: Record) -> None:
        self.line(record.queue, suspects=record.suspect).add(record)
        self.changed(record.queue)

    def changed(self, queue: str) -> None:
        self.changes[queue] = self.changes.get(queue, 0) + 1
        for event in self.waiting:
            event.set()

    def archived(self) -> Iterator[Record]:
        return (record for records in self.archive.values() for record in records)

    def owned(self, receipt: Receipt) -> Record | None:
        """The record that this receipt still owns."""
        record = self.held.get(receipt.id)
        return record if record and record.token == receipt.token else None

    def publish(self, drafts: Sequence[Draft]) -> list[Published]:
        now = self.now()
        window = micros(self.options.dedupe_for, "dedupe_for")
        while self.given_ids and (oldest := next(iter(self.given_ids.items())))[1] <= now:
            del self.given_ids[oldest[0]]
        published = []
        for d in drafts:
            known = d.given and (
                d.id in self.given_ids
                or d.id in self.live
                or any(r.archived_us is not None and r.archived_us > now - window for r in self.archive.get(d.id, ()))
            )
            if d.given:
                self.given_ids.setdefault(d.id, now + window)
            if not known:
                self.live[d.id] = Record(
                    id=d.id,
                    queue=d.queue,
                    key=d.key,
                    priority=d.priority,
                    headers=d.headers,
                    payload=d.payload,
                    due_us=now + d.delay_us if d.due_us is None else d.due_us,
                    created_us=now,
                    expires_us=d.expires_us if d.expires_after_us is None else now + d.expires_after_us,
                )
                self.enqueue(self.live[d.id])
            published.append(Published(d.id, not known))
        return published

    def deliver(self, record: Record, token: int, lease: int, now: int) -> Claim:
        record.state, record.token, record.acquired_us, record.lease_us = State.PROCESSING, token, now, now + lease
        record.deliveries += 1
        self.held[record.id] = record
        return Claim(
            Message(
                queue=record.queue,
                payload=record.payload,
                id=record.id,
                key=record.key,
                priority=record.priority,
                headers=decode_headers(record.headers),
            ),
            Receipt(record.id, token),
            record.deliveries,
            record.attempts,
            record.created_us,
            record.due_us,
            now,
            now + lease,
            record.first_attempt_us,
            record.expires_us,
        )

    def settle(self, receipt: Receipt, c: Change) -> bool:
        """Write one outcome; False if the receipt is stale."""
        record = self.owned(receipt)
        if record is None:
            return self._settled_before(receipt, c.state)
        now = self.now()
        del self.held[record.id]
        if c.attempts:
            record.first_attempt_us = record.acquired_us if record.first_attempt_us is None else record.first_attempt_us
            record.last_attempt_us = now
        record.attempts += c.attempts
        record.deliveries += c.deliveries
        record.lease_us = None
        record.error = record.error if c.error is None else c.error
        if c.state in SETTLED:
            self.retire(record, c.state, c.reason, keep=c.keep)
        else:
            record.state = c.state
            record.due_us = record.due_us if c.delay_us is None else now + c.delay_us
            self.enqueue(record)
        return True

    def _settled_before(self, receipt: Receipt, state: State) -> bool:
        live = [self.live[receipt.id]] if receipt.id in self.live else []
        return any(
            record.token == receipt.token and record.state is state
            for record in [*live, *self.archive.get(receipt.id, ())]
        )

    def retire(self, record: Record, state: State, reason: str | None, *, keep: bool = True) -> None:
        """Out of the queue, and into the archive if it is to be kept."""
        del self.live[record.id]
        record.state, record.reason, record.archived_us = state, reason, self.now()
        if keep:
            self.archive.setdefault(record.id, []).append(record)

    def record(self, row: Row) -> bool:
        """Keep what another transport has settled; False if it is here already."""
        now, kept = self.now(), self.archive.setdefault(row.id, [])
        since = now - micros(self.options.dedupe_for, "dedupe_for")
        if any(r.state is row.state and r.token is None and (r.archived_us or 0) > since for r in kept):
            return False
        fields = {name: getattr(row, name) for name in Row.__struct_fields__}
        texts = {"reason": short_error(row.reason), "error": short_error(row.error)}
        kept.append(Record(**{**fields, **texts, "headers": encode_headers(row.headers), "archived_us": now}))
        return True

    def reap(self) -> int:
        now = self.now()
        lapsed = [r for r in self.held.values() if r.lease_us is not None and r.lease_us <= now]
        for record in lapsed:
            del self.held[record.id]
            record.state, record.token, record.lease_us = State.PENDING, None, None
            self.enqueue(record)
        return len(lapsed)
