"""A lost reply: the server did the work, the client does not know, and the store finds out."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pytest

import millpond
from millpond import Ack, Claim, GiveBack, Message, Nack, Reject, StoreUnavailable, Transport
from servers import Proxy
from tests.rooms.transactions.callers import address
from tests.shared import empty_database
from tests.waiting import until

pytestmark = pytest.mark.slow

LEASE = 12345.678901


class ProxiedStore:
    """A store behind a proxy, and a direct connection to its database."""

    def __init__(self, store: Transport, proxy: Proxy, url: str) -> None:
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
        return sorted(self.rows("SELECT state, count(*) FROM millpond_archive GROUP BY state"))

    async def warm(self) -> None:
        """Prepare every statement; after that, each message to the server is an execution."""
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
    return request.getfixturevalue(f"{request.param}_proxy"), empty_database(request, request.param)


@pytest.fixture
async def proxied(where: tuple[Proxy, str]) -> AsyncIterator[ProxiedStore]:
    proxy, url = where
    store = await millpond.connect(proxy.url(url), pool_size=1)
    proxied = ProxiedStore(store, proxy, url)  # type: ignore[arg-type]
    await proxied.warm()
    yield proxied
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
async def test_settle(
    proxied: ProxiedStore, outcome: Callable[..., Any], live: list[Any], archived: tuple[str, int]
) -> None:
    before = dict(proxied.archived())
    (claim,) = await proxied.claimed()
    # PostgreSQL settles with one statement, which contains the id; MySQL with a transaction.
    lost = proxied.proxy.cut_after(claim.receipt.id.bytes if proxied.is_postgres else b"COMMIT")
    assert await proxied.store.settle([outcome(claim.receipt)]) == []
    assert lost.is_set()
    assert proxied.rows("SELECT state, attempts, deliveries FROM millpond_message WHERE queue = 'q'") == live
    after = dict(proxied.archived())
    gained = [(state, count - before.get(state, 0)) for state, count in after.items() if count != before.get(state, 0)]
    assert gained == ([archived] if archived else [])


async def test_settle_of_many(proxied: ProxiedStore) -> None:
    claims = await proxied.claimed(300)
    lost = proxied.proxy.cut_after(claims[150].receipt.id.bytes if proxied.is_postgres else b"COMMIT")
    assert await proxied.store.settle([Ack(claim.receipt) for claim in claims]) == []
    assert lost.is_set()
    assert proxied.rows("SELECT count(*) FROM millpond_archive WHERE queue = 'q'") == [(300,)]


_SLOW_DELETES = """
CREATE TABLE slow_deletes (n int);
INSERT INTO slow_deletes VALUES (1);
CREATE FUNCTION slow_delete() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
WHILE EXISTS (SELECT 1 FROM slow_deletes) LOOP PERFORM pg_sleep(0.02); END LOOP; RETURN OLD; END $$;
CREATE TRIGGER slow_delete BEFORE DELETE ON millpond_message FOR EACH ROW EXECUTE FUNCTION slow_delete();
"""


async def test_a_settle_that_goes_on_after_its_connection(
    postgres_proxy: Proxy, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try finds the row locked by the first one, which then deletes it: the outcome was written."""
    store: Any = await millpond.connect(postgres_proxy.url(postgres_url), migrate=True)
    await store.publish([message("q")])
    (claim,) = await store.claim(["q"])
    is_locked = asyncio.Event()
    monkeypatch.setattr(store.hints, "settled", lambda *_, **__: is_locked.set())
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute(_SLOW_DELETES)
        settle = asyncio.create_task(store.settle([Ack(claim.receipt, keep=False)]))
        waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
        await until(lambda: bool(c.execute(waits).fetchall()), "a settle that waits")
        postgres_proxy.cut()
        await is_locked.wait()
        c.execute("DELETE FROM slow_deletes")
        assert await settle == []
        assert c.execute("SELECT count(*) FROM millpond_message").fetchall() == [(0,)]
    await store.close()


async def test_a_stale_receipt_is_still_refused(proxied: ProxiedStore) -> None:
    """The second try must not count the work of another caller as its own."""
    (claim,) = await proxied.claimed()
    await proxied.store.settle([GiveBack(claim.receipt)])
    (others,) = await proxied.store.claim(["q"])
    (mine,) = await proxied.claimed()
    lost = proxied.proxy.cut_after(mine.receipt.id.bytes if proxied.is_postgres else b"COMMIT")
    assert await proxied.store.settle([Ack(claim.receipt), Ack(mine.receipt)]) == [claim.receipt]
    assert lost.is_set()
    assert await proxied.store.settle([Ack(others.receipt)]) == []


