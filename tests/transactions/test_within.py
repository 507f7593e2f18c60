"""Publish and settle within the caller's own transaction, on every connection a caller may have.

Each test runs with every kind of caller. The synchronous ones run without any event loop.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pytest

import millpond
from millpond import Ack, GiveBack, Message, Nack, Reject, State
from millpond.errors import WrongConnection
from millpond.transports import detached
from tests.transactions.callers import ASYNC, SYNC, Hand, Open, address, path


class Caller:
    """One kind of caller, its database, and a look at that database from the side."""

    def __init__(self, url: str, opened: Open, *, sync: bool) -> None:
        self.url = url
        self.open = opened
        self.sync = sync
        with_store(url, lambda store: nothing(), migrate=True)
        self.rows_of("CREATE TABLE IF NOT EXISTS orders (id INTEGER)")

    def run(self, body: Callable[[Hand, "Verbs"], Coroutine[Any, Any, None]]) -> None:
        """Run a test's body with this caller's connection."""

        async def whole() -> None:
            if self.sync:
                store = detached(self.url)
            else:
                store = await millpond.connect(self.url)
            try:
                async with self.open(self.url) as hand:
                    await body(hand, Verbs(store, sync=self.sync))
            finally:
                await store.close()

        if self.sync:
            without_loop(whole())
        else:
            asyncio.run(whole())

    def rows_of(self, text: str) -> list[tuple[Any, ...]]:
        scheme = self.url.partition(":")[0]
        if scheme == "sqlite":
            with closing(sqlite3.connect(path(self.url), isolation_level=None)) as c:
                return c.execute(text).fetchall()
        if scheme == "mysql":
            with closing(pymysql.connect(**address(self.url), autocommit=True)) as c, c.cursor() as cursor:
                cursor.execute(text)
                return list(cursor.fetchall())
        with psycopg.connect(self.url, autocommit=True) as c:
            cursor = c.execute(text)
            return cursor.fetchall() if cursor.description else []

    def orders(self) -> int:
        return int(self.rows_of("SELECT count(*) FROM orders")[0][0])

    def states(self) -> list[str]:
        """Of all messages, live and archived, by queue name."""
        rows = self.rows_of("SELECT queue, state FROM message UNION ALL SELECT queue, state FROM message_archive")
        return [state for _, state in sorted(rows)]

    def claimed(self, *queues: str) -> list[millpond.Claim]:
        """One message of each queue, published and claimed."""

        async def claim(store: Any) -> list[millpond.Claim]:
            await store.publish([Message(queue=queue, payload=b"%s") for queue in queues])
            return [(await store.claim([queue]))[0] for queue in queues]

        return with_store(self.url, claim)

    def settle(self, *outcomes: millpond.Outcome) -> list[millpond.Receipt]:
        return with_store(self.url, lambda store: store.settle(outcomes))


class Verbs:
    """A store's verbs, whichever form the caller must use."""

    def __init__(self, store: Any, *, sync: bool) -> None:
        self.store = store
        self._sync = sync

    async def publish(self, messages: Sequence[Message], within: Any) -> list[millpond.Published]:
        if self._sync:
            return self.store.publish_sync(messages, within=within)
        return await self.store.publish(messages, within=within)

    async def settle(self, outcomes: Sequence[millpond.Outcome], within: Any) -> list[millpond.Receipt]:
        if self._sync:
            return self.store.settle_sync(outcomes, within=within)
        return await self.store.settle(outcomes, within=within)


def without_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("something waited")


