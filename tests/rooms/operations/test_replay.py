"""Replay: archived messages are published again under new ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import uuid4

import pytest

from millpond import Ack, ManualClock, State, Transport
from millpond.errors import InvalidMessage, InvalidQueue
from millpond.message import replayed_id
from tests.rooms.operations.lives import HOSTILE, claim, complete, counts, fail, message, publish


async def test_a_message_lives_again(store: Transport, clock: ManualClock) -> None:
    (original,) = await fail(store, payload=b"\0body\xff", key="k", headers={"a": [1, "é"]}, expires=5)
    clock.advance(60)
    (published,) = await store.operations.replay([original], name="after the fix")
    assert (published.id, published.new) == (replayed_id(original, "after the fix"), True)
    (row,) = await store.operations.find([published.id])
    assert (row.queue, row.key, row.priority, row.payload, row.state) == ("q", "k", 0, b"\0body\xff", State.PENDING)
    assert row.headers == {"a": [1, "é"], "replay-of": str(original)}
    assert (row.deliveries, row.attempts, row.due_us, row.created_us) == (0, 0, clock.now(), clock.now())
    assert row.expires_us is None and row.first_attempt_us is None and row.error is None
    (held,) = await claim(store)
    assert held.receipt.id == published.id
    assert await store.settle([Ack(held.receipt)]) == []
    assert await counts(store) == {State.COMPLETED: 1, State.FAILED: 1}


async def test_twice_is_harmless(store: Transport) -> None:
    ids = await complete(store, number=3)
    first = await store.operations.replay(ids, name="n")
    again = await store.operations.replay([*ids, ids[0]], name="n")
    assert [p.new for p in first] == [True] * 3
    assert [(p.id, p.new) for p in again] == [(p.id, False) for p in first]
    assert [p.new for p in await store.operations.replay(ids, name="another")] == [True] * 3
    await store.settle([Ack(c.receipt) for c in await claim(store, number=6)])
    assert [p.new for p in await store.operations.replay(ids, name="n")] == [False] * 3
    assert await counts(store) == {State.COMPLETED: 9}


async def test_part_of_it_done_before(store: Transport) -> None:
    ids = await complete(store, number=4)
    await store.operations.replay(ids[1:3], name="n")
    assert [p.new for p in await store.operations.replay(ids, name="n")] == [True, False, False, True]


async def test_a_replay_of_a_replay(store: Transport) -> None:
    (first,) = await complete(store)
    (second,) = await store.operations.replay([first], name="n")
    await store.settle([Ack(c.receipt) for c in await claim(store)])
    (third,) = await store.operations.replay([second.id], name="n")
    assert (await store.operations.find([third.id]))[0].headers == {"replay-of": str(second.id)}


async def test_into_another_queue(store: Transport) -> None:
    ids = await fail(store, number=2)
    for name in HOSTILE:
        await store.operations.replay(ids, name=name, queue=name)
        assert {c.message.queue for c in await claim(store, name, 2)} == {name}


async def test_nothing_is_published_if_one_is_missing(store: Transport) -> None:
    (id_,) = await complete(store)
    (live,) = await publish(store, message())
    missing = [uuid4() for _ in range(20)]
    with pytest.raises(InvalidMessage, match=str(missing[0])):
        await store.operations.replay([id_, *missing], name="n")
    with pytest.raises(InvalidMessage, match=str(live)):
        await store.operations.replay([live], name="n")
    assert await counts(store) == {State.COMPLETED: 1, State.PENDING: 1}
    assert await store.operations.replay([], name="n") == []
    assert [p.new for p in await store.operations.replay([id_], name="n")] == [True]


async def test_any_number(store: Transport) -> None:
    ids = await complete(store, number=2300)
    published = await store.operations.replay(ids, name="n")
    assert [p.id for p in published] == [replayed_id(id_, "n") for id_ in ids]
    assert all(p.new for p in published)
    assert await counts(store) == {State.PENDING: 2300, State.COMPLETED: 2300}


async def test_several_at_once_publish_each_once(url: str, connect: Callable[..., object]) -> None:
    stores: list[Transport] = [await connect(url) for _ in range(4)]  # type: ignore[misc]
    ids = await complete(stores[0], number=50)
    runs = await asyncio.gather(*(store.operations.replay(ids, name="n") for store in stores))
    assert sum(p.new for run in runs for p in run) == 50
    assert (await counts(stores[0]))[State.PENDING] == 50


async def test_an_id_used_again_is_replayed_from_its_last_life(
    url: str, connect: Callable[..., object], clock: ManualClock
) -> None:
    store: Transport = await connect(url, dedupe_for=60)  # type: ignore[misc]
    id_ = uuid4()
    for body in (b"first", b"second"):
        await publish(store, message(id=id_, payload=body))
        await store.settle([Ack(c.receipt) for c in await claim(store)])
        clock.advance(61)
    (published,) = await store.operations.replay([id_], name="n")
    assert (await store.operations.find([published.id]))[0].payload == b"second"


async def test_bad_arguments(store: Transport) -> None:
    (id_,) = await complete(store)
    for name in ("", " ", "a\0", "x" * 300, None):
        with pytest.raises(InvalidQueue):
            await store.operations.replay([id_], name=name)  # type: ignore[arg-type]
    with pytest.raises(InvalidQueue):
        await store.operations.replay([id_], name="n", queue="")
    with pytest.raises(InvalidMessage):
        await store.operations.replay(["no id"], name="n")  # type: ignore[list-item]
