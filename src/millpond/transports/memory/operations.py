"""A handle on a pond, and what an operator may ask through it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn
from uuid import UUID

import msgspec

from millpond.clock import Seconds, micros, moment
from millpond.errors import Closed, InvalidMessage, InvalidOption, InvalidTime, not_supported
from millpond.message import (
    LIVE,
    SETTLED,
    Draft,
    Message,
    Published,
    Receipt,
    State,
    check_name,
    check_priority,
    decode_headers,
    replayed_id,
    short_error,
)
from millpond.outcome import Outcome
from millpond.transport import Capability, QueueStats, Row
from millpond.transports.arguments import (
    archive_position,
    check_settled,
    live_position,
    page_size,
    queue_names,
    states_among,
    unique_ids,
    whole_number,
)
from millpond.transports.memory.pond import Pond, Record
from millpond.transports.url import Url

MOST_ATTEMPTS = 1_000_000


class Operations:
    """The operator's verbs."""

    def __init__(self, pond: Pond, url: Url) -> None:
        self.url = url
        self._open: Pond | None = pond

    @property
    def _pond(self) -> Pond:
        if self._open is None:
            raise Closed(f"the transport at {self.url} was closed; connect again")
        return self._open

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

    async def record(self, rows: Sequence[Row]) -> int:
        check_settled(rows)
        return sum(self._pond.record(row) for row in rows)

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
        no_transactions("publish_sync(within=…)")

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        no_transactions("settle_sync(within=…)")

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        no_transactions("once(within=…)")

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool:
        no_transactions("once_sync(within=…)")

    async def join(self, name: str | None = None) -> NoReturn:
        raise not_supported("join", Capability.PRESENCE)

    def _waiting(self, ids: Sequence[UUID]) -> list[Record]:
        live = self._pond.live
        return [live[id_] for id_ in ids if id_ in live and live[id_].waiting]


def no_transactions(what: str) -> NoReturn:
    raise not_supported(what, Capability.TRANSACTIONS)


def _matches(record: Record, queue: str | None, key: str | None, states: Sequence[State]) -> bool:
    return queue in (None, record.queue) and key in (None, record.key) and record.state in states


def _row(record: Record) -> Row:
    fields = {name: getattr(record, name) for name in Row.__struct_fields__}
    return Row(**{**fields, "headers": decode_headers(record.headers)})