def with_store(url: str, work: Callable[[Any], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def whole() -> Any:
        store = await millpond.connect(url, **options)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(whole())


async def nothing() -> None: ...


@pytest.fixture(params=[*SYNC, *ASYNC])
def caller(request: pytest.FixtureRequest) -> Caller:
    database, opened = (SYNC | ASYNC)[request.param]
    return Caller(request.getfixturevalue(f"{database}_url"), opened, sync=request.param in SYNC)


def some(count: int, **more: Any) -> list[Message]:
    return [
        Message(queue=f"q{n}", payload=b"100 %s \x00\xff", key="k%s", headers={"%": "ü"}, **more) for n in range(count)
    ]


def test_commit_publishes(caller: Caller) -> None:
    async def body(hand: Hand, verbs: Verbs) -> None:
        await hand.execute("INSERT INTO orders VALUES (1)")
        published = await verbs.publish(some(3), hand.within)
        assert [p.new for p in published] == [True] * 3
        assert caller.states() == []
        await hand.commit()
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

    async def body(hand: Hand, verbs: Verbs) -> None:
        await hand.execute("INSERT INTO orders VALUES (1)")
        await verbs.publish([*some(2), *(Message(queue="given", payload=b"", id=id_) for id_ in ids)], hand.within)
        await hand.rollback()
        assert caller.states() == []
        assert caller.orders() == 0
        assert caller.rows_of("SELECT count(*) FROM message_dedupe") == [(0,)]
        # The ids are as free as before, and the connection is as good as before.
        again = await verbs.publish([Message(queue="given", payload=b"", id=ids[0])], hand.within)
        assert again[0].new
        await hand.commit()
        assert caller.states() == ["PENDING"]

    caller.run(body)


def test_many_at_once(caller: Caller) -> None:
    async def body(hand: Hand, verbs: Verbs) -> None:
        published = await verbs.publish([*some(150), *some(150, id=None)], hand.within)
        given = await verbs.publish([Message(queue="q", payload=b"x", id=uuid4()) for _ in range(150)], hand.within)
        assert all(p.new for p in [*published, *given])
        await hand.commit()
        assert len(caller.states()) == 450

    caller.run(body)


def test_a_known_id_is_told_and_harms_nothing(caller: Caller) -> None:
    known, other = uuid4(), uuid4()
    with_store(caller.url, lambda store: store.publish([Message(queue="q", payload=b"first", id=known)]))

    async def body(hand: Hand, verbs: Verbs) -> None:
        await hand.execute("INSERT INTO orders VALUES (1)")
        messages = [Message(queue="q", payload=b"second", id=id_) for id_ in (known, other, other)]
        assert [p.new for p in await verbs.publish(messages, hand.within)] == [False, True, False]
        # Again in the same transaction.
        assert [p.new for p in await verbs.publish(messages, hand.within)] == [False, False, False]
        await hand.execute("INSERT INTO orders VALUES (2)")
        await hand.commit()
        assert caller.orders() == 2
        assert caller.states() == ["PENDING", "PENDING"]

    caller.run(body)


def test_every_outcome(caller: Caller) -> None:
    ack, drop, nack, reject, back = caller.claimed("a", "b", "c", "d", "e")
    outcomes = [
        Ack(ack.receipt),
        Ack(drop.receipt, keep=False),
        Nack(nack.receipt, delay=60, error="50 % done"),
        Reject(reject.receipt, reason="no %s", error="ü"),
        GiveBack(back.receipt),
    ]
    claimed = ["PROCESSING"] * 5
    settled = ["COMPLETED", "RETRYABLE", "FAILED", "PENDING"]

    async def body(hand: Hand, verbs: Verbs) -> None:
        await hand.execute("INSERT INTO orders VALUES (1)")
        assert await verbs.settle(outcomes, hand.within) == []
        assert caller.states() == claimed
        await hand.rollback()
        assert caller.states() == claimed
        assert caller.orders() == 0
        await hand.execute("INSERT INTO orders VALUES (1)")
        assert await verbs.settle(outcomes, hand.within) == []
        await hand.commit()
        assert caller.states() == settled
        assert caller.orders() == 1
        # The same again, as after a lost reply, is no failure; but what left no trace cannot be recognised.
        assert await verbs.settle(outcomes, hand.within) == [drop.receipt]
        await hand.commit()
        assert caller.states() == settled

    caller.run(body)
    assert caller.rows_of("SELECT reason, error FROM message_archive WHERE queue = 'd'") == [("no %s", "ü")]
    assert caller.rows_of("SELECT last_error FROM message WHERE queue = 'c'") == [("50 % done",)]


def test_a_stale_receipt_is_refused_alone(caller: Caller) -> None:
    (stale, good) = caller.claimed("a", "b")
    caller.settle(GiveBack(stale.receipt))
    with_store(caller.url, lambda store: store.claim(["a"]))  # another's now

    async def body(hand: Hand, verbs: Verbs) -> None:
        await hand.execute("INSERT INTO orders VALUES (1)")
        refused = await verbs.settle([Ack(stale.receipt), Ack(good.receipt)], hand.within)
        assert refused == [stale.receipt]
        await hand.commit()
        assert caller.states() == [State.PROCESSING, State.COMPLETED]

    caller.run(body)


def test_a_settle_that_is_rolled_back_can_be_done_outside(caller: Caller) -> None:
    (claim,) = caller.claimed("a")

    async def body(hand: Hand, verbs: Verbs) -> None:
        await verbs.settle([Ack(claim.receipt)], hand.within)
        await hand.rollback()

    caller.run(body)
    assert caller.settle(Reject(claim.receipt)) == []
    assert caller.states() == [State.FAILED]


# Not Django, which forbids its connections in a loop's thread.
@pytest.mark.parametrize("name", [name for name in SYNC if not name.startswith("Django")])
async def test_sync_connections_are_taken_by_async_verbs_too(name: str, request: pytest.FixtureRequest) -> None:
    database, opened = SYNC[name]
    url = request.getfixturevalue(f"{database}_url")
    store = await millpond.connect(url, migrate=True)
    try:
        async with opened(url) as hand:
            assert (await store.publish(some(1), within=hand.within))[0].new
            await hand.commit()
        (claim,) = await store.claim(["q0"])
        async with opened(url) as hand:
            assert await store.settle([Ack(claim.receipt)], within=hand.within) == []
            await hand.commit()
        assert await store.settle([Ack(claim.receipt)]) == []
    finally:
        await store.close()


@pytest.mark.parametrize("name", ASYNC)
def test_async_connections_are_refused_by_sync_verbs(name: str, request: pytest.FixtureRequest) -> None:
    database, opened = ASYNC[name]
    caller = Caller(request.getfixturevalue(f"{database}_url"), opened, sync=False)

    async def body(hand: Hand, verbs: Verbs) -> None:
        with pytest.raises(WrongConnection, match=r"await store\.publish"):
            verbs.store.publish_sync(some(1), within=hand.within)
        with pytest.raises(WrongConnection, match=r"await store\.settle"):
            verbs.store.settle_sync([Ack(millpond.Receipt(uuid4(), 1))], within=hand.within)

    caller.run(body)