async def test_extend(proxied: ProxiedStore) -> None:
    (claim,) = await proxied.claimed()
    lost = proxied.proxy.cut_after(claim.receipt.id.bytes if proxied.is_postgres else b"COMMIT")
    assert await proxied.store.extend([claim.receipt], lease=1000) == []
    assert lost.is_set()


@pytest.mark.parametrize("given", [False, True], ids=["generated ids", "given ids"])
@pytest.mark.parametrize("count", [1, 100, 500])
async def test_publish(proxied: ProxiedStore, count: int, given: bool) -> None:
    messages = [message("ledger", id=uuid4() if given else None) for _ in range(count)]
    # One statement without a transaction: one new message, on PostgreSQL also several ones or given ids.
    one = (given or count < 500) if proxied.is_postgres else (count == 1 and not given)
    lost = proxied.proxy.cut_after(b"ledger" if one else b"COMMIT")
    published = await proxied.store.publish(messages)
    assert lost.is_set()
    assert [p.new for p in published] == [True] * count
    assert len({p.id for p in published}) == count
    assert proxied.rows("SELECT count(*) FROM millpond_message WHERE queue = 'ledger'") == [(count,)]


async def test_a_group_of_publishes(proxied: ProxiedStore) -> None:
    """Each caller's id is recognised after the reply of the whole group was lost."""
    first = asyncio.create_task(proxied.store.publish([message("first")]))
    await asyncio.sleep(0)
    calls = [asyncio.create_task(proxied.store.publish([message("ledger")])) for _ in range(100)]
    await asyncio.sleep(0)
    lost = proxied.proxy.cut_after(b"ledger" if proxied.is_postgres else b"COMMIT")
    published = [one for call in [first, *calls] for one in await call]
    assert lost.is_set()
    assert all(p.new for p in published) and len({p.id for p in published}) == 101
    assert proxied.rows("SELECT count(*) FROM millpond_message WHERE queue = 'ledger'") == [(100,)]


async def test_publish_of_a_known_id(proxied: ProxiedStore) -> None:
    """The second try must not take another caller's message for its own."""
    known, fresh = uuid4(), uuid4()
    await proxied.store.publish([message("q", id=known)])
    lost = proxied.proxy.cut_after(fresh.bytes if proxied.is_postgres else b"COMMIT")
    published = await proxied.store.publish([message("q", id=known), message("q", id=fresh), message("q", id=fresh)])
    assert lost.is_set()
    assert [p.new for p in published] == [False, True, False]


async def test_publish_that_never_arrived(proxied: ProxiedStore) -> None:
    proxied.proxy.cut()
    published = await proxied.store.publish([message("q"), message("q", id=uuid4())])
    assert [p.new for p in published] == [True, True]
    assert proxied.rows("SELECT count(*) FROM millpond_message WHERE queue = 'q'") == [(2,)]


@pytest.mark.parametrize("given", [False, True], ids=["generated id", "given id"])
async def test_a_published_message_that_was_handled_without_a_trace(proxied: ProxiedStore, given: bool) -> None:
    """Acked with keep=False before the second try: it is not published again, or its next delivery is flagged."""
    pattern = b"ledger" if proxied.is_postgres or not given else b"COMMIT"
    consumer = await millpond.connect(proxied.url)
    lost = proxied.proxy.cut_after(pattern)
    proxied.proxy.refuse()
    publish = asyncio.create_task(proxied.store.publish([message("ledger", id=uuid4() if given else None)]))
    try:
        await until(lost.is_set, "a lost reply")
        (first,) = await consumer.claim(["ledger"])
        assert not first.redelivered
        assert await consumer.settle([Ack(first.receipt, keep=False)]) == []
        proxied.proxy.accept()
        assert (await publish)[0].new
        again = await consumer.claim(["ledger"])
        assert [claim.redelivered for claim in again] == ([] if given else [True])
    finally:
        await consumer.close()


