"""Purge: by age or by each queue's retention, in small steps, and never more than that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from millpond import Ack, ManualClock, State, Store
from millpond.errors import InvalidOption, InvalidQueue, InvalidTime
from millpond.message import id_from
from millpond.transports.database import archive
from tests.operations.lives import HOSTILE, claim, complete, counts, fail, message, publish

DAY = 86_400


async def test_by_age(store: Store, clock: ManualClock) -> None:
    await complete(store, "a", 3)
    await fail(store, "b", 2)
    clock.advance(60)
    await complete(store, "a", 1)
    assert await store.purge(older_than=61) == 0
    assert await store.purge(older_than=timedelta(seconds=60)) == 5
    assert [stats.queue for stats in await store.count()] == ["a"]
    assert await counts(store, "a") == {State.COMPLETED: 1}
    assert await store.purge(older_than=0) == 1
    assert await store.count() == []


async def test_by_queue_and_state(store: Store, clock: ManualClock) -> None:
    for queue in ("a", "b"):
        await complete(store, queue, 2)
        await fail(store, queue, 3)
    clock.advance(1)
    assert await store.purge("a", older_than=1, states=[State.FAILED]) == 3
    assert await store.purge("b", older_than=1, states=[State.COMPLETED]) == 2
    assert await store.purge("unknown", older_than=0) == 0
    assert await counts(store, "a") == {State.COMPLETED: 2}
    assert await counts(store, "b") == {State.FAILED: 3}


async def test_by_retention(store: Store, clock: ManualClock) -> None:
    """Each queue's own; none given keeps for ever"""
    for queue in ("short", "long", "for ever"):
        await complete(store, queue, 2)
        await fail(store, queue, 1)
    await store.retain("short", completed=1 * DAY, failed=None)
    await store.retain("long", completed=3 * DAY, failed=2 * DAY)
    clock.advance(1 * DAY - 1)
    assert await store.purge() == 0
    clock.advance(1)
    assert await store.purge() == 2
    clock.advance(2 * DAY)
    assert await store.purge("short") == 0
    assert await store.purge("long", states=[State.FAILED]) == 1
    assert await store.purge() == 2
    clock.advance(1000 * DAY)
    assert await store.purge() == 0
    assert await counts(store, "short") == {State.FAILED: 1}
    assert await counts(store, "long") == {}
    assert await counts(store, "for ever") == {State.COMPLETED: 2, State.FAILED: 1}


async def test_live_messages_are_not_purged(store: Store, clock: ManualClock) -> None:
    await publish(store, message(), message())
    (held,) = await claim(store, lease=1000 * DAY)
    await store.retain("q", completed=0, failed=0)
    clock.advance(500 * DAY)
    assert await store.purge() == 0 == await store.purge(older_than=0)
    assert await counts(store) == {State.PENDING: 1, State.PROCESSING: 1}
    assert await store.settle([Ack(held.receipt)]) == []


async def test_small_steps_with_many_settled_at_one_moment(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "PURGE_BATCH", 3)
    for _ in range(3):
        await complete(store, number=10)
        await fail(store, number=1)
        clock.advance(1)
    kept = await complete(store, number=10)
    assert await store.purge(older_than=1) == 33
    assert {row.id for row in await store.archived()} == set(kept)


async def test_two_at_once_count_each_row_once(
    url: str, connect: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[Store] = [await connect(url) for _ in range(3)]  # type: ignore[misc]
    await complete(stores[0], number=200)
    monkeypatch.setattr(archive, "PURGE_BATCH", 10)
    assert sum(await asyncio.gather(*(store.purge(older_than=0) for store in stores))) == 200


async def test_settles_pass_while_it_purges(
    url: str, connect: Callable[..., object], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is settled meanwhile is neither delayed nor deleted"""
    purger: Store = await connect(url)  # type: ignore[misc]
    worker: Store = await connect(url)  # type: ignore[misc]
    await complete(purger, number=1000)
    clock.advance(10)
    monkeypatch.setattr(archive, "PURGE_BATCH", 20)
    purging = asyncio.create_task(purger.purge(older_than=10))
    settled = []
    while not purging.done():
        settled += await complete(worker, number=5)
    assert await purging == 1000
    assert len(settled) > 5
    assert {row.id for row in await worker.archived(limit=10_000)} == set(settled)


async def test_ids_are_forgotten_when_their_window_is_over(
    url: str, connect: Callable[..., object], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Store = await connect(url, dedupe_for=60)  # type: ignore[misc]
    monkeypatch.setattr(archive, "PURGE_BATCH", 3)
    await publish(store, *(message(id=id_from(str(n))) for n in range(10)))
    clock.advance(30)
    await publish(store, message(id=id_from("young")))
    await store.cancel([row.id for row in await store.browse("q")])
    await store.purge(older_than=0)
    clock.advance(30)
    await store.purge()
    assert not (await store.publish([message(id=id_from("young"))]))[0].new
    assert (await store.publish([message(id=id_from("3"))]))[0].new


async def test_names_are_data(store: Store) -> None:
    for name in HOSTILE:
        await complete(store, name)
        await store.retain(name, completed=0, failed=0)
    assert await store.purge(HOSTILE[0]) == 1
    assert await store.purge() == len(HOSTILE) - 1


async def test_bad_arguments(store: Store) -> None:
    with pytest.raises(InvalidTime):
        await store.purge(older_than=-1)
    with pytest.raises(InvalidOption):
        await store.purge(states=["PENDING"])  # type: ignore[list-item]
    with pytest.raises(InvalidQueue):
        await store.purge("")
    with pytest.raises(InvalidTime):
        await store.retain("q", completed=-1, failed=None)
    with pytest.raises(InvalidOption):
        await store.retain("q", completed=None, failed="1 day")  # type: ignore[arg-type]
