"""PostgreSQL marks every message that waits with the transaction that wrote it, for every writer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest

import millpond
from millpond import GiveBack, ManualClock, Message, Nack
from tests.shared import empty_database
from tests.triggers import execute

COLUMNS = "id, queue, priority, due_at, state, payload, created_at"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, "postgres")


@pytest.fixture
async def store(url: str, clock: ManualClock) -> AsyncIterator[Any]:
    store = await millpond.connect(url, clock=clock)
    yield store
    await store.close()


def last_transaction(url: str) -> int:
    return int(execute(url, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text")[0][0]) - 1


def written(url: str, id_: UUID) -> int | None:
    ((mark,),) = execute(url, f"SELECT written::text FROM millpond_message WHERE id = '{id_}'")
    return None if mark is None else int(mark)


def marked_since(url: str, id_: UUID, before: int) -> bool:
    return (written(url, id_) or 0) > before


@pytest.mark.parametrize("count", [1, 3, 50])
@pytest.mark.parametrize("given", [True, False])
async def test_a_publish(url: str, store: Any, count: int, given: bool) -> None:
    before = last_transaction(url)
    ids = [uuid4() if given else None for _ in range(count)]
    published = await store.publish([Message(queue="q", payload=b"", id=id_) for id_ in ids])
    assert all(marked_since(url, p.id, before) for p in published)


async def test_a_claimed_message_has_no_mark_until_it_waits_again(url: str, store: Any, clock: ManualClock) -> None:
    (published,) = await store.publish([Message(queue="q", payload=b"")])
    ends = [GiveBack, Nack, None]
    for end in ends:
        before = last_transaction(url)
        (claim,) = await store.claim(["q"], lease=30)
        assert written(url, published.id) is None
        if end is not None:
            await store.settle([end(claim.receipt)])
        clock.advance(31)
        if end is None:
            assert await store.workers.reap() == 1
        assert marked_since(url, published.id, before)


async def test_a_reschedule(url: str, store: Any) -> None:
    (published,) = await store.publish([Message(queue="q", payload=b"")])
    for change in ({"delay": 5}, {"priority": 7}, {"attempts": 3, "priority": 8}):
        before = last_transaction(url)
        await store.operations.reschedule([published.id], **change)
        assert marked_since(url, published.id, before)


async def test_the_messages_of_a_stream(url: str, store: Any) -> None:
    (published,) = await store.publish([Message(queue="q", payload=b"")])
    before = last_transaction(url)
    epoch, acked = await store.streams.open("s")
    assert await store.streams.claim("s", epoch, acked + 1, ["q"], 10) is not None
    assert written(url, published.id) is None
    await store.streams.release("s")
    assert marked_since(url, published.id, before)


async def test_a_plain_insert(url: str, store: Any) -> None:
    before = last_transaction(url)
    id_ = uuid4()
    execute(url, f"INSERT INTO millpond_message ({COLUMNS}) VALUES ('{id_}', 'q', 50, 0, 'PENDING', '', 0)")
    assert marked_since(url, id_, before)


@pytest.mark.parametrize("change", ["due_at = 7", "priority = 7", "crashes = 2", "queue = 'r'"])
async def test_a_plain_update_that_moves_a_message(url: str, store: Any, change: str) -> None:
    (published,) = await store.publish([Message(queue="q", payload=b"")])
    before = last_transaction(url)
    execute(url, f"UPDATE millpond_message SET {change}")
    assert marked_since(url, published.id, before)


async def test_a_plain_update_that_moves_no_message(url: str, store: Any) -> None:
    (published,) = await store.publish([Message(queue="q", payload=b"")])
    before = written(url, published.id)
    execute(url, "UPDATE millpond_message SET headers = '{}', due_at = due_at, priority = priority")
    assert written(url, published.id) == before


async def test_a_claim_and_a_give_back_by_plain_updates(url: str, store: Any) -> None:
    (published,) = await store.publish([Message(queue="q", payload=b"")])
    execute(url, "UPDATE millpond_message SET state = 'PROCESSING'")
    assert written(url, published.id) is None
    before = last_transaction(url)
    execute(url, "UPDATE millpond_message SET state = 'PENDING'")
    assert marked_since(url, published.id, before)


@pytest.mark.parametrize(("crashes", "lane"), [(0, 7), (1, 7), (2, 1007)])
async def test_a_plain_update_of_the_priority_moves_the_message_to_its_lane(
    url: str, store: Any, crashes: int, lane: int
) -> None:
    await store.publish([Message(queue="q", payload=b"")])
    execute(url, f"UPDATE millpond_message SET crashes = {crashes}", "UPDATE millpond_message SET priority = 7")
    assert execute(url, "SELECT priority, lane FROM millpond_message") == [(7, lane)]
