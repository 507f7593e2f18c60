"""Claims that a worker's row holds: one beat extends them all, and message rows do not change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millpond import Ack, GiveBack, ManualClock, Message, Nack, Reject, State
from millpond.clock import SECOND
from millpond.errors import MillpondError
from millpond.transports.database.workers import abandoned_claims
from tests.rooms.workers.conftest import Connect
from tests.triggers import execute, failing
from tests.worker.test_locked_rows import locked

LEASE = 30
LATER = 10 * LEASE


async def held(store: Any, count: int = 3, lease: float = LEASE, **options: Any) -> list[Any]:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(count)])
    claims = await store.claim(["q"], count, lease, by_worker=True, **options)
    assert len(claims) == count
    return list(claims)


async def test_beats_write_one_row_however_many_messages_are_held(url: str, store: Any, clock: ManualClock) -> None:
    presence = await store.workers.join("w")
    claims = await held(store, 500)
    rows = "SELECT id, state, token, worker, lease, lease_until, deliveries, due_at FROM millpond_message ORDER BY id"
    before = execute(url, rows)
    with failing(url, "UPDATE", "millpond_message"):
        for _ in range(5):
            clock.advance(LEASE)
            assert await presence.beat()
    assert execute(url, rows) == before
    assert {(row[3], row[4], row[5]) for row in before} == {(presence.id, LEASE * SECOND, None)}
    assert execute(url, "SELECT id, beat_at FROM millpond_worker") == [(presence.id, clock.now())]
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_its_lease_ends_a_lease_after_the_last_beat(store: Any, clock: ManualClock) -> None:
    presence = await store.workers.join()
    (claim,) = await held(store, 1)
    assert (claim.claimed_us, claim.lease_us) == (clock.now(), clock.now() + LEASE * SECOND)
    clock.advance(20)
    await presence.beat()
    (row,) = await store.operations.find([claim.receipt.id])
    assert row.lease_us == clock.now() + LEASE * SECOND
    (row,) = await store.operations.browse("q", states=[State.PROCESSING])
    assert row.lease_us == clock.now() + LEASE * SECOND
    assert (await store.operations.count(["q"]))[0].counts[State.PROCESSING] == 1


async def test_a_worker_never_reaps_its_own_claims(store: Any, clock: ManualClock) -> None:
    await store.workers.join()
    claims = await held(store)
    for _ in range(3):
        clock.advance(LATER)
        assert await store.workers.reap() == 0
        assert await store.claim(["q"], 9) == []
    assert await store.workers.stale([claim.receipt for claim in claims]) == []


async def test_extend_sets_the_length(url: str, store: Any, clock: ManualClock) -> None:
    presence = await store.workers.join()
    claim, other, _ = await held(store)
    assert await store.extend([claim.receipt], 100) == []
    clock.advance(20)
    await presence.beat()
    rows = {row.id: row.lease_us for row in await store.operations.browse("q")}
    assert rows[claim.receipt.id] == clock.now() + 100 * SECOND
    assert rows[other.receipt.id] == clock.now() + LEASE * SECOND
    assert execute(url, "SELECT count(*) FROM millpond_message WHERE lease_until IS NOT NULL") == [(0,)]


async def test_claims_without_by_worker_have_leases_of_their_own(store: Any, clock: ManualClock) -> None:
    """Also on the handle of a worker: nothing extends them but `extend`."""
    presence = await store.workers.join()
    await store.publish([Message(queue="q", payload=b"x")])
    (claim,) = await store.claim(["q"], 1, LEASE)
    clock.advance(LEASE)
    await presence.beat()
    assert await store.workers.reap() == 1
    assert await store.workers.stale([claim.receipt]) == [claim.receipt]


async def test_without_a_worker_there_is_none_to_hold_a_claim(store: Any) -> None:
    with pytest.raises(MillpondError, match="needs a worker"):
        await store.claim(["q"], by_worker=True)
    await (await store.workers.join()).leave()
    with pytest.raises(MillpondError, match="needs a worker"):
        await store.claim(["q"], by_worker=True)


async def test_every_outcome(url: str, store: Any) -> None:
    await store.workers.join()
    a, b, c, d = [claim.receipt for claim in await held(store, 4)]
    assert await store.settle([Ack(a), Nack(b, error="no"), Reject(c), GiveBack(d)]) == []
    rows = execute(url, "SELECT state, worker, lease, lease_until FROM millpond_message ORDER BY state")
    assert rows == [("PENDING", None, None, None), ("RETRYABLE", None, None, None)]
    assert await store.workers.stale([a, b, c, d]) == [a, b, c, d]


async def test_a_detached_message_has_a_lease_of_its_own(store: Any, clock: ManualClock, connect: Connect) -> None:
    """After that it comes back, and this is a crash: its worker lives, and hung."""
    other = await connect()
    presence = await store.workers.join()
    hung, fine, again = [claim.receipt for claim in await held(store)]
    clock.advance(LATER)
    await presence.beat()
    assert await other.workers.detach([hung, again]) == []
    assert await other.workers.attach([again]) == []
    (row,) = await store.operations.find([hung.id])
    assert row.lease_us == clock.now() + LEASE * SECOND
    clock.advance(LEASE)
    await presence.beat()
    assert await other.workers.reap() == 1
    assert await other.workers.stale([hung, fine, again]) == [hung]
    (row,) = await store.operations.find([hung.id])
    assert (row.state, row.crashes) == (State.PENDING, 1)
    assert await other.workers.detach([hung]) == await other.workers.attach([hung]) == [hung]


async def test_the_lapse_of_an_abandoned_message_is_no_crash(store: Any, clock: ManualClock) -> None:
    """Its worker lives and does not hang: it only could not settle the message."""
    presence = await store.workers.join()
    given_up, left, hung = [claim.receipt for claim in await held(store)]
    assert await store.workers.detach([given_up], abandoned=True) == []
    assert await store.workers.detach([hung]) == []
    store.workers.abandoned.leave([left])
    await store.workers.reap()
    assert await store.workers.stale([given_up, left, hung]) == [], "a late decision counts"
    clock.advance(LEASE)
    await presence.beat()
    assert await store.workers.reap() == 3
    rows = await store.operations.find([given_up.id, left.id, hung.id])
    assert {row.id: row.crashes for row in rows} == {given_up.id: 0, left.id: 0, hung.id: 1}


async def test_attach_leaves_a_claim_without_a_worker_its_lease(store: Any, clock: ManualClock) -> None:
    await store.publish([Message(queue="q", payload=b"x")])
    (claim,) = await store.claim(["q"], 1, LEASE)
    assert await store.workers.attach([claim.receipt]) == []
    clock.advance(LEASE)
    assert await store.workers.reap() == 1


async def test_a_worker_that_leaves_detaches_what_it_still_holds(store: Any, clock: ManualClock) -> None:
    """A thread may run on in its process: the messages come back after a lease, and this is no crash."""
    presence = await store.workers.join()
    claims = await held(store, 1500)
    clock.advance(LATER)
    presence.announce_stop()
    await presence.leave()
    assert await store.workers.reap() == 0
    assert await store.workers.stale([claim.receipt for claim in claims]) == []
    clock.advance(LEASE)
    assert await store.workers.reap() == 1500
    assert {(c.deliveries, c.crashes) for c in await store.claim(["q"], 2000)} == {(2, 0)}


async def test_a_cancelled_claim_leaves_no_message_behind(url: str, store: Any) -> None:
    """Cancelled at any await: its messages go back, as if they had never been claimed."""
    await store.workers.join()
    await store.publish([Message(queue=queue, payload=b"x") for queue in "ab" for _ in range(10)])
    claimed = 0
    for steps in range(40):
        task = asyncio.create_task(store.claim(["a", "b"], 20, LEASE, by_worker=True))
        for _ in range(steps):
            await asyncio.sleep(0)
        if steps % 2:
            await asyncio.sleep(0.001 * steps)
        task.cancel()
        try:
            claims = await task
        except asyncio.CancelledError:
            claims = []
        claimed += bool(claims)
        assert await store.settle([GiveBack(claim.receipt) for claim in claims]) == []
        for _ in range(2):  # a claim may be committed after its task was cancelled
            await asyncio.sleep(0.02)
            await store.workers.reap()
    rows = execute(url, "SELECT state, deliveries, count(*) FROM millpond_message GROUP BY state, deliveries")
    assert rows == [("PENDING", 0, 20)]


async def test_a_refusal_that_cannot_be_settled_is_detached(url: str, store: Any, clock: ManualClock) -> None:
    await store.workers.join()
    await store.publish([Message(queue="q", payload=b"expired", expires=0), Message(queue="q", payload=b"good")])
    with failing(url, "INSERT", "millpond_archive"):
        (claim,) = await store.claim(["q"], 10, LEASE, by_worker=True)
        assert claim.message.payload == b"good"
    await store.workers.reap()
    clock.advance(LEASE)
    assert await store.workers.reap() == 1  # the worker still holds the other one
    assert await store.claim(["q"], 10) == []
    assert [row.reason for row in await store.operations.archived("q")] == ["expired"]
    assert await store.settle([Ack(claim.receipt)]) == []


@pytest.mark.parametrize("url", ["postgres", "mariadb"], indirect=True)
async def test_a_refusal_whose_row_is_locked_is_detached(
    url: str, store: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another transaction waited for the claim and has the row before the refusal is settled."""
    await store.workers.join()
    (published,) = await store.publish([Message(queue="q", payload=b"expired", expires=0)])
    settle = store._settle_refused

    async def settle_refused(*args: Any, **options: Any) -> None:
        with locked(url, published.id):
            await settle(*args, **options)

    monkeypatch.setattr(store, "_settle_refused", settle_refused)
    assert await store.claim(["q"], 10, LEASE, by_worker=True) == []
    monkeypatch.undo()
    await store.workers.reap()
    clock.advance(LEASE)
    assert await store.workers.reap() == 1
    assert await store.claim(["q"], 10) == []
    assert [row.reason for row in await store.operations.archived("q")] == ["expired"]


@pytest.mark.parametrize("url", ["postgres", "mariadb"], indirect=True)
async def test_a_lost_claim_is_remembered_while_its_row_is_locked(
    url: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.workers.join()
    (claim,) = await held(store, 1)
    monkeypatch.setattr(abandoned_claims, "_MORE", -3600.0)  # no commit can come any more
    store.workers.abandoned.lose([claim.receipt.token])
    with locked(url, claim.receipt.id):
        for _ in range(3):
            await store.workers.reap()
    await store.workers.reap()
    assert execute(url, "SELECT state, deliveries FROM millpond_message") == [("PENDING", 0)]
