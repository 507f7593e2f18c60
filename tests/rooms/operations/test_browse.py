"""Browse and find: pages by key, in the order of claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from uuid import uuid4

import pytest

from millpond import ManualClock, Nack, Row, State, Transport
from millpond.errors import InvalidMessage, InvalidOption, InvalidPriority, InvalidQueue
from millpond.message import new_id
from tests.rooms.operations.lives import HOSTILE, claim, complete, crash, fail, message, pages, publish


async def test_the_order_is_that_of_claims(store: Transport, clock: ManualClock) -> None:
    await publish(store, *(message(priority=p, delay=delay) for p in (7, 3, 5) for delay in (2, 0, 1)))
    clock.advance(10)
    rows = await store.operations.browse("q")
    claimed = await store.claim(["q"], 9)
    assert [row.id for row in rows] == [c.receipt.id for c in claimed]
    assert all(row.state is State.PENDING and row.payload == b"x" for row in rows)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
async def test_pages_are_whole(store: Transport, clock: ManualClock, size: int) -> None:
    """Ties in due time, several lanes and queues, messages in every live state."""
    for queue in ("a", "b", "c"):
        await publish(store, *(message(queue, priority=n % 3) for n in range(12)))
        held = await claim(store, queue, 5)
        await store.settle([Nack(held[0].receipt), Nack(held[1].receipt, delay=5)])
        clock.advance(1)
        await publish(store, *(message(queue, priority=n % 3) for n in range(3)))
    for filters, number in (({}, 45), ({"queue": "b"}, 15), ({"states": ["PENDING", "RETRYABLE"]}, 36)):
        rows: list[Row] = list(chain(*await pages(store.operations.browse, size, **filters)))
        assert len(rows) == len({row.id for row in rows}) == number
        assert [row.position for row in rows] == sorted(row.position for row in rows)


async def test_filters(store: Transport) -> None:
    await publish(store, *(message(key=f"k{n % 2}") for n in range(6)))
    first, *_ = await claim(store, number=3)
    await store.settle([Nack(first.receipt)])
    for states, number in (
        (["PENDING"], 3),
        ([State.PROCESSING], 2),
        ([State.RETRYABLE], 1),
        (["PROCESSING", "RETRYABLE"], 3),
        ([], 0),
        (None, 6),
    ):
        rows = await store.operations.browse("q", states=states)  # type: ignore[arg-type]
        assert len(rows) == number and {row.state for row in rows} <= set(states or State)
    assert [row.key for row in await store.operations.browse("q", key="k1")] == ["k1"] * 3
    assert await store.operations.browse("other") == [] == await store.operations.browse("q", key="k'1")


async def test_a_message_in_hand_shows_its_lease(store: Transport, clock: ManualClock) -> None:
    await publish(store, message(headers={"a": 1}))
    (held,) = await claim(store, lease=30)
    (row,) = await store.operations.browse("q", states=[State.PROCESSING])
    assert (row.headers, row.deliveries, row.attempts) == ({"a": 1}, 1, 0)
    assert (row.acquired_us, row.lease_us) == (held.claimed_us, held.lease_us)
    assert row.archived_us is None and row.reason is None


async def test_suspects_come_last(store: Transport, clock: ManualClock) -> None:
    (suspect,) = await publish(store, message(priority=0))
    await crash(store, times=2)
    await publish(store, *(message(priority=9) for _ in range(3)))
    rows = list(chain(*await pages(store.operations.browse, 1, queue="q")))
    assert [row.id for row in rows][-1] == suspect and rows[-1].suspect
    await claim(store, ids=[suspect], lease=1)
    (row,) = await store.operations.browse("q", states=[State.PROCESSING])
    assert row.suspect and row.position == rows[-1].position


async def test_a_position_is_plain(store: Transport) -> None:
    """A user interface may send the position as JSON and receive it again."""
    await publish(store, *(message() for _ in range(3)))
    await complete(store, number=3)
    for verb in (store.operations.browse, store.operations.archived):
        rows = await verb("q")
        after = json.loads(json.dumps(rows[1].position, default=str))
        assert await verb("q", after=after) == rows[2:]


async def test_a_page_after_what_is_gone(store: Transport) -> None:
    await publish(store, *(message() for _ in range(4)))
    rows = await store.operations.browse("q")
    await store.operations.cancel([rows[1].id])
    assert await store.operations.browse("q", after=rows[1].position) == rows[2:]


async def test_find_sees_both_tables(store: Transport) -> None:
    (live,) = await publish(store, message("live"))
    (done,) = await complete(store)
    (failed,) = await fail(store)
    rows = await store.operations.find([failed, new_id(), done, live, done])
    assert [(row.id, row.state) for row in rows] == [
        (live, State.PENDING),
        (failed, State.FAILED),
        (done, State.COMPLETED),
    ]
    assert rows[1].reason == "bad" and rows[1].archived_us is not None
    assert await store.operations.find([]) == [] == await store.operations.find([uuid4()])
    assert await store.operations.find([str(live)]) == rows[:1]  # type: ignore[list-item]


async def test_find_takes_any_number(store: Transport) -> None:
    ids = await publish(store, *(message() for _ in range(2500)))
    assert [row.id for row in await store.operations.find(ids)] == ids


async def test_headers_that_are_no_json_hide_nothing(sqlite_url: str, connect: Callable[..., object]) -> None:
    import sqlite3

    store = await connect(sqlite_url)  # type: ignore[misc]
    await publish(store, message(), message())
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as raw:
        raw.execute("UPDATE millpond_message SET headers = '{broken'")
    raw.close()
    assert [row.headers for row in await store.operations.browse("q")] == [{"undecodable": "{broken"}] * 2


async def test_names_are_data(store: Transport) -> None:
    await publish(store, *(message(name, key=name) for name in HOSTILE))
    await complete(store, HOSTILE[0])
    for name in HOSTILE:
        (row,) = await store.operations.browse(name, key=name)
        assert (row.queue, row.key) == (name, name)
    rows = list(chain(*await pages(store.operations.browse, 1)))
    assert [row.queue for row in rows] == sorted(HOSTILE)
    assert await store.operations.archived(HOSTILE[0], key="'; --") == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"limit": -1}, InvalidOption),
        ({"limit": 10_001}, InvalidOption),
        ({"limit": True}, InvalidOption),
        ({"limit": "5"}, InvalidOption),
        ({"states": ["COMPLETED"]}, InvalidOption),
        ({"states": ["pending"]}, InvalidOption),
        ({"queue": ""}, InvalidQueue),
        ({"key": "a\0"}, InvalidMessage),
        ({"key": 7}, InvalidMessage),
        ({"after": "x"}, InvalidOption),
        ({"after": (1, uuid4())}, InvalidOption),
        ({"after": ("q", False, 300, 0, uuid4())}, InvalidPriority),
        ({"after": ("q", False, 3, 0, "x")}, InvalidMessage),
    ],
)
async def test_bad_arguments(store: Transport, arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        await store.operations.browse(**arguments)  # type: ignore[arg-type]


async def test_a_page_of_nothing(store: Transport) -> None:
    await publish(store, message())
    assert await store.operations.browse(limit=0) == [] == await store.operations.archived(limit=0)
    with pytest.raises(InvalidMessage):
        await store.operations.find(["no id"])  # type: ignore[list-item]
