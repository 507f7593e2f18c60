"""What an operator may ask of a store: browse, count, reschedule, pause, purge, replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from millpond.clock import Seconds, micros, moment, monotonic
from millpond.errors import InvalidMessage, InvalidOption, InvalidTime
from millpond.message import (
    LIVE,
    SETTLED,
    Published,
    State,
    check_name,
    check_priority,
    check_text,
    replayed_id,
    short_error,
)
from millpond.transport import QueueStats, Row
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
from millpond.transports.database import archive, browse, partitions, record, reschedule
from millpond.transports.database.bulk import Bulk
from millpond.transports.database.engine import Mode
from millpond.transports.database.partitions import Cutoffs
from millpond.transports.database.reschedule import Changed
from millpond.transports.database.statement import Steps

T = TypeVar("T")

_MOST_ATTEMPTS = 1_000_000
_CHUNK = 1000
"""Ids to a statement."""
_LONGEST_REST = 0.2


class Operations(Bulk):
    """The operator's verbs."""

    def _due_again(self, queues: Iterable[str]) -> None:
        """Messages of these queues may be due that claims and waits do not expect."""
        raise NotImplementedError

    # --- look ---------------------------------------------------------------------------------------

    async def count(self, queues: Sequence[str] | None = None, *, exact: bool = False) -> list[QueueStats]:
        self._check_open()
        names = None if queues is None else queue_names(queues)
        if names is not None and not names:
            return []
        return await self._run(lambda again: browse.count(self.dialect, names, exact=exact, now=self._now()), Mode.READ)

    async def browse(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        self._check_open()
        chosen = states_among(states, LIVE, "browse")
        name = None if queue is None else check_name(queue, "queue")
        position = None if after is None else live_position(after)
        if key is not None:
            check_text(key, "key")
        if not page_size(limit) or not chosen:
            return []
        return await self._run(
            lambda again: browse.browse(self.dialect, name, states=chosen, key=key, limit=limit, after=position),
            Mode.READ,
        )

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
        self._check_open()
        chosen = states_among(states, SETTLED, "archived")
        name = None if queue is None else check_name(queue, "queue")
        first = None if since is None else moment(since, "since")
        last = None if until is None else moment(until, "until")
        position = None if after is None else archive_position(after)
        if key is not None:
            check_text(key, "key")
        if not page_size(limit) or not chosen:
            return []
        return await self._run(
            lambda again: browse.archived(
                self.dialect, name, states=chosen, key=key, since=first, until=last, limit=limit, after=position
            ),
            Mode.READ,
        )

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        self._check_open()
        wanted = unique_ids(ids)
        found: list[Row] = []
        for some in _chunks(wanted, _CHUNK):
            keys = [self.dialect.id_in(id_) for id_ in some]
            found += await self._run(lambda again, keys=keys: browse.find(self.dialect, keys), Mode.READ)  # type: ignore[misc]
        place = {id_: n for n, id_ in enumerate(wanted)}
        return sorted(found, key=lambda row: (row.archived_us is not None, place[row.id], -(row.archived_us or 0)))

    # --- change -------------------------------------------------------------------------------------

    async def reschedule(
        self,
        ids: Sequence[UUID],
        *,
        priority: int | None = None,
        due_at: datetime | None = None,
        delay: Seconds | None = None,
        attempts: int | None = None,
    ) -> list[UUID]:
        self._check_open()
        if priority is None and due_at is None and delay is None and attempts is None:
            raise InvalidOption("reschedule changes nothing: give priority, due_at, delay or attempts")
        if due_at is not None and delay is not None:
            raise InvalidTime("give either delay or due_at, not both")
        if priority is not None:
            check_priority(priority)
        if attempts is not None:
            whole_number(attempts, "attempts", _MOST_ATTEMPTS)
        due = None if due_at is None else moment(due_at, "due_at")
        wait = None if delay is None else micros(delay, "delay")
        return await self._change(
            unique_ids(ids),
            lambda keys, again: reschedule.reschedule(
                self.dialect,
                keys,
                priority=priority,
                due=due,
                delay=wait,
                attempts=attempts,
                now=self._now(),
                notify=self._options.notify,
            ),
        )

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        self._check_open()
        if not isinstance(reason, str):
            raise InvalidOption(f"reason must be text, not {type(reason).__name__}")
        kept = short_error(reason) or ""
        return await self._change(
            unique_ids(ids),
            lambda keys, again: reschedule.cancel(self.dialect, keys, reason=kept, now=self._now(), again=again),
        )

    async def _change(self, ids: list[UUID], steps: Callable[[list[Any], bool], Steps[Changed]]) -> list[UUID]:
        changed: Changed = {}
        for some in _chunks(ids, _CHUNK):
            keys = [self.dialect.id_in(id_) for id_ in some]
            changed |= await self._run(lambda again, keys=keys: steps(keys, again), Mode.WRITE)  # type: ignore[misc]
            self._due_again(set(changed.values()))
        return [id_ for id_ in ids if id_ in changed]

    async def pause(self, queue: str) -> None:
        self._check_open()
        name = check_name(queue, "queue")
        await self._run(lambda again: reschedule.pause(self.dialect, name), Mode.WRITE)

    async def resume(self, queue: str) -> None:
        self._check_open()
        name, notify = check_name(queue, "queue"), self._options.notify
        await self._run(lambda again: reschedule.resume(self.dialect, name, notify=notify), Mode.WRITE)
        self._due_again([name])

    # --- the archive --------------------------------------------------------------------------------

    async def retain(self, queue: str, *, completed: Seconds | None, failed: Seconds | None) -> None:
        self._check_open()
        name = check_name(queue, "queue")
        keep = [
            None if value is None else micros(value, what)
            for what, value in (("completed", completed), ("failed", failed))
        ]
        await self._run(lambda again: reschedule.retain(self.dialect, name, *keep), Mode.WRITE)

    async def record(self, rows: Sequence[Row]) -> int:
        self._check_open()
        check_settled(rows)
        window = micros(self._options.dedupe_for, "dedupe_for")
        total = 0
        for some in _chunks(rows, _CHUNK):
            total += await self._run(
                lambda again, some=some: record.record(self.dialect, some, now=self._now(), dedupe_for=window),  # type: ignore[misc]
                Mode.WRITE,
            )
        return total

    async def purge(
        self,
        queue: str | None = None,
        *,
        older_than: Seconds | None = None,
        states: Sequence[State] | None = None,
    ) -> int:
        self._check_open()
        chosen = states_among(states, SETTLED, "purge")
        name = None if queue is None else check_name(queue, "queue")
        age = None if older_than is None else micros(older_than, "older_than")
        cutoffs = await self._run(
            lambda again: archive.cutoffs(self.dialect, name, older_than=age, states=chosen, now=self._now()),
            Mode.READ,
        )
        total = await self._purge_days(cutoffs)
        for (owner, state), until in cutoffs.items():
            total += await self._little_by_little(
                lambda owner=owner, state=state, until=until: archive.purge_some(self.dialect, owner, state, until)  # type: ignore[misc]
            )
        await self._little_by_little(lambda: archive.forget_ids(self.dialect, self._now()))
        await self.collect_orphans()
        return total

    async def _purge_days(self, cutoffs: Cutoffs) -> int:
        """Whole partitions, where there are any; what cannot be had at once is deleted row by row."""
        d, total = self.dialect, 0
        await self._run(lambda again: partitions.make_partitions(d, self._now()), Mode.WRITE)
        for part in await self._run(lambda again: partitions.gone_by(d, self._now()), Mode.READ):
            size = await self._run(lambda again, p=part: partitions.expendable(d, p, cutoffs), Mode.WRITE)  # type: ignore[misc]
            if size is None:
                continue
            if size and await self._run(lambda again, p=part: partitions.clear(d, p, cutoffs), Mode.WRITE):  # type: ignore[misc]
                total += size
            await self._run(lambda again, p=part: partitions.drop_if_empty(d, p), Mode.WRITE)  # type: ignore[misc]
        return total

    async def _little_by_little(self, steps: Callable[[], Steps[int]]) -> int:
        """Small transactions, each followed by as long a rest: a purge takes at most half of a database's time."""
        total = 0
        while True:
            started = monotonic()
            count = await self._run(lambda again: steps(), Mode.WRITE)
            total += count
            if count < archive.PURGE_BATCH:
                return total
            await asyncio.sleep(min(monotonic() - started, _LONGEST_REST))

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        self._check_open()
        label = check_name(name, "name")
        target = None if queue is None else check_name(queue, "queue")
        unique = unique_ids(ids)
        missing: list[UUID] = []
        for some in _chunks(unique, _CHUNK):
            missing += await self._run(lambda again, some=some: archive.missing(self.dialect, some), Mode.READ)  # type: ignore[misc]
        if missing:
            raise _not_archived(missing)
        new: dict[UUID, str] = {}
        dedupe_for = micros(self._options.dedupe_for, "dedupe_for")
        for some in _chunks(unique, archive.REPLAY_BATCH):
            new |= await self._run(
                lambda again, some=some: archive.replay(  # type: ignore[misc]
                    self.dialect,
                    some,
                    name=label,
                    queue=target,
                    now=self._now(),
                    dedupe_for=dedupe_for,
                    notify=self._options.notify,
                ),
                Mode.WRITE,
            )
            self._due_again(set(new.values()))
        return [Published(id_, id_ in new) for id_ in (replayed_id(original, label) for original in unique)]


def _not_archived(ids: Sequence[UUID]) -> InvalidMessage:
    some = ", ".join(map(str, ids[:10])) + (f" and {len(ids) - 10:,} more" if len(ids) > 10 else "")
    return InvalidMessage(f"not in the archive, so that nothing was replayed: {some}")


def _chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
