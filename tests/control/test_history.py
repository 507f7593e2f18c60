"""The history of the archive: times that are over are counted once, and in pieces of a bounded number of rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

import millpond
from millpond import Ack, ManualClock, Message, Transport
from millpond.control import history as module
from millpond.control.history import SettledCounts, SettledHistory
from millpond.errors import Closed
from millpond.seam.operations import QueueHistory


class Counted:
    """The operations of a store. Every range that is read is noted; `missing` are shards that do not answer."""

    def __init__(self, store: Transport) -> None:
        self._store = store
        self.numbers: list[int] = []
        self.missing: tuple[str, ...] = ()

    async def history(self, queue: str, *, number: int, **options: Any) -> QueueHistory:
        self.numbers.append(number)
        found = await self._store.operations.history(queue, number=number, **options)
        return msgspec.structs.replace(found, missing=self.missing)


def in_task(work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
    return asyncio.create_task(work, name=what)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(datetime(2026, 1, 1, 12, 30, tzinfo=UTC))


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[Transport]:
    store = await millpond.connect("memory://", clock=clock)
    yield store
    await store.close()


@pytest.fixture
def counted(store: Transport) -> Counted:
    return Counted(store)


@pytest.fixture
def history(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> SettledHistory:
    """Each call counts the present time again, and without pauses."""
    kinds = {by: msgspec.structs.replace(kind, same_for=-1.0) for by, kind in module.KINDS.items()}
    monkeypatch.setattr(module, "KINDS", kinds)
    monkeypatch.setattr(module, "FREE", 1e9)
    return SettledHistory(counted, in_task)  # type: ignore[arg-type]


async def settle(store: Transport, number: int, queue: str = "q") -> None:
    await store.publish([Message(queue=queue, payload=b"1") for _ in range(number)])
    assert await store.settle([Ack(claim.receipt) for claim in await store.claim([queue], number)]) == []


def last(counts: SettledCounts, number: int) -> list[int]:
    return [bucket.completed for bucket in counts.buckets[-number:]]


async def test_a_time_that_is_over_is_counted_once(
    store: Transport, clock: ManualClock, counted: Counted, history: SettledHistory
) -> None:
    await settle(store, 3)
    clock.advance(300)
    await settle(store, 1)
    counts = await history.counts(["q"], "minute", within=60)
    assert (len(counts.buckets), counts.complete, last(counts, 6)) == (60, True, [3, 0, 0, 0, 0, 1])
    await settle(store, 1)
    await store.operations.purge("q", older_than=200)
    counts = await history.counts(["q"], "minute", within=60)
    assert last(counts, 6) == [3, 0, 0, 0, 0, 2], "what was purged is remembered"
    assert counted.numbers[0] == 60 and max(counted.numbers[1:]) <= 4
    assert last(await history.counts(["q"], "hour", within=60), 2) == [0, 2]
    clock.advance(120)
    assert last(await history.counts(["q"], "minute", within=60), 4) == [0, 2, 0, 0]
    clock.advance(3600)
    assert sum(last(await history.counts(["q"], "minute", within=60), 60)) == 0


async def test_busy_times_are_counted_in_pieces(
    store: Transport, clock: ManualClock, counted: Counted, history: SettledHistory
) -> None:
    kind = msgspec.structs.replace(module.KINDS["minute"], limit=5)
    module.KINDS["minute"] = kind
    for number in (3, 9, 4, 1):
        await settle(store, number)
        clock.advance(60)
    counts = await history.counts(["q"], "minute", within=60)
    assert [(bucket.completed, bucket.at_least) for bucket in counts.buckets[-5:]] == [
        (3, False),
        (5, True),
        (4, False),
        (1, False),
        (0, False),
    ]
    assert counts.complete and len(counts.buckets) == 60 and len(counted.numbers) > 2


async def test_sums_over_queues_are_lower_bounds_until_all_are_counted(
    store: Transport, clock: ManualClock, counted: Counted, history: SettledHistory
) -> None:
    await settle(store, 2)
    await settle(store, 3, "other")
    await history.counts(["q"], "minute", within=60)
    counts = await history.counts(["q", "other"], "minute", within=0)
    assert (last(counts, 1), counts.complete, counts.buckets[-1].at_least) == ([2], False, True)
    counts = await history.counts(["q", "other"], "minute", within=60)
    assert (last(counts, 1), counts.complete, counts.buckets[-1].at_least) == ([5], True, False)
    assert (await history.counts([], "minute", within=60)).buckets == ()


async def test_counts_without_some_shards_are_not_remembered(
    store: Transport, clock: ManualClock, counted: Counted, history: SettledHistory
) -> None:
    await settle(store, 2)
    clock.advance(600)
    counted.missing = ("b",)
    counts = await history.counts(["q"], "minute", within=60)
    assert counts.missing == ("b",) and counts.buckets[-11].at_least
    counted.missing = ()
    counts = await history.counts(["q"], "minute", within=60)
    assert counts.missing == () and not any(bucket.at_least for bucket in counts.buckets) and last(counts, 11)[0] == 2


async def test_an_error_is_raised_to_those_who_wait(store: Transport, history: SettledHistory) -> None:
    await store.close()
    with pytest.raises(Closed):
        await history.counts(["q"], "minute", within=60)
    assert not (await history.counts(["q"], "minute", within=0)).complete
