"""Operators' verbs over all shards. A shard that does not answer is named by `missing`; the others are shown."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import Seconds
from millpond.errors import InvalidMessage
from millpond.message import LIVE, Draft, Published, State, check_name, replayed_id
from millpond.seam.operations import Failure, Operations, QueueHistory, QueueRates, QueueStats, Row, SettledBucket
from millpond.seam.settings import QueueSettings
from millpond.transports.shard_map import ShardMap
from millpond.transports.sharded.members import Members
from millpond.transports.sharded.shard import ANSWER_WITHIN
from millpond.transports.validation import check_settled, page_size, queue_names, unique_ids

_REPLAY_BATCH = 500
"""Messages per transaction."""


class ShardedOperations:
    """The operations room. Pages are merged: a position is a place in the order of all shards."""

    def __init__(self, members: Members) -> None:
        self._members = members

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of shards that do not answer: their messages are not among the results."""
        return self._members.missing

    # --- read ---------------------------------------------------------------------------------------

    async def count(self, queues: Sequence[str] | None = None, *, exact: bool = False) -> list[QueueStats]:
        names = None if queues is None else queue_names(queues)
        found: dict[str, list[QueueStats]] = {}
        within = None if exact else ANSWER_WITHIN
        for stats in await self._members.ask(lambda store: store.operations.count(names, exact=exact), within=within):
            for one in stats:
                found.setdefault(one.queue, []).append(one)
        order = sorted(found) if names is None else names
        return [_added(found[name], self.missing) for name in order]

    async def rates(self, queues: Sequence[str], *, over: Seconds = 60) -> list[QueueRates]:
        found: dict[str, QueueRates] = {}
        for part in await self._members.ask(lambda store: store.operations.rates(queues, over=over)):
            for one in part:
                other = found.get(one.queue)
                found[one.queue] = one if other is None else _added_rates(other, one)
        return list(found.values())

    async def history(
        self, queue: str, *, every: Seconds = 60, number: int = 60, until: datetime | None = None, limit: int = 100_000
    ) -> QueueHistory:
        parts = await self._members.ask(
            lambda store: store.operations.history(queue, every=every, number=number, until=until, limit=limit)
        )
        return _added_histories(parts, self.missing)

    async def failures(self, queue: str | None = None, *, limit: int = 100) -> list[Failure]:
        found: dict[tuple[str, int], Failure] = {}
        for part in await self._members.ask(lambda store: store.operations.failures(queue, limit=limit)):
            for one in part:
                key = (one.queue, one.fingerprint)
                found[key] = one if key not in found else _added_failures(found[key], one)
        return sorted(found.values(), key=lambda one: one.newest_us, reverse=True)[:limit]

    async def settings(self, queues: Sequence[str] | None = None) -> list[QueueSettings]:
        """Settings are the same on all shards: those of the first one that has them."""
        if queues is not None:  # a worker reads them twice a second
            return (
                await self._members.ask(lambda store: store.operations.settings(queues), shards=self._members.attended)
            )[0]
        parts = await self._members.ask(lambda store: store.operations.settings(queues))
        found: dict[str, QueueSettings] = {}
        for part in parts:
            for one in part:
                found.setdefault(one.queue, one)
        return [found[name] for name in sorted(found)]

    async def has_queue(self, queue: str) -> bool:
        return any(await self._members.ask(lambda store: store.operations.has_queue(queue)))

    async def browse(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        worker: int | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        page_size(limit)
        pages = await self._members.ask(
            lambda store: store.operations.browse(
                queue, states=states, key=key, worker=worker, limit=limit, after=after
            )
        )
        return list(heapq.merge(*pages, key=lambda row: row.position))[:limit]

    async def archived(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        failure: int | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        page_size(limit)
        pages = await self._members.ask(
            lambda store: store.operations.archived(
                queue, states=states, key=key, since=since, until=until, failure=failure, limit=limit, after=after
            )
        )
        return list(heapq.merge(*pages, key=lambda row: row.position, reverse=True))[:limit]

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        unique = unique_ids(ids)
        rows = [row for part in await self._members.ask(lambda store: store.operations.find(unique)) for row in part]
        return sorted(rows, key=lambda row: (row.state not in LIVE, row.id))

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
        unique = unique_ids(ids)
        changed = await self._members.tell(
            lambda store: store.operations.reschedule(
                unique, priority=priority, due_at=due_at, delay=delay, attempts=attempts
            )
        )
        return _in_order(unique, changed)

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        unique = unique_ids(ids)
        return _in_order(unique, await self._members.tell(lambda store: store.operations.cancel(unique, reason=reason)))

    async def done(self, ids: Sequence[UUID], *, force: bool = False) -> list[UUID]:
        unique = unique_ids(ids)
        return _in_order(unique, await self._members.tell(lambda store: store.operations.done(unique, force=force)))

    async def mark_retried(self, ids: Sequence[UUID]) -> None:
        unique = unique_ids(ids)
        await self._members.tell(lambda store: store.operations.mark_retried(unique))

    async def pause(self, queue: str) -> None:
        await self._members.tell(lambda store: store.operations.pause(queue))

    async def resume(self, queue: str) -> None:
        await self._members.tell(lambda store: store.operations.resume(queue))

    async def retain(self, queue: str, *, completed: Seconds | None, failed: Seconds | None) -> None:
        await self._members.tell(lambda store: store.operations.retain(queue, completed=completed, failed=failed))

    async def configure(self, queue: str, **settings: Any) -> None:
        await self._members.tell(lambda store: store.operations.configure(queue, **settings))

    async def purge(
        self,
        queue: str | None = None,
        *,
        older_than: Seconds | None = None,
        until: datetime | None = None,
        states: Sequence[State] | None = None,
    ) -> int:
        return sum(
            await self._members.ask(
                lambda store: store.operations.purge(queue, older_than=older_than, until=until, states=states),
                within=None,
            )
        )

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        """Publish each message on the shard of its key or, without a key, of its new id.

        That is often the shard of its archive, which then copies the body inside the database.
        """
        label = check_name(name, "name")
        target = None if queue is None else check_name(queue, "queue")
        unique = unique_ids(ids)
        by_shard = await self._members.tell(lambda store: store.operations.find(unique))
        found: dict[UUID, tuple[str, Row]] = {}
        for shard, rows in zip(self._members.shards, by_shard, strict=True):
            for row in rows:
                last = found.get(row.id)
                if row.state not in LIVE and (last is None or (row.archived_us or 0) >= (last[1].archived_us or 0)):
                    found[row.id] = shard.name, row
        if missing := [id_ for id_ in unique if id_ not in found]:
            raise InvalidMessage(f"nothing was replayed: not in the archive: {', '.join(map(str, missing[:10]))}")
        published: dict[UUID, Published] = {}

        async def publish() -> None:
            left = {id_: place for id_, place in found.items() if id_ not in published}
            for places, some in _by_places(self._members.map, left, label).items():
                for start in range(0, len(some), _REPLAY_BATCH):
                    rows = [found[id_][1] for id_ in some[start : start + _REPLAY_BATCH]]
                    published.update(await self._replay(places, rows, label, target))

        await self._members.follow(publish)
        return [published[id_] for id_ in unique]

    async def _replay(
        self, places: tuple[str, str], rows: Sequence[Row], name: str, queue: str | None
    ) -> dict[UUID, Published]:
        """Publish messages of one archive again on one shard; returns the results by their old ids."""
        source, target = places
        ids = [row.id for row in rows]
        if source == target:
            done = await self._members[source].call(lambda store: store.operations.replay(ids, name=name, queue=queue))
        else:
            drafts = [_again(row, name, queue) for row in rows]
            done = await self._members[target].call(lambda store: store.publish_drafts(drafts))
            await self._members[source].call(lambda store: store.operations.close_failures(ids))
        return dict(zip(ids, done, strict=True))

    async def record(self, rows: Sequence[Row]) -> int:
        check_settled(rows)
        parts: dict[str, list[Row]] = {}
        for row in rows:
            parts.setdefault(self._members.map.place(row.key, row.id.bytes), []).append(row)

        def on(name: str, part: list[Row]) -> Any:
            return self._members[name].call(lambda store: store.operations.record(part))

        return sum(await asyncio.gather(*(on(name, part) for name, part in parts.items())))


def _by_places(map_: ShardMap, found: Mapping[UUID, tuple[str, Row]], name: str) -> dict[tuple[str, str], list[UUID]]:
    """Ids by the shard of the archive and the shard of the message that is published again."""
    parts: dict[tuple[str, str], list[UUID]] = {}
    for id_, (source, row) in found.items():
        target = map_.place(row.key, replayed_id(id_, name).bytes)
        parts.setdefault((source, target), []).append(id_)
    return parts


def _again(row: Row, name: str, queue: str | None) -> Draft:
    """The message under its new id. An expiry belongs to its first life."""
    headers = msgspec.json.encode({**row.headers, "replay-of": str(row.id)}).decode()
    return Draft(
        id=replayed_id(row.id, name),
        given=True,
        queue=queue or row.queue,
        key=row.key,
        priority=row.priority,
        delay_us=0,
        due_us=None,
        expires_after_us=None,
        expires_us=None,
        headers=headers,
        payload=row.payload,
    )


def _in_order(ids: Sequence[UUID], parts: Sequence[Sequence[UUID]]) -> list[UUID]:
    found = {id_ for part in parts for id_ in part}
    return [id_ for id_ in ids if id_ in found]


def _added_rates(one: QueueRates, other: QueueRates) -> QueueRates:
    return msgspec.structs.replace(
        one,
        completed=one.completed + other.completed,
        failed=one.failed + other.failed,
        approximate=one.approximate or other.approximate,
    )


def _added_histories(parts: Sequence[QueueHistory], missing: tuple[str, ...]) -> QueueHistory:
    """The buckets that all of these shards have counted.

    At a change of buckets their clocks may end at different ones: the sum then ends where the last does.
    """
    since = max(part.since_us for part in parts)
    sums: dict[int, SettledBucket] = {}
    for bucket in (bucket for part in parts for bucket in part.buckets if bucket.begin_us >= since):
        other = sums.get(bucket.begin_us)
        if other is not None:
            bucket = SettledBucket(
                begin_us=bucket.begin_us,
                completed=bucket.completed + other.completed,
                failed=bucket.failed + other.failed,
                at_least=bucket.at_least or other.at_least,
            )
        sums[bucket.begin_us] = bucket
    return msgspec.structs.replace(
        parts[0],
        since_us=since,
        until_us=max(part.until_us for part in parts),
        at_us=min(part.at_us for part in parts),
        buckets=tuple(sums[begin] for begin in sorted(sums)),
        missing=missing,
    )


def _added_failures(one: Failure, other: Failure) -> Failure:
    """The group of both shards: the newest message stands for it."""
    newest, oldest = max(one, other, key=lambda group: group.newest_us), min(one.oldest_us, other.oldest_us)
    return msgspec.structs.replace(newest, messages=one.messages + other.messages, oldest_us=oldest)


def _added(stats: Sequence[QueueStats], missing: tuple[str, ...]) -> QueueStats:
    """The sum of the counts of one queue."""
    counts: dict[State, int] = {}
    for one in stats:
        for state, count in one.counts.items():
            counts[state] = counts.get(state, 0) + count
    oldest = [one.oldest_due_us for one in stats if one.oldest_due_us is not None]
    settings: Mapping[str, int | None] = {
        name: next((value for one in stats if (value := getattr(one, name)) is not None), None)
        for name in ("keep_completed_us", "keep_failed_us")
    }
    return msgspec.structs.replace(
        stats[0],
        counts=counts,
        approximate=any(one.approximate for one in stats),
        paused=any(one.paused for one in stats),
        oldest_due_us=min(oldest, default=None),
        missing=missing,
        retried=sum(one.retried for one in stats),
        **settings,
    )


_room: Callable[[Members], Operations] = ShardedOperations
