"""A transport in this process: for tests, for small programs, and as the model that stores are compared with.

Its meaning is that of the database store, written as plainly as possible: a dict of records, and per queue the
order in which they are to be claimed. It belongs to one event loop, and what it holds ends with the process.
`memory://` is private to its caller; everybody who connects to `memory://name` shares one.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec

from millpond.clock import SECOND, Clock, Seconds, SystemClock, micros, moment
from millpond.errors import Closed, InvalidMessage, InvalidOption, InvalidTime, not_supported
from millpond.message import (
    BODY_LIMIT,
    LIVE,
    SETTLED,
    Claim,
    Draft,
    Message,
    Published,
    Receipt,
    State,
    check_name,
    check_priority,
    decode_headers,
    draft,
    replayed_id,
    short_error,
)
from millpond.outcome import MAX_CRASHES, SUSPECT, Change, Outcome, change, refuse_to_run
from millpond.transport import DEFAULT_LEASE, Capability, QueueStats, Row
from millpond.transports.arguments import (
    archive_position,
    known_options,
    lease_to_claim,
    live_position,
    page_size,
    queue_names,
    states_among,
    unique_ids,
    whole_number,
)
from millpond.transports.url import Url

CAPABILITIES = (
    Capability.CLAIM_BY_ID
    | Capability.PRIORITY
    | Capability.DEDUPE
    | Capability.EXTEND
    | Capability.BROWSE
    | Capability.RESCHEDULE
    | Capability.ARCHIVE
    | Capability.PAUSE
)


MOST_ATTEMPTS = 1_000_000


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

    def reap(self) -> int:
        now = self.now()
        lapsed = [r for r in self.held.values() if r.lease_us is not None and r.lease_us <= now]
        for record in lapsed:
            del self.held[record.id]
            record.state, record.token, record.lease_us = State.PENDING, None, None
            self.enqueue(record)
        return len(lapsed)


class MemoryTransport:
    """One caller's handle on a pond."""

    capabilities = CAPABILITIES

    def __init__(self, pond: Pond, url: Url) -> None:
        self.url = url
        self._open: Pond | None = pond
        self._turn = 0
        self._suspects_turn: dict[str, bool] = {}
        self._seen: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<MemoryTransport {self.url}>"

    @property
    def _pond(self) -> Pond:
        if self._open is None:
            raise Closed(f"the transport at {self.url} was closed; connect again")
        return self._open

    async def close(self) -> None:
        if self._open is not None:
            pond, self._open = self._open, None
            for event in pond.waiting:  # a hint too many for others, the end of waiting for us
                event.set()

    # --- the six verbs ------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        pond = self._pond
        if within is not None:
            _no_transactions("publish(within=…)")
        return pond.publish([draft(message, body_limit=pond.options.body_limit) for message in messages])

    async def claim(
        self,
        queues: Sequence[str],
        limit: int = 1,
        lease: Seconds = DEFAULT_LEASE,
        *,
        ids: Sequence[UUID] | None = None,
        max_crashes: int | None = MAX_CRASHES,
        max_deliveries: int | None = None,
        suspects: bool = True,
    ) -> list[Claim]:
        pond = self._pond
        names = queue_names(queues)
        whole_number(limit, "limit")
        lease_us = lease_to_claim(lease)
        wanted = None if ids is None else unique_ids(ids)
        if limit == 0 or not names or wanted == []:
            return []
        self._seen.update({name: pond.changes.get(name, 0) for name in names})
        while True:
            claims = self._take(names, limit, lease_us, wanted, suspects)
            if len(claims) < limit and pond.reap():
                claims += self._take(names, limit - len(claims), lease_us, wanted, suspects and not claims)
            runnable, refused = [], []
            for claim in claims:
                reject = refuse_to_run(claim, max_crashes=max_crashes, max_deliveries=max_deliveries)
                runnable.append(claim) if reject is None else refused.append(reject)
            await self.settle(refused)
            if runnable or not refused:
                return runnable

    def _take(
        self, names: Sequence[str], limit: int, lease: int, ids: Sequence[UUID] | None, suspects: bool
    ) -> list[Claim]:
        pond, now, token = self._pond, self._pond.now(), secrets.randbits(62)
        if ids is not None:
            open_names = {name for name in names if not pond.setting(name).paused}
            due = [r for r in self._waiting(ids) if r.queue in open_names and r.due_us <= now]
            due.sort(key=lambda r: (r.suspect, r.priority, r.due_us, r.id))
            return [pond.deliver(record, token, lease, now) for record in due[:limit]]
        # Each queue in turn goes first and has its share; what one leaves goes to the next.
        self._turn += 1
        turn = self._turn % len(names)
        hungry = [*names[turn:], *names[:turn]]
        claims: list[Claim] = []
        while hungry and len(claims) < limit:
            still_hungry = []
            for n, queue in enumerate(hungry):
                share = -(-(limit - len(claims)) // (len(hungry) - n))
                if pond.setting(queue).paused:
                    continue
                alone = suspects and not claims
                got = self._suspect(queue, token, lease, now) if alone and self._suspects_turn.get(queue, True) else []
                if not got:
                    records = pond.line(queue, suspects=False).take(share, now)
                    got = [pond.deliver(record, token, lease, now) for record in records]
                    if got:
                        self._suspects_turn[queue] = True
                    elif alone:
                        got = self._suspect(queue, token, lease, now)
                if got and got[0].unfinished >= SUSPECT:
                    return got
                claims += got
                if share and len(got) == share:
                    still_hungry.append(queue)
            hungry = still_hungry
        return claims

    def _suspect(self, queue: str, token: int, lease: int, now: int) -> list[Claim]:
        """One suspect, if there is one; then it is the others' turn to go first, so that neither starves."""
        records = list(self._pond.line(queue, suspects=True).take(1, now))
        if records:
            self._suspects_turn[queue] = False
        return [self._pond.deliver(record, token, lease, now) for record in records]

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        pond = self._pond
        lease_us = micros(lease, "lease")
        refused = []
        for receipt in dict.fromkeys(receipts):
            record = pond.owned(receipt)
            if record is None:
                refused.append(receipt)
            else:
                record.lease_us = pond.now() + lease_us
        return refused

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any = None) -> list[Receipt]:
        pond = self._pond
        if within is not None:
            _no_transactions("settle(within=…)")
        changes: dict[Receipt, Change] = {}
        for outcome in outcomes:  # all are read before the first is written; of two with one receipt the first counts
            changes.setdefault(outcome.receipt, change(outcome))
        return [receipt for receipt, c in changes.items() if not pond.settle(receipt, c)]

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        pond, names = self._pond, queue_names(queues)
        seconds = micros(timeout, "timeout") / SECOND
        if any(pond.changes.get(name, 0) != self._seen.get(name, 0) for name in names):
            return
        now = pond.now()
        for name in names:
            for suspects in (False, True):
                due = pond.line(name, suspects=suspects).next_due(now)
                if due is not None:
                    seconds = min(seconds, (due - now) / SECOND)
        event = asyncio.Event()
        pond.waiting.add(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return
        finally:
            pond.waiting.discard(event)

    # --- the operator's verbs -----------------------------------------------------------------------

    async def count(self, queues: Sequence[str] | None = None, *, exact: bool = False) -> list[QueueStats]:
        pond, now = self._pond, self._pond.now()
        known = {*pond.settings, *(r.queue for r in pond.live.values()), *(r.queue for r in pond.archived())}
        names = sorted(known) if queues is None else queue_names(queues)
        counts = {name: dict.fromkeys(State, 0) for name in names}
        oldest: dict[str, int] = {}
        for record in [*pond.live.values(), *pond.archived()]:
            if record.queue in counts:
                counts[record.queue][record.state] += 1
                if record.waiting and record.due_us <= now:
                    oldest[record.queue] = min(record.due_us, oldest.get(record.queue, now))
        return [
            QueueStats(
                queue=name,
                counts=counts[name],
                paused=pond.setting(name).paused,
                oldest_due_us=oldest.get(name),
                keep_completed_us=pond.setting(name).keep[State.COMPLETED],
                keep_failed_us=pond.setting(name).keep[State.FAILED],
            )
            for name in names
        ]

    async def browse(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        chosen = states_among(states, LIVE, "browse")
        last = None if after is None else live_position(after)
        rows = sorted(
            (_row(r) for r in self._pond.live.values() if _matches(r, queue, key, chosen)), key=lambda r: r.position
        )
        return [row for row in rows if last is None or row.position > last][: page_size(limit)]

    async def archived(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        chosen = states_among(states, SETTLED, "archived")
        low = -math.inf if since is None else moment(since, "since")
        high = math.inf if until is None else moment(until, "until")
        last = None if after is None else archive_position(after)
        rows = [_row(r) for r in self._pond.archived() if _matches(r, queue, key, chosen)]
        page = [
            row
            for row in sorted(rows, key=lambda r: r.position, reverse=True)
            if low <= row.position[0] < high and (last is None or row.position < last)
        ]
        return page[: page_size(limit)]

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        pond, wanted = self._pond, unique_ids(ids)
        live = [pond.live[id_] for id_ in wanted if id_ in pond.live]
        return [_row(r) for r in [*live, *(r for id_ in wanted for r in reversed(pond.archive.get(id_, ())))]]

    async def reschedule(
        self,
        ids: Sequence[UUID],
        *,
        priority: int | None = None,
        due_at: datetime | None = None,
        delay: Seconds | None = None,
        attempts: int | None = None,
    ) -> list[UUID]:
        pond = self._pond
        if priority is None and due_at is None and delay is None and attempts is None:
            raise InvalidOption("reschedule changes nothing: give priority, due_at, delay or attempts")
        if due_at is not None and delay is not None:
            raise InvalidTime("give either delay or due_at, not both")
        due = None if due_at is None else moment(due_at, "due_at")
        if delay is not None:
            due = pond.now() + micros(delay, "delay")
        if priority is not None:
            check_priority(priority)
        if attempts is not None:
            whole_number(attempts, "attempts", MOST_ATTEMPTS)
        changed = self._waiting(unique_ids(ids))
        for record in changed:
            record.priority = record.priority if priority is None else priority
            record.due_us = record.due_us if due is None else due
            if attempts is not None:
                record.attempts = record.deliveries = attempts
                record.first_attempt_us = record.first_attempt_us if attempts else None
            pond.enqueue(record)
        return [record.id for record in changed]

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        cancelled = self._waiting(unique_ids(ids))
        if not isinstance(reason, str):
            raise InvalidOption(f"reason must be text, not {type(reason).__name__}")
        for record in cancelled:
            record.token = None
            self._pond.retire(record, State.FAILED, short_error(reason))
        return [record.id for record in cancelled]

    async def pause(self, queue: str) -> None:
        self._pond.setting(check_name(queue, "queue"), change=True).paused = True

    async def resume(self, queue: str) -> None:
        self._pond.setting(check_name(queue, "queue"), change=True).paused = False
        self._pond.changed(queue)

    async def retain(self, queue: str, *, completed: Seconds | None, failed: Seconds | None) -> None:
        pond, name = self._pond, check_name(queue, "queue")
        keep = {
            State.COMPLETED: None if completed is None else micros(completed, "completed"),
            State.FAILED: None if failed is None else micros(failed, "failed"),
        }
        pond.setting(name, change=True).keep = keep

    async def purge(
        self,
        queue: str | None = None,
        *,
        older_than: Seconds | None = None,
        states: Sequence[State] | None = None,
    ) -> int:
        pond, now = self._pond, self._pond.now()
        chosen = states_among(states, SETTLED, "purge")
        age = None if older_than is None else micros(older_than, "older_than")
        gone = []
        for record in pond.archived():
            keep = pond.setting(record.queue).keep[record.state] if age is None else age
            if _matches(record, queue, None, chosen) and keep is not None and (record.archived_us or 0) <= now - keep:
                gone.append(record)
        for record in gone:
            pond.archive[record.id].remove(record)
        return len(gone)

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        pond, label = self._pond, check_name(name, "name")
        target = None if queue is None else check_name(queue, "queue")
        unique = unique_ids(ids)
        missing = [str(id_) for id_ in unique if not pond.archive.get(id_)]
        if missing:
            raise InvalidMessage(f"not in the archive, so that nothing was replayed: {', '.join(missing[:10])}")
        again = []
        for record in (pond.archive[id_][-1] for id_ in unique):
            headers = {**decode_headers(record.headers), "replay-of": str(record.id)}
            again.append(
                Draft(
                    id=replayed_id(record.id, label),
                    given=True,
                    queue=target or record.queue,
                    key=record.key,
                    priority=record.priority,
                    delay_us=0,
                    due_us=None,
                    expires_after_us=None,
                    expires_us=None,
                    headers=msgspec.json.encode(headers).decode(),
                    payload=record.payload,
                )
            )
        return pond.publish(again)

    async def reap(self) -> int:
        return self._pond.reap()

    # --- what only a database can do ----------------------------------------------------------------

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        _no_transactions("publish_sync(within=…)")

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        _no_transactions("settle_sync(within=…)")

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        _no_transactions("once(within=…)")

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool:
        _no_transactions("once_sync(within=…)")

    async def join(self, name: str | None = None) -> NoReturn:
        raise not_supported("join", Capability.PRESENCE)

    # --- inside -------------------------------------------------------------------------------------

    def _waiting(self, ids: Sequence[UUID]) -> list[Record]:
        live = self._pond.live
        return [live[id_] for id_ in ids if id_ in live and live[id_].waiting]


def _no_transactions(what: str) -> NoReturn:
    raise not_supported(what, Capability.TRANSACTIONS)


def _matches(record: Record, queue: str | None, key: str | None, states: Sequence[State]) -> bool:
    return queue in (None, record.queue) and key in (None, record.key) and record.state in states


def _row(record: Record) -> Row:
    fields = {name: getattr(record, name) for name in Row.__struct_fields__}
    return Row(**{**fields, "headers": decode_headers(record.headers)})


_named: WeakValueDictionary[str, Pond] = WeakValueDictionary()
"""Ponds by name; one ends when its last handle is closed."""


async def connect(url: Url, **given: Any) -> MemoryTransport:
    """A private pond (`memory://`), or the one that all callers of this process share by name."""
    options = _parse(given)
    name = f"{url.host or ''}{url.path}".strip("/")
    pond = _named.get(name) if name else None
    if pond is None:
        pond = Pond(options)
        pond.now()  # says at once if the clock cannot tell the time
        if name:
            _named[name] = pond
    elif given and options != pond.options:
        raise InvalidOption(f"memory://{name} is open with other options; give the same, or none")
    return MemoryTransport(pond, url)


def _parse(given: dict[str, Any]) -> MemoryOptions:
    known_options(given, MemoryOptions.__struct_fields__)
    options = MemoryOptions(**given)
    limit = options.body_limit
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidOption(f"body_limit must be a whole number from 1, not {limit!r}")
    micros(options.dedupe_for, "dedupe_for")
    return options
