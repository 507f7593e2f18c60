"""Count: every queue and state, exactly, and the archive up to a bound."""

from __future__ import annotations

import pytest

from millpond import GiveBack, ManualClock, Nack, State, Transport
from millpond.errors import InvalidQueue
from tests.rooms.operations.lives import HOSTILE, claim, complete, counts, fail, message, publish


async def test_every_state_is_counted(store: Transport, clock: ManualClock) -> None:
    await complete(store, number=3)
    await fail(store, number=2)
    await publish(store, *(message() for _ in range(10)))
    held = await claim(store, number=6)
    await store.settle([Nack(c.receipt, delay=60) for c in held[:2]] + [GiveBack(held[2].receipt)])
    (stats,) = await store.operations.count()
    assert stats.queue == "q" and not stats.paused and not stats.approximate
    assert stats.counts == {
        State.PENDING: 5,
        State.PROCESSING: 3,
        State.RETRYABLE: 2,
        State.COMPLETED: 3,
        State.FAILED: 2,
    }


async def test_queues_come_by_name_or_as_asked(store: Transport) -> None:
    await publish(store, message("b"), message("a"))
    await complete(store, "c")
    await claim(store, "b")
    assert [stats.queue for stats in await store.operations.count()] == ["a", "b", "c"]
    asked = await store.operations.count(["c", "unknown", "a"])
    assert [(stats.queue, sum(stats.counts.values())) for stats in asked] == [("c", 1), ("unknown", 0), ("a", 1)]
    assert set(asked[1].counts) == set(State)
    assert await store.operations.count([]) == []


async def test_a_queue_that_has_settings_only_is_shown(store: Transport) -> None:
    await store.operations.pause("held")
    await store.operations.retain("kept", completed=60, failed=None)
    held, kept = await store.operations.count()
    assert (held.queue, held.paused, sum(held.counts.values())) == ("held", True, 0)
    assert (kept.queue, kept.paused, kept.keep_completed_us, kept.keep_failed_us) == ("kept", False, 60_000_000, None)


async def test_the_oldest_due_is_told(store: Transport, clock: ManualClock) -> None:
    start = clock.now()
    await publish(store, message(delay=10), message(delay=20), message(priority=1, delay=15))
    assert (await store.operations.count())[0].oldest_due_us is None
    clock.advance(30)
    assert (await store.operations.count())[0].oldest_due_us == start + 10_000_000
    await claim(store)  # the message of priority 1
    assert (await store.operations.count())[0].oldest_due_us == start + 10_000_000


async def test_the_archive_is_counted_up_to_a_bound(store: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    await complete(store, "many", 7)
    await complete(store, "few", 5)
    monkeypatch.setattr(store.operations, "count_limit", 5)
    few, many = await store.operations.count()
    assert (few.counts[State.COMPLETED], few.approximate) == (5, False)
    assert (many.counts[State.COMPLETED], many.approximate) == (5, True)
    (many,) = await store.operations.count(["many"], exact=True)
    assert (many.counts[State.COMPLETED], many.approximate) == (7, False)


async def test_many_queues_are_found(store: Transport) -> None:
    """More queues than MySQL's limit of recursion."""
    await publish(store, *(message(f"q{n:04}") for n in range(1200)))
    for start in range(0, 1200, 100):
        queues = [f"q{n:04}" for n in range(start, start + 100)]
        await store.operations.cancel([c.id for c in await store.operations.browse(limit=10_000) if c.queue in queues])
    found = await store.operations.count()
    assert [stats.queue for stats in found] == [f"q{n:04}" for n in range(1200)]
    assert {stats.counts[State.FAILED] for stats in found} == {1}


async def test_names_are_data(store: Transport) -> None:
    for name in HOSTILE:
        await publish(store, message(name))
        await complete(store, name)
    assert [stats.queue for stats in await store.operations.count()] == sorted(HOSTILE)
    for name in HOSTILE:
        assert await counts(store, name) == {State.PENDING: 1, State.COMPLETED: 1}
    for bad in ("", " x", "a\0b", "x" * 256):
        with pytest.raises(InvalidQueue):
            await store.operations.count([bad])
