"""A reply that never comes: the work was done, nobody knows, and the store finds out."""

import struct
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pytest

import millpond
from millpond import Ack, Claim, GiveBack, Message, Nack, Reject, Store
from servers import Proxy
from tests.transactions.callers import address

LEASE = 12345.678901


class Place:
    """A store behind a proxy, and a look at its database past the proxy."""

    def __init__(self, store: Store, proxy: Proxy, url: str) -> None:
        self.store = store
        self.proxy = proxy
        self.url = url
        self.is_postgres = url.startswith("postgres")

    def rows(self, text: str) -> list[tuple[Any, ...]]:
        if self.is_postgres:
            with psycopg.connect(self.url) as c:
                return c.execute(text).fetchall()
        with pymysql.connect(**address(self.url)) as c, c.cursor() as cursor:
            cursor.execute(text)
            return list(cursor.fetchall())

    def archived(self) -> list[tuple[str, int]]:
        return sorted(self.rows("SELECT state, count(*) FROM message_archive GROUP BY state"))

    async def warm(self) -> None:
        """Let every statement be prepared, so that the next sending of one is its execution."""
        await self.store.publish([message("warm")])
        await self.store.publish([message("warm", id=uuid4())])
        await self.store.publish([message("warm") for _ in range(30)])
        a, b, c, d, e, *rest = await self.store.claim(["warm"], limit=100, lease=LEASE)
        outcomes = [Ack(a.receipt), Ack(b.receipt, keep=False), Nack(c.receipt), Reject(d.receipt), GiveBack(e.receipt)]
        assert await self.store.settle([*outcomes, *(Ack(claim.receipt) for claim in rest)]) == []
        await self.store.extend([a.receipt])
        assert await self.store.settle([Ack(x.receipt, keep=False) for x in await self.store.claim(["warm"], 9)]) == []

    async def claimed(self, count: int = 1) -> list[Claim]:
        await self.store.publish([message("q") for _ in range(count)])
        claims = await self.store.claim(["q"], limit=count)
        assert len(claims) == count
        return claims


@pytest.fixture(params=["postgres", "mariadb"])
def where(request: pytest.FixtureRequest) -> tuple[Proxy, str]:
    return request.getfixturevalue(f"{request.param}_proxy"), request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
async def place(where: tuple[Proxy, str]) -> AsyncIterator[Place]:
    proxy, url = where
    store = await millpond.connect(proxy.url(url), migrate=True, pool_size=1)
    place = Place(store, proxy, url)  # type: ignore[arg-type]
    await place.warm()
    yield place
    await store.close()


def message(queue: str, **more: Any) -> Message:
    return Message(queue=queue, payload=b"x", **more)


@pytest.mark.parametrize(
    ("outcome", "live", "archived"),
    [
        (Ack, [], ("COMPLETED", 1)),
        (lambda receipt: Ack(receipt, keep=False), [], None),
        (lambda receipt: Reject(receipt, reason="no"), [], ("FAILED", 1)),
        (lambda receipt: Nack(receipt, delay=60), [("RETRYABLE", 1, 1)], None),
        (GiveBack, [("PENDING", 0, 0)], None),
    ],
    ids=["ack", "ack without a trace", "reject", "nack", "give back"],
)
async def test_settle(place: Place, outcome: Callable[..., Any], live: list[Any], archived: tuple[str, int]) -> None:
    before = dict(place.archived())
    (claim,) = await place.claimed()
    # PostgreSQL settles by one statement, which carries the id; MySQL by a transaction.
    lost = place.proxy.cut_after(claim.receipt.id.bytes if place.is_postgres else b"COMMIT")
    assert await place.store.settle([outcome(claim.receipt)]) == []
    assert lost.is_set()
    assert place.rows("SELECT state, attempts, deliveries FROM message WHERE queue = 'q'") == live
    after = dict(place.archived())
    gained = [(state, count - before.get(state, 0)) for state, count in after.items() if count != before.get(state, 0)]
    assert gained == ([archived] if archived else [])


