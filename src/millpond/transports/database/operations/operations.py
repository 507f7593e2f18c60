"""The operations room: read messages, change waiting ones, manage the archive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from msgspec import UNSET, UnsetType

from millpond.checks import integer
from millpond.clock import Seconds, micros, monotonic, time_us
from millpond.errors import InvalidMessage, InvalidOption, InvalidTime, MissingRight
from millpond.failed_attempts import fingerprint
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
from millpond.outcome import Change
from millpond.retry import Retry
from millpond.seam.operations import Failure, QueueHistory, QueueRates, QueueStats, Row
from millpond.seam.settings import QueueSettings
from millpond.seam.transport import NEVER_US
from millpond.transports.database.access.access import forget_actions
from millpond.transports.database.bulk import DatabaseBulk
from millpond.transports.database.exports.ranges import PurgeCheck, fold_ranges
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.messages.policies import read_settings
from millpond.transports.database.messages.publish import forget_ids
from millpond.transports.database.messages.unique import forget_uniques
from millpond.transports.database.operations.browse import (
    SETTINGS,
    archived_page,
    count_messages,
    find_rows,
    live_page,
)
from millpond.transports.database.operations.failures import failure_groups
from millpond.transports.database.operations.purge import cutoffs, forget_once, purge_rows, rest
from millpond.transports.database.operations.rates import settled_buckets, settled_since
from millpond.transports.database.operations.record import record_rows
from millpond.transports.database.operations.replay import (
    REPLAY_BATCH,
    close_failures,
    not_archived,
    publish_again,
)
from millpond.transports.database.operations.retry_marks import forget_retried, mark_retried, with_retried
from millpond.transports.database.runner import Mode, Room, Runner, read, write
from millpond.transports.database.sql.dialect import Cutoffs
from millpond.transports.database.sql.settings import changed_columns
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.sql.writes import archive_locked
from millpond.transports.database.workers.work_steps import forget_steps
from millpond.transports.validation import (
    archive_position,
    check_settled,
    live_position,
    page_size,
    queue_names,
    states_among,
    unique_ids,
)

T = TypeVar("T")
Changed = dict[UUID, str]
"""Ids of changed messages, with their queues."""

_MOST_ATTEMPTS = 1_000_000
_MOST_BUCKETS = 1000
_MOST_ROWS = 1_000_000
"""Buckets, and archived messages of one state, of one read of the history."""
_CHUNK = 1000
"""Ids per statement."""

# Waiting messages only: a claimed message belongs to its claim.
_LOCK_WAITING = "SELECT m.id, m.queue FROM {message} m {id_index} WHERE m.id {ids} AND {ready} {locked}"
# Also claimed ones, but those of streams: their batches must not change.
_LOCK_LIVE = f"""
SELECT m.id, m.queue FROM {{message}} m {{id_index}}
WHERE m.id {{ids}} AND (m.lease_until IS NULL OR m.lease_until < {NEVER_US}) {{locked}}
"""
_COMPLETED = "SELECT id FROM {archive} {archive_id_index} WHERE id {ids} AND state = 'COMPLETED' AND token IS NULL"
_FORGET_RECEIPTS = "UPDATE {message} SET token = NULL WHERE id {ids}"
_CANCELLED = "SELECT id FROM {archive} {archive_id_index} WHERE id {ids} AND state = 'FAILED' AND reason = :reason"
_PAUSE = "INSERT INTO {queue} (name, paused) VALUES (:queue, :paused) {or_update} paused = :paused"
_RETAIN = """
INSERT INTO {queue} (name, keep_completed, keep_failed) VALUES (:queue, :completed, :failed)
{or_update} keep_completed = :completed, keep_failed = :failed
"""


class DatabaseOperations(Room):
    count_limit = 1_000_000
    """Archived messages of one queue and state that are counted one by one; more only with `exact`."""
    purge_batch = 5000
    """Rows per transaction of a purge."""

    def __init__(self, runner: Runner, hints: Hints, bulk: DatabaseBulk) -> None:
        super().__init__(runner)
        self._hints = hints
        self._bulk = bulk

    # --- read ---------------------------------------------------------------------------------------

    async def count(self, queues: Sequence[str] | None = None, *, exact: bool = False) -> list[QueueStats]:
        self.runner.check_open()
        names = None if queues is None else queue_names(queues)
        return await self._count(names, exact) if names is None or names else []

    @read
    def _count(self, queues: Sequence[str] | None, exact: bool) -> Steps[list[QueueStats]]:
        return count_messages(self.d, queues, exact=exact, limit=self.count_limit, now=self.now)

    async def rates(self, queues: Sequence[str], *, over: Seconds = 60) -> list[QueueRates]:
        self.runner.check_open()
        names, window = queue_names(queues), micros(over, "over")
        if not window:
            raise InvalidOption("over must be longer than 0 seconds")
        return await self.runner.read(lambda: settled_since(self.d, names, window, self.now))

    async def history(
        self, queue: str, *, every: Seconds = 60, number: int = 60, until: datetime | None = None, limit: int = 100_000
    ) -> QueueHistory:
        self.runner.check_open()
        name, length = check_name(queue, "queue"), micros(every, "every")
        if not length:
            raise InvalidOption("every must be longer than 0 seconds")
        integer(number, "number", 1, _MOST_BUCKETS)
        integer(limit, "limit", 1, _MOST_ROWS)
        end = None if until is None else time_us(until, "until")
        return await self.runner.read(lambda: settled_buckets(self.d, name, length, number, end, limit, self.now))

    async def failures(self, queue: str | None = None, *, limit: int = 100) -> list[Failure]:
        self.runner.check_open()
        name = None if queue is None else check_name(queue, "queue")
        if not page_size(limit):
            return []
        return await self.runner.read(lambda: failure_groups(self.d, name, limit))

    async def has_queue(self, queue: str) -> bool:
        if await self.browse(queue, limit=1) or await self.archived(queue, limit=1):
            return True
        return queue in await self._queues_with_settings()

    @read
    def _queues_with_settings(self) -> Steps[set[str]]:
        return {row[0] for row in (yield Query(self.d.sql(SETTINGS), {}))}

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
        self.runner.check_open()
        chosen = states_among(states, LIVE, "browse")
        name = None if queue is None else check_name(queue, "queue")
        position = None if after is None else live_position(after)
        if key is not None:
            check_text(key, "key")
        if not page_size(limit) or not chosen:
            return []
        return await self.runner.read(
            lambda: live_page(self.d, name, states=chosen, key=key, worker=worker, limit=limit, after=position)
        )

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
        self.runner.check_open()
        chosen = states_among(states, SETTLED, "archived")
        name = None if queue is None else check_name(queue, "queue")
        first = None if since is None else time_us(since, "since")
        last = None if until is None else time_us(until, "until")
        position = None if after is None else archive_position(after)
        if key is not None:
            check_text(key, "key")
        if not page_size(limit) or not chosen:
            return []
        return await self.runner.read(
            lambda: self._with_retried(
                archived_page(
                    self.d,
                    name,
                    states=chosen,
                    key=key,
                    since=first,
                    until=last,
                    failure=failure,
                    limit=limit,
                    after=position,
                )
            )
        )

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        self.runner.check_open()
        wanted = unique_ids(ids)
        found: list[Row] = []
        for some in _chunks(wanted, _CHUNK):
            found += await self._find(self._keys(some))
        place = {id_: n for n, id_ in enumerate(wanted)}
        return sorted(found, key=lambda row: (row.archived_us is not None, place[row.id], -(row.archived_us or 0)))

    @read
    def _find(self, keys: Sequence[Any]) -> Steps[list[Row]]:
        return self._with_retried(find_rows(self.d, keys))

    def _with_retried(self, page: Steps[list[Row]]) -> Steps[list[Row]]:
        return (yield from with_retried(self.d, (yield from page)))

    # --- change waiting messages; those locked by other transactions stay as they are ----------------

    async def reschedule(
        self,
        ids: Sequence[UUID],
        *,
        priority: int | None = None,
        due_at: datetime | None = None,
        delay: Seconds | None = None,
        attempts: int | None = None,
    ) -> list[UUID]:
        if priority is None and due_at is None and delay is None and attempts is None:
            raise InvalidOption("reschedule changes nothing: give priority, due_at, delay or attempts")
        if due_at is not None and delay is not None:
            raise InvalidTime("give either delay or due_at, not both")
        if priority is not None:
            check_priority(priority)
        if attempts is not None:
            integer(attempts, "attempts", 0, _MOST_ATTEMPTS)
        values = {
            "priority": priority,
            "due": None if due_at is None else time_us(due_at, "due_at"),
            "delay": None if delay is None else micros(delay, "delay"),
            "attempts": attempts,
        }
        return await self._change(unique_ids(ids), lambda keys: self._reschedule(keys, values))

    @write
    def _reschedule(self, keys: Sequence[Any], values: dict[str, int | None]) -> Steps[Changed]:
        rows = yield Query(self.d.sql(_LOCK_WAITING), {"ids": keys})
        if rows:
            text = _reschedule_text(**values)
            yield Query(self.d.sql(text), {**values, "ids": [row[0] for row in rows], "now": self.now})
            yield from self._notify({queue for _, queue in rows})
        return {self.d.id_out(id_): queue for id_, queue in rows}

    async def done(self, ids: Sequence[UUID], *, force: bool = False) -> list[UUID]:
        return await self._change(
            unique_ids(ids), lambda keys: self.runner.run(lambda again: self._done(keys, force, again), Mode.WRITE)
        )

    def _done(self, keys: Sequence[Any], force: bool, again: bool) -> Steps[Changed]:
        """Into the archive as COMPLETED, with the attempts there were. `again`: an earlier try may have done it."""
        changed = yield from self._archive(keys, Change(State.COMPLETED, 0), _LOCK_LIVE if force else _LOCK_WAITING)
        if again:
            changed |= {self.d.id_out(row[0]): "" for row in (yield Query(self.d.sql(_COMPLETED), {"ids": keys}))}
        return changed

    async def mark_retried(self, ids: Sequence[UUID]) -> None:
        self.runner.check_open()
        for some in _chunks(unique_ids(ids), _CHUNK):
            await self.runner.write(partial(mark_retried, self.d, self._keys(some), self.now))

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        if not isinstance(reason, str):
            raise InvalidOption(f"reason must be text, not {type(reason).__name__}")
        kept = short_error(reason) or ""
        return await self._change(
            unique_ids(ids),
            lambda keys: self.runner.run(lambda again: self._cancel(keys, kept, again), Mode.WRITE),
        )

    def _cancel(self, keys: Sequence[Any], reason: str, again: bool) -> Steps[Changed]:
        """Into the archive as FAILED, with the attempts there were. `again`: an earlier try may have done it."""
        d = self.d
        change = Change(State.FAILED, 0, reason=reason, failure=fingerprint(reason, None))
        changed = yield from self._archive(keys, change, _LOCK_WAITING)
        if again:
            earlier = yield Query(d.sql(_CANCELLED), {"ids": keys, "reason": reason})
            changed |= {d.id_out(row[0]): "" for row in earlier}
        return changed

    def _archive(self, keys: Sequence[Any], change: Change, lock: str) -> Steps[Changed]:
        d = self.d
        rows = yield Query(d.sql(lock), {"ids": keys})
        if rows:
            ids = [row[0] for row in rows]
            yield from d.lock_archive()
            # No receipt of an earlier delivery may take this for its own settle.
            yield Query(d.sql(_FORGET_RECEIPTS), {"ids": ids})
            yield from archive_locked(d, change, ids, self.now)
        return {d.id_out(id_): queue for id_, queue in rows}

    async def _change(
        self, ids: list[UUID], change: Callable[[Sequence[Any]], Coroutine[Any, Any, Changed]]
    ) -> list[UUID]:
        self.runner.check_open()
        changed: Changed = {}
        for some in _chunks(ids, _CHUNK):
            changed |= await change(self._keys(some))
            self._hints.due_again(set(changed.values()))
        return [id_ for id_ in ids if id_ in changed]

    async def pause(self, queue: str) -> None:
        await self._pause(check_name(queue, "queue"), True)

    async def resume(self, queue: str) -> None:
        name = check_name(queue, "queue")
        await self._pause(name, False)
        self._hints.due_again([name])

    @write
    def _pause(self, queue: str, paused: bool) -> Steps[None]:
        yield Query(self.d.sql(_PAUSE), {"queue": queue, "paused": int(paused)})
        if not paused:
            yield from self._notify([queue])

    async def settings(self, queues: Sequence[str] | None = None) -> list[QueueSettings]:
        self.runner.check_open()
        names = None if queues is None else queue_names(queues)
        found = await self._settings(names) if names is None or names else {}
        if names is None:
            return [found[name] for name in sorted(found)]
        return [found.get(name) or QueueSettings(queue=name) for name in names]

    @read
    def _settings(self, queues: Sequence[str] | None) -> Steps[dict[str, QueueSettings]]:
        return read_settings(self.d, queues)

    async def configure(
        self,
        queue: str,
        *,
        lease: Seconds | UnsetType | None = UNSET,
        retry: Retry | UnsetType | None = UNSET,
        max_crashes: int | UnsetType | None = UNSET,
        max_deliveries: int | UnsetType | None = UNSET,
    ) -> None:
        values = changed_columns(lease=lease, retry=retry, max_crashes=max_crashes, max_deliveries=max_deliveries)
        await self._configure(check_name(queue, "queue"), values)

    @write
    def _configure(self, queue: str, values: dict[str, Any]) -> Steps[None]:
        columns, changes = ", ".join(values), ", ".join(f"{name} = :{name}" for name in values)
        marks = ", ".join(f":{name}" for name in values)
        text = f"INSERT INTO {{queue}} (name, {columns}) VALUES (:queue, {marks}) {{or_update}} {changes}"
        yield Query(self.d.sql(text), {"queue": queue, **values})

    # --- the archive --------------------------------------------------------------------------------

    async def retain(self, queue: str, *, completed: Seconds | None, failed: Seconds | None) -> None:
        await self._retain(
            check_name(queue, "queue"),
            None if completed is None else micros(completed, "completed"),
            None if failed is None else micros(failed, "failed"),
        )

    @write
    def _retain(self, queue: str, completed: int | None, failed: int | None) -> Steps[None]:
        yield Query(self.d.sql(_RETAIN), {"queue": queue, "completed": completed, "failed": failed})

    async def record(self, rows: Sequence[Row]) -> int:
        self.runner.check_open()
        check_settled(rows)
        return sum([await self._record(some) for some in _chunks(rows, _CHUNK)])

    @write
    def _record(self, rows: Sequence[Row]) -> Steps[int]:
        return record_rows(self.d, rows, now=self.now, dedupe_for=self.runner.dedupe_for)

    async def purge(
        self,
        queue: str | None = None,
        *,
        older_than: Seconds | None = None,
        until: datetime | None = None,
        states: Sequence[State] | None = None,
    ) -> int:
        chosen = states_among(states, SETTLED, "purge")
        name = None if queue is None else check_name(queue, "queue")
        if older_than is not None and until is not None:
            raise InvalidOption("give purge older_than or until, not both")
        age = None if older_than is None else micros(older_than, "older_than")
        end = None if until is None else time_us(until, "until")
        allowed = await self._cutoffs(name, age, end, chosen)
        check = PurgeCheck(self.d)
        total = await self.d.purge_partitions(self.runner.write, allowed, self.now, check)
        total += await purge_rows(self.d, self.runner.write, allowed, self.purge_batch, check)
        await self.runner.write(partial(fold_ranges, self.d))
        await self._in_batches(lambda: forget_ids(self.d, self.now, self.purge_batch))
        await self._in_batches(lambda: forget_uniques(self.d, self.now, self.purge_batch))
        await self._in_batches(lambda: forget_retried(self.d, self.purge_batch))
        old = self.runner.dedupe_for
        await self._in_batches(lambda: forget_once(self.d, old, self.now, self.purge_batch))
        await self._in_batches(lambda: forget_steps(self.d, old, self.now, self.purge_batch))
        await self._in_batches(lambda: self.d.forget_published(self.purge_batch))
        with suppress(MissingRight):  # an account that may not delete actions keeps them safe
            await self._in_batches(lambda: forget_actions(self.d, self.now, self.purge_batch))
        await self._bulk.collect_orphans()
        check.raise_postponed(total)
        return total

    @read
    def _cutoffs(
        self, queue: str | None, older_than: int | None, until: int | None, states: Sequence[State]
    ) -> Steps[Cutoffs]:
        return cutoffs(self.d, queue, older_than=older_than, until=until, states=states, now=self.now)

    async def _in_batches(self, steps: Callable[[], Steps[int]]) -> int:
        """Run small transactions, each followed by a rest, until one finds nothing; returns the number of rows."""
        total = 0
        while True:
            started = monotonic()
            count = await self.runner.write(steps)
            total += count
            if not count:
                return total
            await rest(started)

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        self.runner.check_whole()
        label = check_name(name, "name")
        target = None if queue is None else check_name(queue, "queue")
        unique = unique_ids(ids)
        missing: list[UUID] = []
        for some in _chunks(unique, _CHUNK):
            missing += await self._not_archived(some)
        if missing:
            first = ", ".join(map(str, missing[:10])) + (
                f" and {len(missing) - 10:,} more" if len(missing) > 10 else ""
            )
            raise InvalidMessage(f"nothing was replayed: not in the archive: {first}")
        new: dict[UUID, str] = {}
        for some in _chunks(unique, REPLAY_BATCH):
            new |= await self._publish_again(some, label, target)
            self._hints.due_again(set(new.values()))
        return [Published(id_, id_ in new) for id_ in (replayed_id(original, label) for original in unique)]

    @write
    def close_failures(self, ids: Sequence[UUID]) -> Steps[None]:
        """Close the failures of messages that were published again on another shard."""
        yield from close_failures(self.d, ids)

    @read
    def _not_archived(self, ids: Sequence[UUID]) -> Steps[list[UUID]]:
        return not_archived(self.d, ids)

    @write
    def _publish_again(self, ids: Sequence[UUID], name: str, queue: str | None) -> Steps[dict[UUID, str]]:
        notify, window = self.runner.options.notify, self.runner.dedupe_for
        return publish_again(self.d, ids, name=name, queue=queue, now=self.now, dedupe_for=window, notify=notify)

    # --- inside -------------------------------------------------------------------------------------

    def _keys(self, ids: Sequence[UUID]) -> Sequence[Any]:
        return [self.d.id_in(id_) for id_ in ids]

    def _notify(self, queues: Collection[str]) -> Steps[None]:
        if self.runner.options.notify:
            yield from self.d.writes.notify(queues)


def _reschedule_text(*, priority: int | None, due: int | None, delay: int | None, attempts: int | None) -> str:
    changes = []
    if attempts is not None:
        changes += ["crashes = 0", "attempts = :attempts", "deliveries = :attempts"]
        if attempts == 0:
            changes.append("first_attempt_at = NULL")  # the total time of a retry policy begins anew
    if priority is not None:
        changes.append("priority = :priority")
    if due is not None:
        changes.append("due_at = :due")
    if delay is not None:
        changes.append("due_at = {now} + :delay")
    return f"UPDATE {{message}} SET {', '.join(changes)} WHERE id {{ids}}"


def _chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
