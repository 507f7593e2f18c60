"""Rows and triggers of other programs: one bad row or one failing write does not hold up other messages."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

import millpond
from millpond import Ack, Message, Millpond, State
from millpond.errors import StoreError
from tests.shared import KINDS, empty_database
from tests.triggers import execute, failing, id_literal
from tests.worker.conftest import drained, working


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Any]:
    store = await millpond.connect(url, migrate=True)
    yield store
    await store.close()


async def test_a_refusal_that_cannot_be_settled_holds_up_no_other_message(url: str, store: Any) -> None:
    expired, good = await store.publish(
        [Message(queue="q", payload=b"expired", expires=0), Message(queue="q", payload=b"good")]
    )
    with failing(url, "INSERT", "millpond_archive"):
        (claim,) = await store.claim(["q"], limit=10)
        assert claim.receipt.id == good.id
    (row,) = await store.operations.find([expired.id])
    assert row.state is State.PROCESSING  # until its lease ends


async def test_a_queue_that_cannot_be_claimed_holds_up_no_message_of_the_others(url: str, store: Any) -> None:
    queues = ["a", "b", "c"]
    await store.publish([Message(queue=queue, payload=b"") for queue in queues])
    claimed = []
    with failing(url, "UPDATE", "millpond_message", "ROW.queue = 'b'"):
        for _ in range(3):  # each queue is the first one once
            try:
                claimed += await store.claim(queues, limit=9)
            except StoreError:
                continue
    assert {claim.message.queue for claim in claimed} == {"a", "c"}
    rows = await store.operations.browse("a") + await store.operations.browse("c")
    assert {row.id for row in rows} == {claim.receipt.id for claim in claimed}


async def test_a_new_priority_moves_a_message_in_the_order_of_claims(url: str, store: Any) -> None:
    published = await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(4)])
    assert [claim.message.payload for claim in await store.claim(["q"])] == [b"0"]  # from now on it has a place
    execute(url, f"UPDATE millpond_message SET priority = 1 WHERE id = {id_literal(url, published[3].id)}")
    execute(url, f"UPDATE millpond_message SET priority = 99 WHERE id = {id_literal(url, published[1].id)}")
    browsed = [row.payload for row in await store.operations.browse("q") if row.state is State.PENDING]
    other = await millpond.connect(url)
    claimed = [claim.message.payload for claim in await other.claim(["q"], limit=10)]
    await other.close()
    assert browsed == claimed == [b"3", b"2", b"1"]


BROKEN = {
    "no JSON": "'not json'",
    "no object": "'[1, 2]'",
    "a number": "'7'",
    "too deep": "'" + "[" * 20_000 + "'",
}


@pytest.mark.parametrize("headers", BROKEN.values(), ids=BROKEN)
async def test_a_message_with_unreadable_headers_fails_alone(url: str, store: Any, headers: str) -> None:
    published = await store.publish([Message(queue="q", payload=b"%d" % n, headers={"n": n}) for n in range(20)])
    bad = published[3].id
    execute(url, f"UPDATE millpond_message SET headers = {headers} WHERE id = {id_literal(url, bad)}")
    assert len(await store.operations.browse("q", limit=100)) == 20
    claims = await store.claim(["q"], limit=100)
    assert {claim.receipt.id for claim in claims} == {p.id for p in published} - {bad}
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
    (row,) = await store.operations.archived("q", states=[State.FAILED])
    assert (row.id, row.reason, row.attempts) == (bad, "undecodable headers", 0)
    assert row.error
    assert list(row.headers) == ["undecodable"]
    # An operator may run it again all the same.
    (again,) = await store.operations.replay([bad], name="again")
    (claim,) = await store.claim(["q"])
    assert claim.receipt.id == again.id
    assert set(claim.message.headers) == {"undecodable", "replay-of"}


async def test_a_worker_handles_the_neighbours_of_an_unreadable_message(url: str, store: Any) -> None:
    published = await store.publish([Message(queue="q", payload=b"%d" % n, headers={"n": n}) for n in range(20)])
    execute(url, f"UPDATE millpond_message SET headers = 'not json' WHERE id = {id_literal(url, published[3].id)}")
    pond = Millpond(url)
    handled = []

    @pond.subscriber("q")
    async def handle(body: bytes) -> None:
        handled.append(body)

    async with working(pond):
        assert await drained(pond) == {State.COMPLETED: 19, State.FAILED: 1}
    await pond.close()
    assert len(handled) == 19
    assert b"3" not in handled


async def test_text_in_sqlite_that_is_no_utf_8_fails_alone(sqlite_url: str) -> None:
    store: Any = await millpond.connect(sqlite_url)
    bad, text, good = await store.publish([Message(queue="q", payload=b"x", headers={"n": 1}) for _ in range(3)])
    execute(
        sqlite_url,
        "UPDATE millpond_message SET headers = CAST(x'7b2261223a22ff227d' AS TEXT) "
        f"WHERE id = {id_literal(sqlite_url, bad.id)}",
        f"UPDATE millpond_message SET payload = 'text' WHERE id = {id_literal(sqlite_url, text.id)}",
    )
    assert len(await store.operations.browse("q")) == 3
    claims = await store.claim(["q"], limit=10)
    assert {(claim.receipt.id, claim.message.payload) for claim in claims} == {(text.id, b"text"), (good.id, b"x")}
    (row,) = await store.operations.archived("q")
    assert (row.id, row.reason) == (bad.id, "undecodable headers")
    await store.close()


@pytest.mark.parametrize("column", ["created_at", "due_at", "expires_at"])
async def test_the_table_refuses_a_time_that_cannot_be_shown(url: str, store: Any, column: str) -> None:
    await store.publish([Message(queue="q", payload=b"x")])
    with pytest.raises(Exception, match="millpond_message_times"):
        execute(url, f"UPDATE millpond_message SET {column} = 1760000000000000000")  # nanoseconds


async def test_the_table_refuses_a_priority_that_no_claim_would_find(url: str, store: Any) -> None:
    await store.publish([Message(queue="q", payload=b"x")])
    for priority in (-1, 101, 2000):
        with pytest.raises(Exception, match="millpond_message_priority"):
            execute(url, f"UPDATE millpond_message SET priority = {priority}")
        with pytest.raises(Exception, match="millpond_message_priority"):
            execute(
                url,
                "INSERT INTO millpond_message (id, created_at, due_at, priority, state, queue, payload) "
                f"VALUES ({id_literal(url, uuid4())}, 0, 0, {priority}, 'PENDING', 'q', '')",
            )
    (claim,) = await store.claim(["q"], limit=10)
    assert claim.message.priority == 50


@pytest.mark.parametrize(
    "change",
    [
        *("priority = 1.5", "priority = 'x'", "crashes = 'x'", "crashes = 0.5", "due_at = 1.5", "attempts = 'x'"),
        *("lease_until = 'x'", "token = 1.5", "key = x'ff'", "headers = x'7b7d'", "queue = x'71'"),
    ],
)
async def test_sqlite_refuses_values_of_another_type(sqlite_url: str, change: str) -> None:
    store = await millpond.connect(sqlite_url)
    await store.publish([Message(queue="q", payload=b"x")])
    with pytest.raises(sqlite3.IntegrityError, match=r"millpond_message_(types|priority)"):
        execute(sqlite_url, f"UPDATE millpond_message SET {change}")
    assert len(await store.claim(["q"], limit=10)) == 1
    await store.close()
