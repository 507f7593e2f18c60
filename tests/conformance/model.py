"""The meaning of a transport in plain dictionaries: the oracle that `test_model.py` compares transports with.

The model is written for reading, not for speed: a claim sorts all messages. It has one handle and no `wait`, and
checks only those arguments that random examples can get wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import SECOND, Clock, Seconds, micros
from millpond.errors import InvalidMessage, InvalidOption
from millpond.message import (
    LIVE,
    SETTLED,
    SUSPECT,
    Claim,
    Draft,
    Message,
    Published,
    Receipt,
    State,
    decode_headers,
    draft,
    replayed_headers,
    replayed_id,
)
from millpond.outcome import Change, Outcome, change, crash_delay, refuse_to_run
from millpond.seam.operations import QueueStats, Row


class Record(msgspec.Struct, kw_only=True):
    """A message with its history: a `Row` that can change, and the token of its receipt."""

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
    crashes: int = 0
    first_attempt_us: int | None = None
    last_attempt_us: int | None = None
    acquired_us: int | None = None
    lease_us: int | None = None
    archived_us: int | None = None
    reason: str | None = None
    error: str | None = None
    history: None = None
    """Failed attempts: pages have none, and the model keeps none."""
    retried: bool = False
    token: int | None = None
    """Stays after nack and give-back: the same settle, repeated, must recognise its own work."""

    @property
    def suspect(self) -> bool:
        return self.crashes >= SUSPECT

    @property
    def waiting(self) -> bool:
        return self.state is not State.PROCESSING and self.archived_us is None

    @property
    def row(self) -> Row:
        fields = {name: getattr(self, name) for name in Row.__struct_fields__}
        return Row(**{**fields, "headers": decode_headers(self.headers)})


class Model:
    """The verbs of a transport; the rooms `operations` and `workers` are the model itself."""

    def __init__(self, clock: Clock, dedupe_for: Seconds) -> None:
        self.live: dict[UUID, Record] = {}
        self.archive: list[Record] = []
        """In the order of archiving. An id may appear twice: it can be published again after the dedupe window."""
        self.operations = self.workers = self
        self._clock = clock
        self._window = micros(dedupe_for, "dedupe_for")
        self._given_until: dict[UUID, int] = {}
        """Ids given by callers -> the time until which they are remembered."""
        self._paused: dict[str, bool] = {}
        self._keep: dict[str, dict[State, int | None]] = {}
        self._tokens = itertools.count(1)
        self._claims = 0
        self._suspect_next: dict[str, bool] = {}
        """Suspects and other messages of a queue take turns, so neither starves."""

    @property
    def now(self) -> int:
        now = self._clock.now()
        assert now is not None
        return now

    # --- the verbs ----------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Message]) -> list[Published]:
        return self.publish_drafts([draft(message) for message in messages])

    def publish_drafts(self, drafts: Sequence[Draft]) -> list[Published]:
        return [Published(d.id, self._publish(d)) for d in drafts]

    def _publish(self, d: Draft) -> bool:
        now = self.now
        if d.given:
            known = d.id in self.live or self._given_until.get(d.id, now) > now
            known = known or any(r.id == d.id and (r.archived_us or 0) > now - self._window for r in self.archive)
            if self._given_until.get(d.id, now) <= now:
                self._given_until[d.id] = now + self._window
            if known:
                return False
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
        return True

    async def claim(
        self,
        queues: Sequence[str],
        limit: int,
        lease: Seconds,
        *,
        ids: Sequence[UUID] | None = None,
        max_deliveries: int | None = None,
        suspects: bool = True,
        others: bool = True,
    ) -> list[Claim]:
        names, lease_us = list(dict.fromkeys(queues)), micros(lease, "lease")
        while True:
            claims = self._take(names, limit, lease_us, ids, suspects, others)
            if len(claims) < limit and await self.reap():
                claims += self._take(names, limit - len(claims), lease_us, ids, suspects and not claims, others)
            runnable, refused = [], []
            for claim in claims:
                reject = refuse_to_run(claim, max_deliveries=max_deliveries)
                runnable.append(claim) if reject is None else refused.append(reject)
            await self.settle(refused)
            if runnable or not refused:
                return runnable

    def _take(
        self, names: Sequence[str], limit: int, lease: int, ids: Sequence[UUID] | None, suspects: bool, others: bool
    ) -> list[Claim]:
        token = next(self._tokens)
        if ids is not None:
            chosen = [r for r in self._due(*names) if r.id in ids][:limit]
            return [self._deliver(record, token, lease) for record in chosen]
        # Each queue is first in turn and has its share; a share that a queue does not use goes to the next one.
        self._claims += 1
        turn = self._claims % len(names)
        hungry = [*names[turn:], *names[:turn]]
        claims: list[Claim] = []
        while hungry and len(claims) < limit:
            still_hungry = []
            for n, queue in enumerate(hungry):
                share = -(-(limit - len(claims)) // (len(hungry) - n))
                records = self._from_queue(queue, share, suspects and not claims, others)
                got = [self._deliver(record, token, lease) for record in records]
                if got and got[0].suspect:
                    return got
                claims += got
                if share and len(got) == share:
                    still_hungry.append(queue)
            hungry = still_hungry
        return claims

    def _from_queue(self, queue: str, share: int, suspects: bool, others_too: bool) -> list[Record]:
        """One suspect alone, or up to `share` other messages."""
        due = self._due(queue)
        alone = [r for r in due if r.suspect][:1] if suspects else []
        if not others_too:
            return alone
        others = [r for r in due if not r.suspect][:share]
        if alone and (self._suspect_next.get(queue, True) or not others):
            self._suspect_next[queue] = False
            return alone
        if others:
            self._suspect_next[queue] = True
        return others

    def _due(self, *names: str) -> list[Record]:
        open_ = [name for name in names if not self._paused.get(name)]
        due = [r for r in self.live.values() if r.queue in open_ and r.waiting and r.due_us <= self.now]
        return sorted(due, key=lambda r: (r.suspect, r.priority, r.due_us, r.id))

    def _deliver(self, record: Record, token: int, lease: int) -> Claim:
        now = self.now
        record.state, record.token, record.acquired_us, record.lease_us = State.PROCESSING, token, now, now + lease
        record.deliveries += 1
        return Claim(
            message=Message(
                queue=record.queue,
                payload=record.payload,
                id=record.id,
                key=record.key,
                priority=record.priority,
                headers=decode_headers(record.headers),
            ),
            receipt=Receipt(record.id, token),
            deliveries=record.deliveries,
            attempts=record.attempts,
            created_us=record.created_us,
            due_us=record.due_us,
            claimed_us=now,
            lease_us=now + lease,
            first_attempt_us=record.first_attempt_us,
            expires_us=record.expires_us,
            crashes=record.crashes,
        )

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds) -> list[Receipt]:
        refused = []
        for receipt in dict.fromkeys(receipts):
            record = self._owned(receipt)
            if record is None:
                refused.append(receipt)
            else:
                record.lease_us = self.now + micros(lease, "lease")
        return refused

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Receipt]:
        changes: dict[Receipt, Change] = {}
        for outcome in outcomes:  # the first of two outcomes with one receipt counts
            changes.setdefault(outcome.receipt, change(outcome))
        return [receipt for receipt, c in changes.items() if not self._settle(receipt, c)]

    def _settle(self, receipt: Receipt, c: Change) -> bool:
        """Write one outcome; False if the receipt is stale."""
        record = self._owned(receipt)
        if record is None:
            return any(
                r.id == receipt.id and r.token == receipt.token and r.state is c.state
                for r in [*self.live.values(), *self.archive]
            )
        if c.attempts:
            record.first_attempt_us = record.acquired_us if record.first_attempt_us is None else record.first_attempt_us
            record.last_attempt_us = self.now
        record.attempts += c.attempts
        record.deliveries += c.deliveries
        record.crashes = 0 if c.attempts else record.crashes + c.crashes
        record.lease_us = None
        record.error = record.error if c.error is None else c.error
        if c.state in SETTLED:
            self._archive(record, c.state, c.reason, keep=c.keep)
        else:
            record.state = c.state
            record.due_us = record.due_us if c.delay_us is None else self.now + c.delay_us
        return True

    def _owned(self, receipt: Receipt) -> Record | None:
        """The record that this receipt still owns."""
        record = self.live.get(receipt.id)
        return record if record and not record.waiting and record.token == receipt.token else None

    def _archive(self, record: Record, state: State, reason: str | None, *, keep: bool = True) -> None:
        del self.live[record.id]
        record.crashes = 0
        record.state, record.reason, record.archived_us = state, reason, self.now
        if keep:
            self.archive.append(record)

    # --- workers ------------------------------------------------------------------------------------------

    async def reap(self) -> int:
        """Claims of the model have no worker: a lapse is no crash. From the second lapse on the message waits."""
        lapsed = [r for r in self.live.values() if r.lease_us is not None and r.lease_us <= self.now]
        for record in lapsed:
            without_result = record.deliveries - record.attempts
            if without_result > 1:
                record.due_us = self.now + crash_delay(without_result) * SECOND
            record.state, record.token, record.lease_us = State.PENDING, None, None
        return len(lapsed)

    # --- operations ---------------------------------------------------------------------------------------

    async def count(self) -> list[QueueStats]:
        records = [*self.live.values(), *self.archive]
        return [self._stats(q, records) for q in sorted({*self._paused, *self._keep, *(r.queue for r in records)})]

    def _stats(self, queue: str, records: Sequence[Record]) -> QueueStats:
        own = [r for r in records if r.queue == queue]
        keep = self._keep.get(queue, {})
        return QueueStats(
            queue=queue,
            counts={state: sum(r.state is state for r in own) for state in State},
            paused=self._paused.get(queue, False),
            oldest_due_us=min((r.due_us for r in own if r.waiting and r.due_us <= self.now), default=None),
            keep_completed_us=keep.get(State.COMPLETED),
            keep_failed_us=keep.get(State.FAILED),
        )

    async def browse(
        self, queue: str | None = None, *, limit: int = 100, after: Sequence[Any] | None = None
    ) -> list[Row]:
        rows = sorted((r.row for r in self._matching(self.live.values(), queue, LIVE)), key=lambda row: row.position)
        return [row for row in rows if after is None or row.position > after][:limit]

    async def archived(
        self, queue: str | None = None, *, limit: int = 100, after: Sequence[Any] | None = None
    ) -> list[Row]:
        rows = [r.row for r in self._matching(self.archive, queue, SETTLED)]
        rows.sort(key=lambda row: row.position, reverse=True)
        return [row for row in rows if after is None or row.position < after][:limit]

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        wanted = list(dict.fromkeys(ids))
        live = [self.live[id_].row for id_ in wanted if id_ in self.live]
        return [*live, *(r.row for id_ in wanted for r in reversed(self.archive) if r.id == id_)]

    async def reschedule(
        self,
        ids: Sequence[UUID],
        *,
        priority: int | None = None,
        delay: Seconds | None = None,
        attempts: int | None = None,
    ) -> list[UUID]:
        if priority is None and delay is None and attempts is None:
            raise InvalidOption("reschedule changes nothing")
        changed = self._waiting(ids)
        for record in changed:
            record.priority = record.priority if priority is None else priority
            record.due_us = record.due_us if delay is None else self.now + micros(delay, "delay")
            if attempts is not None:
                record.attempts = record.deliveries = attempts
                record.crashes = 0
                record.first_attempt_us = record.first_attempt_us if attempts else None
        return [record.id for record in changed]

    async def cancel(self, ids: Sequence[UUID]) -> list[UUID]:
        cancelled = self._waiting(ids)
        for record in cancelled:
            record.token = None
            self._archive(record, State.FAILED, "cancelled")
        return [record.id for record in cancelled]

    async def pause(self, queue: str) -> None:
        self._paused[queue] = True

    async def resume(self, queue: str) -> None:
        self._paused[queue] = False

    async def retain(self, queue: str, *, completed: Seconds | None, failed: Seconds | None) -> None:
        self._keep[queue] = {
            State.COMPLETED: None if completed is None else micros(completed, "completed"),
            State.FAILED: None if failed is None else micros(failed, "failed"),
        }

    async def purge(
        self, queue: str | None = None, *, older_than: Seconds | None = None, states: Sequence[State] | None = None
    ) -> int:
        purged = []
        for record in self._matching(self.archive, queue, states or SETTLED):
            retention = self._keep.get(record.queue, {}).get(record.state)
            age = retention if older_than is None else micros(older_than, "older_than")
            if age is not None and (record.archived_us or 0) <= self.now - age:
                purged.append(record)
        for record in purged:
            self.archive.remove(record)
        return len(purged)

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        latest = {r.id: r for r in self.archive}
        if missing := [id_ for id_ in ids if id_ not in latest]:
            raise InvalidMessage(f"not in the archive: {missing}")
        drafts = [
            Draft(
                id=replayed_id(record.id, name),
                given=True,
                queue=queue or record.queue,
                key=record.key,
                priority=record.priority,
                delay_us=0,
                due_us=None,
                expires_after_us=None,
                expires_us=None,
                headers=replayed_headers(record.headers, record.id),
                payload=record.payload,
            )
            for record in (latest[id_] for id_ in dict.fromkeys(ids))
        ]
        return self.publish_drafts(drafts)

    def _waiting(self, ids: Sequence[UUID]) -> list[Record]:
        return [self.live[id_] for id_ in dict.fromkeys(ids) if id_ in self.live and self.live[id_].waiting]

    def _matching(self, records: Iterable[Record], queue: str | None, states: Sequence[State]) -> Iterator[Record]:
        return (r for r in records if queue in (None, r.queue) and r.state in states)