async def test_a_publish_without_a_connection_is_not_flagged(proxied: ProxiedStore) -> None:
    """No statement was sent: the message cannot have been delivered before."""
    store = await millpond.connect(proxied.proxy.url(proxied.url), reconnect_timeout=3)
    proxied.proxy.refuse()
    proxied.proxy.cut()
    with pytest.raises(StoreUnavailable):
        await store.claim(["q"])  # it finds that all connections are dead
    publish = asyncio.create_task(store.publish([message("q")]))
    await asyncio.sleep(0)
    proxied.proxy.accept()
    await publish
    (claim,) = await store.claim(["q"])
    assert not claim.redelivered
    await store.close()


async def test_claim(proxied: ProxiedStore) -> None:
    """The second try returns the messages of the lost claim, and they count once."""
    await proxied.store.publish([message("warm") for _ in range(3)])
    # On PostgreSQL the claim is one statement; its lease identifies it.
    pattern = struct.pack(">q", round(LEASE * 1e6)) if proxied.is_postgres else b"COMMIT"
    lost = proxied.proxy.cut_after(pattern)
    claims = await proxied.store.claim(["warm"], limit=3, lease=LEASE)
    assert lost.is_set()
    assert [claim.deliveries for claim in claims] == [1, 1, 1]
    assert await proxied.store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_claim_from_several_queues(proxied: ProxiedStore) -> None:
    """The second try returns no receipt that the claim of an earlier queue has already returned."""
    queues = ["first", "second", "third"]
    assert await proxied.store.claim(queues, limit=30) == []
    for queue in queues:
        await proxied.store.publish([message(name) for name in queues for _ in range(5)])
        lost = proxied.proxy.cut_after(queue.encode())
        receipts = [claim.receipt for claim in await proxied.store.claim(queues, limit=30)]
        assert lost.is_set()
        assert len(receipts) == len(set(receipts))
        assert await proxied.store.settle([Ack(receipt) for receipt in receipts]) == []


async def test_claim_by_ids(proxied: ProxiedStore) -> None:
    ids = [uuid4(), uuid4()]
    await proxied.store.publish([message("q", id=id_) for id_ in ids])
    first = await proxied.store.claim(["q"], ids=ids[:1], lease=LEASE)
    await proxied.store.settle([GiveBack(first[0].receipt)])
    pattern = struct.pack(">q", round(LEASE * 1e6)) if proxied.is_postgres else b"COMMIT"
    lost = proxied.proxy.cut_after(pattern)
    claims = await proxied.store.claim(["q"], limit=2, lease=LEASE, ids=ids)
    assert lost.is_set()
    assert {claim.message.id for claim in claims} == set(ids)
    assert [claim.deliveries for claim in claims] == [1, 1]


_SLOW_COMMITS = """
CREATE TABLE slow_commits (n int);
INSERT INTO slow_commits VALUES (1);
CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF EXISTS (SELECT 1 FROM slow_commits) THEN PERFORM pg_advisory_xact_lock(77); END IF; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow_commit AFTER UPDATE ON millpond_message DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.state = 'PROCESSING') EXECUTE FUNCTION slow_commit();
"""


async def test_claim_by_a_worker_that_is_committed_after_its_second_try(
    postgres_proxy: Proxy, postgres_url: str
) -> None:
    """The second try claims another message. The first one goes back: the worker does not know that it has it."""
    store: Any = await millpond.connect(postgres_proxy.url(postgres_url), migrate=True)
    await store.workers.join()
    await store.publish([message("q"), message("q")])
    with psycopg.connect(postgres_url, autocommit=True) as c, psycopg.connect(postgres_url, autocommit=True) as gate:
        c.execute(_SLOW_COMMITS)
        gate.execute("SELECT pg_advisory_lock(77)")
        claim = asyncio.create_task(store.claim(["q"], 1, LEASE, by_worker=True))

        def waits() -> bool:
            return bool(c.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchall())

        await until(waits, "a commit that waits")
        c.execute("DELETE FROM slow_commits")
        postgres_proxy.cut()
        (second,) = await claim
        gate.execute("SELECT pg_advisory_unlock(77)")
        held = "SELECT id FROM millpond_message WHERE state = 'PROCESSING' ORDER BY id"
        await until(lambda: len(c.execute(held).fetchall()) == 2, "the late commit")
        await store.workers.reap()
        assert c.execute(held).fetchall() == [(second.receipt.id,)]
        waiting = c.execute("SELECT state, deliveries FROM millpond_message WHERE state <> 'PROCESSING'").fetchall()
        assert waiting == [("PENDING", 0)]
    assert await store.settle([Ack(second.receipt)]) == []
    await store.close()
