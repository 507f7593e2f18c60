"""Settled messages of the last minutes and hours, counted in the archive. A time that is over is counted once."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal

import msgspec

from millpond.clock import SECOND, as_datetime, monotonic
from millpond.seam.operations import Operations, QueueHistory, SettledBucket

By = Literal["minute", "hour"]
"""Times that are counted in the archive."""
Every = Literal["minute", "hour", "day"]
"""The same, and days, which are counted in a lake."""


class BucketSize(msgspec.Struct, frozen=True):
    seconds: int
    number: int
    limit: int
    """Rows of one queue and state that one call reads, and that a bucket can count. Those of a lake are not read so."""
    same_for: float
    """Seconds for which the count of the present bucket is used again."""


KINDS: dict[Every, BucketSize] = {
    "minute": BucketSize(60, 60, 100_000, 10.0),
    "hour": BucketSize(3600, 24, 1_000_000, 60.0),
    "day": BucketSize(86_400, 30, 0, 60.0),
}
_OVER_AFTER = 60 * SECOND
"""Time after its end from which a bucket counts as over: transactions that began in it are committed by then."""
FREE = 0.2
"""Seconds that a count may take at once. After that it takes at most one part in `SHARE` of the time."""
SHARE = 10
_MOST_QUEUES = 10_000
"""Queues whose counts are remembered."""


class SettledCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of some queues."""

    by: Every
    buckets: tuple[SettledBucket, ...]
    """Oldest first, with empty ones, without those that are not counted yet."""
    complete: bool
    """False: some buckets or queues are not counted yet."""
    missing: tuple[str, ...] = ()
    """Names of shards that did not answer."""
    unreadable: bool = False
    """True: the lake could not be read."""


class _Known:
    """The counts of one queue. All times are starts of buckets."""

    def __init__(self) -> None:
        self.over: dict[int, SettledBucket | None] = {}
        """Buckets that do not change; None for an empty one."""
        self.present: dict[int, SettledBucket | None] = {}
        self.at = 0
        self.read_at = -math.inf
        self.missing: tuple[str, ...] = ()


