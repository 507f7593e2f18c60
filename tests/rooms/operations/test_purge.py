"""Purge: by age or by the retention of each queue, in small steps, and never more rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from millpond import Ack, ManualClock, State, Transport
from millpond.errors import InvalidOption, InvalidQueue, InvalidTime, MissingRight
from millpond.ids import id_from
from millpond.seam.access import Action
from millpond.transports.database.operations import operations as operations_module
from millpond.transports.database.operations.operations import DatabaseOperations
from tests.rooms.operations.lives import HOSTILE, claim, complete, counts, fail, message, publish

DAY = 86_400


async def test_by_age(store: Transport, clock: ManualClock) -> None:
    await complete(store, "a", 3)
    await fail(store, "b", 2)
    clock.advance(60)
    await complete(store, "a", 1)
    assert await store.operations.purge(older_than=61) == 0
    assert await store.operations.purge(older_than=timedelta(seconds=60)) == 5
    assert [stats.queue for stats in await store.operations.count()] == ["a"]
    assert await counts(store, "a") == {State.COMPLETED: 1}
    assert await store.operations.purge(older_than=0) == 1
    assert await store.operations.count() == []


async def test_actions_of_operators_are_kept_for_a_year(
    store: Transport, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.access.record(Action(actor="ann", action="pause"))
    clock.advance(366 * DAY)
    await store.access.record(Action(actor="ann", action="resume"))
    await store.operations.purge()
    assert len(await store.access.actions()) == 2
    clock.advance(100 * DAY)
    monkeypatch.setattr(operations_module, "forget_actions", _refused)
    await store.operations.purge()
    monkeypatch.undo()
    assert len(await store.access.actions()) == 2, "an account that may not delete them"
    await store.operations.purge()
    assert [action.action for action in await store.access.actions()] == ["resume"]


def _refused(*args: object) -> None:
    raise MissingRight("DELETE on millpond_audit")


async def test_by_queue_and_state(store: Transport, clock: ManualClock) -> None:
    for queue in ("a", "b"):
        await complete(store, queue, 2)
        await fail(store, queue, 3)
    clock.advance(1)
    assert await store.operations.purge("a", older_than=1, states=[State.FAILED]) == 3
    assert await store.operations.purge("b", older_than=1, states=[State.COMPLETED]) == 2
    assert await store.operations.purge("unknown", older_than=0) == 0
    assert await counts(store, "a") == {State.COMPLETED: 2}
    assert await counts(store, "b") == {State.FAILED: 3}


async def test_by_retention(store: Transport, clock: ManualClock) -> None:
    """Each queue has its own; without one, messages are kept for ever."""
    for queue in ("short", "long", "for ever"):
        await complete(store, queue, 2)
        await fail(store, queue, 1)
    await store.operations.retain("short", completed=1 * DAY, failed=None)
    await store.operations.retain("long", completed=3 * DAY, failed=2 * DAY)
    clock.advance(1 * DAY - 1)
    assert await store.operations.purge() == 0
    clock.advance(1)
    assert await store.operations.purge() == 2
    clock.advance(2 * DAY)
    assert await store.operations.purge("short") == 0
    assert await store.operations.purge("long", states=[State.FAILED]) == 1
    assert await store.operations.purge() == 2
    clock.advance(1000 * DAY)
    assert await store.operations.purge() == 0
    assert await counts(store, "short") == {State.FAILED: 1}
    assert await counts(store, "long") == {}
    assert await counts(store, "for ever") == {State.COMPLETED: 2, State.FAILED: 1}


async def test_live_messages_are_not_purged(store: Transport, clock: ManualClock) -> None:
    await publish(store, message(), message())
    (held,) = await claim(store, lease=1000 * DAY)
    await store.operations.retain("q", completed=0, failed=0)
    clock.advance(500 * DAY)
    assert await store.operations.purge() == 0 == await store.operations.purge(older_than=0)
    assert await counts(store) == {State.PENDING: 1, State.PROCESSING: 1}
    assert await store.settle([Ack(held.receipt)]) == []


async def test_small_steps_with_many_settled_at_one_moment(
    store: Transport, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DatabaseOperations, "purge_batch", 3)
    for _ in range(3):
        await complete(store, number=10)
        await fail(store, number=1)
        clock.advance(1)
    kept = await complete(store, number=10)
    assert await store.operations.purge(older_than=1) == 33
    assert {row.id for row in await store.operations.archived()} == set(kept)


async def test_two_at_once_count_each_row_once(
    url: str, connect: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[Transport] = [await connect(url) for _ in range(3)]  # type: ignore[misc]
    await complete(stores[0], number=200)
    monkeypatch.setattr(DatabaseOperations, "purge_batch", 10)
    assert sum(await asyncio.gather(*(store.operations.purge(older_than=0) for store in stores))) == 200


async def test_settles_pass_while_it_purges(
    url: str, connect: Callable[..., object], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are settled during a purge are neither delayed nor deleted."""
    purger: Transport = await connect(url)  # type: ignore[misc]
    worker: Transport = await connect(url)  # type: ignore[misc]
    await complete(purger, number=1000)
    clock.advance(10)
    monkeypatch.setattr(DatabaseOperations, "purge_batch", 20)
    purging = asyncio.create_task(purger.operations.purge(older_than=10))
    settled = []
    while not purging.done():
        settled += await complete(worker, number=5)
    assert await purging == 1000
    assert len(settled) > 5
    assert {row.id for row in await worker.operations.archived(limit=10_000)} == set(settled)


async def test_ids_are_forgotten_when_their_window_is_over(
    url: str, connect: Callable[..., object], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Transport = await connect(url, dedupe_for=60)  # type: ignore[misc]
    monkeypatch.setattr(DatabaseOperations, "purge_batch", 3)
    await publish(store, *(message(id=id_from(str(n))) for n in range(10)))
    clock.advance(30)
    await publish(store, message(id=id_from("young")))
    await store.operations.cancel([row.id for row in await store.operations.browse("q")])
    await store.operations.purge(older_than=0)
    clock.advance(30)
    await store.operations.purge()
    assert not (await store.publish([message(id=id_from("young"))]))[0].new
    assert (await store.publish([message(id=id_from("3"))]))[0].new


async def test_names_are_data(store: Transport) -> None:
    for name in HOSTILE:
        await complete(store, name)
        await store.operations.retain(name, completed=0, failed=0)
    assert await store.operations.purge(HOSTILE[0]) == 1
    assert await store.operations.purge() == len(HOSTILE) - 1


async def test_bad_arguments(store: Transport) -> None:
    with pytest.raises(InvalidTime):
        await store.operations.purge(older_than=-1)
    with pytest.raises(InvalidOption):
        await store.operations.purge(states=["PENDING"])  # type: ignore[list-item]
    with pytest.raises(InvalidQueue):
        await store.operations.purge("")
    with pytest.raises(InvalidTime):
        await store.operations.retain("q", completed=-1, failed=None)
    with pytest.raises(InvalidOption):
        await store.operations.retain("q", completed=None, failed="1 day")  # type: ignore[arg-type]
