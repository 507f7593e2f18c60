"""Publish and settle within the caller's transaction, on every kind of connection.

Each test runs with every kind of caller. Synchronous ones run without an event loop.
"""

from typing import Any
from uuid import uuid4

import pytest

import millpond
from millpond import Ack, GiveBack, Message, Nack, Reject, Retry, State
from millpond.errors import WrongConnection
from tests.rooms.transactions.caller import Caller, Verbs, with_store
from tests.rooms.transactions.callers import ASYNC, SYNC, CallerCalls, params


def some(count: int, **more: Any) -> list[Message]:
    return [
        Message(queue=f"q{n}", payload=b"100 %s \x00\xff", key="k%s", headers={"%": "ü"}, **more) for n in range(count)
    ]


def test_commit_publishes(caller: Caller) -> None:
    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        published = await verbs.publish(some(3), calls.within)
        assert [p.new for p in published] == [True] * 3
        assert caller.states() == []
        await calls.commit()
        assert caller.states() == ["PENDING"] * 3
        assert caller.orders() == 1

    caller.run(body)

    async def look(store: Any) -> None:
        (claim,) = await store.claim(["q0"])
        assert claim.message.payload == b"100 %s \x00\xff"
        assert claim.message.key == "k%s"
        assert claim.message.headers == {"%": "ü"}

    with_store(caller.url, look)


def test_rollback_leaves_no_trace(caller: Caller) -> None:
    ids = [uuid4(), uuid4()]

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        await verbs.publish([*some(2), *(Message(queue="given", payload=b"", id=id_) for id_ in ids)], calls.within)
        await calls.rollback()
        assert caller.states() == []
        assert caller.orders() == 0
        assert caller.rows_of("SELECT count(*) FROM millpond_dedupe") == [(0,)]
        # The ids are free again, and the connection still works.
        again = await verbs.publish([Message(queue="given", payload=b"", id=ids[0])], calls.within)
        assert again[0].new
        await calls.commit()
        assert caller.states() == ["PENDING"]

    caller.run(body)


def test_many_at_once(caller: Caller) -> None:
    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        published = await verbs.publish([*some(150), *some(150, id=None)], calls.within)
        given = await verbs.publish([Message(queue="q", payload=b"x", id=uuid4()) for _ in range(150)], calls.within)
        assert all(p.new for p in [*published, *given])
        await calls.commit()
        assert len(caller.states()) == 450

    caller.run(body)


def test_a_known_id_is_told_and_harms_nothing(caller: Caller) -> None:
    known, other = uuid4(), uuid4()
    with_store(caller.url, lambda store: store.publish([Message(queue="q", payload=b"first", id=known)]))

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        messages = [Message(queue="q", payload=b"second", id=id_) for id_ in (known, other, other)]
        assert [p.new for p in await verbs.publish(messages, calls.within)] == [False, True, False]
        # Again in the same transaction.
        assert [p.new for p in await verbs.publish(messages, calls.within)] == [False, False, False]
        await calls.execute("INSERT INTO orders VALUES (2)")
        await calls.commit()
        assert caller.orders() == 2
        assert caller.states() == ["PENDING", "PENDING"]

    caller.run(body)


def test_every_outcome(caller: Caller) -> None:
    ack, drop, nack, reject, back, last = caller.claimed("a", "b", "c", "d", "e", "f")
    with_store(caller.url, lambda store: store.operations.configure("f", retry=Retry(attempts=1)))
    outcomes = [
        Ack(ack.receipt),
        Ack(drop.receipt, keep=False),
        Nack(nack.receipt, delay=60, error="50 % done"),
        Reject(reject.receipt, reason="no %s", error="ü"),
        GiveBack(back.receipt),
        Nack(last.receipt),
    ]
    claimed = ["PROCESSING"] * 6
    settled = ["COMPLETED", "RETRYABLE", "FAILED", "PENDING", "FAILED"]

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        assert await verbs.settle(outcomes, calls.within) == []
        assert caller.states() == claimed
        await calls.rollback()
        assert caller.states() == claimed
        assert caller.orders() == 0
        await calls.execute("INSERT INTO orders VALUES (1)")
        assert await verbs.settle(outcomes, calls.within) == []
        await calls.commit()
        assert caller.states() == settled
        assert caller.orders() == 1
        # The same settle again, as after a lost reply, is no failure. Messages without a trace cannot be recognised.
        assert await verbs.settle(outcomes, calls.within) == [drop.receipt]
        await calls.commit()
        assert caller.states() == settled

    caller.run(body)
    assert caller.rows_of("SELECT reason, error FROM millpond_archive WHERE queue = 'd'") == [("no %s", "ü")]
    assert caller.rows_of("SELECT last_error FROM millpond_message WHERE queue = 'c'") == [("50 % done",)]


def test_a_stale_receipt_is_refused_alone(caller: Caller) -> None:
    (stale, good) = caller.claimed("a", "b")
    caller.settle(GiveBack(stale.receipt))
    with_store(caller.url, lambda store: store.claim(["a"]))  # another claim owns it now

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await calls.execute("INSERT INTO orders VALUES (1)")
        refused = await verbs.settle([Ack(stale.receipt), Ack(good.receipt)], calls.within)
        assert refused == [stale.receipt]
        await calls.commit()
        assert caller.states() == [State.PROCESSING, State.COMPLETED]

    caller.run(body)


def test_a_settle_that_is_rolled_back_can_be_done_outside(caller: Caller) -> None:
    (claim,) = caller.claimed("a")

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        await verbs.settle([Ack(claim.receipt)], calls.within)
        await calls.rollback()

    caller.run(body)
    assert caller.settle(Reject(claim.receipt)) == []
    assert caller.states() == [State.FAILED]


# Not Django, which forbids its connections in the thread of an event loop.
@pytest.mark.parametrize("name", params({name: kind for name, kind in SYNC.items() if not name.startswith("Django")}))
async def test_sync_connections_are_taken_by_async_verbs_too(name: str, request: pytest.FixtureRequest) -> None:
    database, opened = SYNC[name]
    url = request.getfixturevalue(f"{database}_url")
    store = await millpond.connect(url, migrate=True)
    try:
        async with opened(url) as calls:
            assert (await store.publish(some(1), within=calls.within))[0].new
            await calls.commit()
        (claim,) = await store.claim(["q0"])
        async with opened(url) as calls:
            assert await store.settle([Ack(claim.receipt)], within=calls.within) == []
            await calls.commit()
        assert await store.settle([Ack(claim.receipt)]) == []
    finally:
        await store.close()


@pytest.mark.parametrize("name", params(ASYNC))
def test_async_connections_are_refused_by_sync_verbs(name: str, request: pytest.FixtureRequest) -> None:
    database, opened = ASYNC[name]
    caller = Caller(request.getfixturevalue(f"{database}_url"), opened, sync=False)

    async def body(calls: CallerCalls, verbs: Verbs) -> None:
        with pytest.raises(WrongConnection, match=r"await store\.publish"):
            verbs.store.transactions.publish_sync(some(1), within=calls.within)
        with pytest.raises(WrongConnection, match=r"await store\.settle"):
            verbs.store.transactions.settle_sync([Ack(millpond.Receipt(uuid4(), 1))], within=calls.within)

    caller.run(body)