class SettledHistory:
    """Counts of one pond. It remembers those of times that are over, also when their messages are purged.

    `in_background` runs the task that counts.
    """

    def __init__(
        self, operations: Operations, in_background: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]
    ) -> None:
        self._operations = operations
        self._in_background = in_background
        self._known: OrderedDict[tuple[str, By], _Known] = OrderedDict()
        self._wanted: dict[tuple[str, By], None] = {}
        self._task: asyncio.Task[None] | None = None

    async def counts(self, queues: Sequence[str], by: By, *, within: float) -> SettledCounts:
        """Sums of these queues. It waits for counts at most so many seconds; they continue in the background."""
        if self._task is not None and self._task.done():
            self._task = None
        self._wanted.update(dict.fromkeys((queue, by) for queue in queues if self._is_old(queue, by)))
        if self._wanted and self._task is None:
            self._task = self._in_background(self._count(), "history of the archive")
        if self._task is not None and within:
            done, _ = await asyncio.wait([self._task], timeout=within)
            for task in done:
                task.result()  # raises its error
        return self._sum(queues, by)

    def is_known(self, queues: Iterable[str], by: By) -> bool:
        return all((queue, by) in self._known for queue in queues)

    def _is_old(self, queue: str, by: By) -> bool:
        known = self._known.get((queue, by))
        return known is None or monotonic() - known.read_at > KINDS[by].same_for

    async def _count(self) -> None:
        """Count what is wanted, the newest times of all queues first."""
        began = monotonic()
        older: dict[tuple[str, By], None] = {}
        try:
            while self._wanted or older:
                source = self._wanted or older
                key = next(iter(source))
                del source[key]
                step = monotonic()
                if not await (self._count_newest(*key) if source is self._wanted else self._count_older(*key)):
                    older[key] = None
                now = monotonic()
                if now - began > FREE:
                    await asyncio.sleep((now - step) * (SHARE - 1))
        finally:
            self._wanted.clear()

    async def _count_newest(self, queue: str, by: By) -> bool:
        """Count the buckets that are not over, with those that began meanwhile. False: older ones are not counted."""
        kind = KINDS[by]
        known = self._known.get((queue, by))
        number = kind.number
        if known is not None:
            unknown = [begin for begin in _window(known.at, kind) if begin not in known.over]
            passed = monotonic() - known.read_at
            newer = math.ceil(min(passed, kind.seconds * kind.number) / kind.seconds)
            number = min(number, newer + (_newest(known.at, kind) - unknown[0]) // _length(kind) + 1)
        found = await self._read(queue, kind, number, None)
        known = self._known.setdefault((queue, by), _Known())
        self._known.move_to_end((queue, by))
        if len(self._known) > _MOST_QUEUES:
            self._known.popitem(last=False)
        known.at, known.read_at, known.present = found.at_us, monotonic(), {}
        first = _window(known.at, kind)[0]
        known.over = {begin: bucket for begin, bucket in known.over.items() if begin >= first}
        self._add(known, found)
        return not self._gaps(known, kind)

    async def _count_older(self, queue: str, by: By) -> bool:
        """Count the newest bucket that is not counted yet, with as many before it as the limit allows."""
        kind = KINDS[by]
        known = self._known.get((queue, by))
        if known is None or not (gaps := self._gaps(known, kind)):
            return True
        end = gaps[-1] + _length(kind)
        found = await self._read(queue, kind, (end - gaps[0]) // _length(kind), end)
        self._add(known, found)
        return not self._gaps(known, kind)

    async def _read(self, queue: str, kind: BucketSize, number: int, until_us: int | None) -> QueueHistory:
        return await self._operations.history(
            queue,
            every=kind.seconds,
            number=number,
            until=None if until_us is None else as_datetime(until_us),
            limit=kind.limit,
        )

    @staticmethod
    def _add(known: _Known, found: QueueHistory) -> None:
        known.missing = found.missing
        buckets = {bucket.begin_us: bucket for bucket in found.buckets}
        for begin in range(found.since_us, found.until_us, found.every_us):
            bucket = buckets.get(begin)
            if found.missing:  # the next count may have the messages of all shards
                known.present[begin] = msgspec.structs.replace(bucket or _empty(begin), at_least=True)
            elif begin + found.every_us + _OVER_AFTER <= found.at_us:
                known.over[begin] = bucket
            else:
                known.present[begin] = bucket

    @staticmethod
    def _gaps(known: _Known, kind: BucketSize) -> list[int]:
        return [begin for begin in _window(known.at, kind) if begin not in known.over and begin not in known.present]

    def _sum(self, queues: Sequence[str], by: By) -> SettledCounts:
        kind = KINDS[by]
        found = [known for queue in queues if (known := self._known.get((queue, by))) is not None]
        at = max((known.at for known in found), default=0)
        complete = len(found) == len(queues)
        sums = []
        for begin in _window(at, kind) if found else ():
            completed = failed = 0
            at_least, counted = len(found) < len(queues), False
            for known in found:
                part = known.over.get(begin, _UNKNOWN)
                if part is _UNKNOWN:
                    part = known.present.get(begin, _UNKNOWN)
                if part is _UNKNOWN:
                    # A bucket that began after the last count of this queue is not a gap.
                    is_gap = begin <= _newest(known.at, kind)
                    at_least |= is_gap
                    complete &= not is_gap
                    continue
                counted = True
                if part is not None:
                    completed += part.completed
                    failed += part.failed
                    at_least |= part.at_least
            if counted:
                sums.append(SettledBucket(begin_us=begin, completed=completed, failed=failed, at_least=at_least))
        missing = tuple(dict.fromkeys(name for known in found for name in known.missing))
        return SettledCounts(by=by, buckets=tuple(sums), complete=complete, missing=missing)


def _empty(begin: int) -> SettledBucket:
    return SettledBucket(begin_us=begin, completed=0, failed=0)


_UNKNOWN = _empty(-1)


def _length(kind: BucketSize) -> int:
    return kind.seconds * SECOND


def _newest(at: int, kind: BucketSize) -> int:
    return at - at % _length(kind)


def _window(at: int, kind: BucketSize) -> range:
    """Starts of the buckets that are shown."""
    newest = _newest(at, kind)
    return range(newest - (kind.number - 1) * _length(kind), newest + 1, _length(kind))