async def test_settle_of_many(place: Place) -> None:
    claims = await place.claimed(300)
    lost = place.proxy.cut_after(claims[150].receipt.id.bytes if place.is_postgres else b"COMMIT")
    assert await place.store.settle([Ack(claim.receipt) for claim in claims]) == []
    assert lost.is_set()
    assert place.rows("SELECT count(*) FROM message_archive WHERE queue = 'q'") == [(300,)]


async def test_a_stale_receipt_is_still_refused(place: Place) -> None:
    """The second look must not take another's work for its own."""
    (claim,) = await place.claimed()
    await place.store.settle([GiveBack(claim.receipt)])
    (others,) = await place.store.claim(["q"])
    (mine,) = await place.claimed()
    lost = place.proxy.cut_after(mine.receipt.id.bytes if place.is_postgres else b"COMMIT")
    assert await place.store.settle([Ack(claim.receipt), Ack(mine.receipt)]) == [claim.receipt]
    assert lost.is_set()
    assert await place.store.settle([Ack(others.receipt)]) == []


async def test_extend(place: Place) -> None:
    (claim,) = await place.claimed()
    lost = place.proxy.cut_after(claim.receipt.id.bytes if place.is_postgres else b"COMMIT")
    assert await place.store.extend([claim.receipt], lease=1000) == []
    assert lost.is_set()


@pytest.mark.parametrize("given", [False, True], ids=["generated ids", "given ids"])
@pytest.mark.parametrize("count", [1, 100])
async def test_publish(place: Place, count: int, given: bool) -> None:
    messages = [message("ledger", id=uuid4() if given else None) for _ in range(count)]
    # One new message is one statement, and no transaction.
    lost = place.proxy.cut_after(b"ledger" if count == 1 and not given else b"COMMIT")
    published = await place.store.publish(messages)
    assert lost.is_set()
    assert [p.new for p in published] == [True] * count
    assert len({p.id for p in published}) == count
    assert place.rows("SELECT count(*) FROM message WHERE queue = 'ledger'") == [(count,)]


async def test_publish_of_a_known_id(place: Place) -> None:
    """The second try must not take another's message for its own."""
    known, fresh = uuid4(), uuid4()
    await place.store.publish([message("q", id=known)])
    lost = place.proxy.cut_after(b"COMMIT")
    published = await place.store.publish([message("q", id=known), message("q", id=fresh), message("q", id=fresh)])
    assert lost.is_set()
    assert [p.new for p in published] == [False, True, False]


async def test_publish_that_never_arrived(place: Place) -> None:
    place.proxy.cut()
    published = await place.store.publish([message("q"), message("q", id=uuid4())])
    assert [p.new for p in published] == [True, True]
    assert place.rows("SELECT count(*) FROM message WHERE queue = 'q'") == [(2,)]


async def test_claim(place: Place) -> None:
    """What the lost claim took is returned by its second try, and counted once."""
    await place.store.publish([message("warm") for _ in range(3)])
    # On PostgreSQL the claim is one statement, known by its lease.
    pattern = struct.pack(">q", round(LEASE * 1e6)) if place.is_postgres else b"COMMIT"
    lost = place.proxy.cut_after(pattern)
    claims = await place.store.claim(["warm"], limit=3, lease=LEASE)
    assert lost.is_set()
    assert [claim.deliveries for claim in claims] == [1, 1, 1]
    assert await place.store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_claim_by_ids(place: Place) -> None:
    ids = [uuid4(), uuid4()]
    await place.store.publish([message("q", id=id_) for id_ in ids])
    first = await place.store.claim(["q"], ids=ids[:1], lease=LEASE)
    await place.store.settle([GiveBack(first[0].receipt)])
    pattern = struct.pack(">q", round(LEASE * 1e6)) if place.is_postgres else b"COMMIT"
    lost = place.proxy.cut_after(pattern)
    claims = await place.store.claim(["q"], limit=2, lease=LEASE, ids=ids)
    assert lost.is_set()
    assert {claim.message.id for claim in claims} == set(ids)
    assert [claim.deliveries for claim in claims] == [1, 1]
