"""Workers that beat no more, workers without a row, and a database clock that makes a step.

Programs without a worker judge here. The judgement of workers about each other is in `tests/races`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millpond import Ack, ManualClock, Message
from millpond.clock import SECOND
from millpond.transports.database.workers import doubted_workers
from tests.rooms.workers.conftest import Connect, SteppedClock
from tests.rooms.workers.test_held import LEASE, held
from tests.triggers import execute

PATIENT = 11
"""Seconds, a little more than a silence that raises a doubt, and than the time after its confirmation."""
DOUBTED = (PATIENT, LEASE + 1, LEASE + 1)
"""Times until the doubt, its confirmation, and the release of messages of a worker that died after its first claim."""


@pytest.fixture(autouse=True)
def no_last_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubted_workers, "_LAST_WAIT", 0.0)


async def test_a_program_without_a_worker_gives_back_after_a_doubt_of_a_lease(
    store: Any, connect: Connect, clock: ManualClock
) -> None:
    presence = await store.workers.join()
    short, long = (await held(store, 1))[0], (await held(store, 1, lease=100))[0]
    await presence.beat()  # records the shortest lease
    clock.advance(PATIENT)
    assert await (await connect()).claim(["q"], 9) == []  # it records its doubt
    clock.advance(LEASE)
    assert await (await connect()).claim(["q"], 9) == []
    clock.advance(1)
    assert await (await connect()).claim(["q"], 9) == []  # it confirms the doubt
    clock.advance(9)
    assert await (await connect()).claim(["q"], 9) == []
    clock.advance(1)
    (claim,) = await (await connect()).claim(["q"], 9)
    assert (claim.receipt.id, claim.deliveries, claim.crashes) == (short.receipt.id, 2, 1)
    assert await store.workers.stale([short.receipt, long.receipt]) == [short.receipt]
    assert await store.settle([Ack(claim.receipt)]) == []
    clock.advance(100)
    assert (await (await connect()).claim(["q"], 9))[0].receipt.id == long.receipt.id


async def test_a_beat_removes_the_doubt(url: str, store: Any, connect: Connect, clock: ManualClock) -> None:
    presence = await store.workers.join()
    claims = await held(store)
    other = await connect()
    for _ in range(5):
        clock.advance(LEASE + PATIENT)
        assert await other.workers.reap() == 0
        assert execute(url, "SELECT count(*) FROM millpond_worker WHERE doubted_at IS NOT NULL") == [(1,)]
        await presence.beat()
        assert await other.workers.reap() == 0
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_two_outages_take_nothing_from_a_living_worker(store: Any, connect: Connect, clock: ManualClock) -> None:
    """A program finds the database before the worker does, after both of them."""
    presence = await store.workers.join()
    claims = await held(store)
    await presence.beat()
    for outage in (PATIENT, LEASE + 1):
        clock.advance(outage)
        assert await (await connect()).claim(["q"], 9) == []
    await presence.beat()
    clock.advance(PATIENT)
    assert await (await connect()).claim(["q"], 9) == []
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_a_third_outage_takes_nothing_from_a_worker_that_finds_the_database_soon(
    store: Any, connect: Connect, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is first again, and its last step waits for a beat."""
    presence = await store.workers.join()
    claims = await held(store)
    await presence.beat()
    for outage in (PATIENT, LEASE + 1):
        clock.advance(outage)
        assert await (await connect()).claim(["q"], 9) == []
    clock.advance(PATIENT)
    beaten: list[bool] = []

    async def wait(seconds: float) -> None:
        beaten.append(await presence.beat())

    monkeypatch.setattr(doubted_workers, "asyncio", SimpleNamespace(sleep=wait))
    assert await (await connect()).claim(["q"], 9) == []
    assert beaten == [True]
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_a_claim_that_has_messages_waits_for_no_beat(
    store: Any, connect: Connect, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their leases run. A later claim of the program gives back, unless the worker beats meanwhile."""
    presence = await store.workers.join()
    claims = await held(store)
    other = await connect()

    async def doubted() -> None:
        await presence.beat()
        for seconds in DOUBTED[:2]:
            clock.advance(seconds)
            assert await other.claim(["q"], 9) == []
        clock.advance(DOUBTED[2])

    async def claimed() -> set[Any]:
        new = {p.id for p in await other.publish([Message(queue="q", payload=b"x") for _ in range(2)])}
        found = {claim.receipt.id: claim.receipt for claim in await other.claim(["q"], 9)}
        assert await other.settle([Ack(found[id_]) for id_ in new]) == []
        return found.keys() - new

    async def no_wait(seconds: float) -> None:
        waits.append(seconds)

    waits: list[float] = []
    monkeypatch.setattr(doubted_workers, "asyncio", SimpleNamespace(sleep=no_wait))
    monkeypatch.setattr(doubted_workers, "_LAST_WAIT", 3600.0)
    await doubted()
    assert await claimed() == set()
    monkeypatch.setattr(doubted_workers, "_LAST_WAIT", 0.0)
    await doubted()  # it has beaten
    monkeypatch.setattr(doubted_workers, "_LAST_WAIT", 3600.0)
    assert await claimed() == set()
    assert await store.workers.stale([claim.receipt for claim in claims]) == []
    monkeypatch.setattr(doubted_workers, "_LAST_WAIT", 0.0)
    assert await claimed() == {claim.receipt.id for claim in claims}
    assert waits == []


async def test_a_worker_that_ends_at_once_records_doubts_too(store: Any, connect: Connect, clock: ManualClock) -> None:
    """As `millpond run --until-idle` does when nothing is due."""
    await store.workers.join()
    await held(store)
    for seconds in DOUBTED:
        clock.advance(seconds)
        brief = await connect()
        await brief.workers.join("brief")
        got = await brief.claim(["q"], 9, LEASE, by_worker=True)
        await brief.workers.leave()
    assert len(got) == 3


async def test_a_silent_worker_without_messages_is_forgotten(
    url: str, store: Any, connect: Connect, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.workers.join()
    await held(store)
    other = await connect()
    for seconds in DOUBTED:
        clock.advance(seconds)
        await other.workers.reap()
    monkeypatch.setattr(doubted_workers, "_LAST_WAIT", 3600.0)  # it holds nothing: no reap waits for it
    for seconds in (1, 3600):
        assert execute(url, "SELECT count(*) FROM millpond_worker") == [(1,)]
        clock.advance(seconds)
        await other.workers.reap()
    assert execute(url, "SELECT count(*) FROM millpond_worker") == [(0,)]


async def test_a_living_worker_takes_over_a_row_that_was_removed(
    url: str, store: Any, connect: Connect, clock: ManualClock
) -> None:
    presence = await store.workers.join("w")
    claims = await held(store)
    execute(url, "DELETE FROM millpond_worker")
    other = await connect()
    assert await other.workers.reap() == 0
    assert execute(url, "SELECT id, name, stopping FROM millpond_worker") == [(presence.id, "unknown", 1)]
    for _ in range(5):
        await presence.beat()
        clock.advance(LEASE)
        assert await other.workers.reap() == 0
    assert execute(url, "SELECT id, name, stopping FROM millpond_worker")[0][::2] == (presence.id, 0)
    assert await store.workers.stale([claim.receipt for claim in claims]) == []


async def test_claims_whose_worker_has_no_row_come_back(
    url: str, store: Any, connect: Connect, clock: ManualClock
) -> None:
    """Several workers are gone. This is no crash, because nothing is known about their end."""
    for n in range(3):
        gone = await connect()
        await gone.workers.join(f"{n}")
        await held(gone, 2)
    await store.workers.join()
    (mine,) = await held(store, 1)
    execute(url, "DELETE FROM millpond_worker WHERE name IN ('0', '1', '2')")
    other = await connect()
    for seconds in (0, *DOUBTED):
        clock.advance(seconds)
        await (await store.workers.join()).beat()
        reaped = await other.workers.reap()
    assert reaped == 6
    assert {claim.crashes for claim in await other.claim(["q"], 9)} == {0}
    assert await store.workers.stale([mine.receipt]) == []


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_step_of_the_clock_takes_nothing_from_a_living_worker(
    store: Any, connect: Connect, clock: SteppedClock, hours: int
) -> None:
    presence = await store.workers.join()
    claims = await held(store)
    for _ in range(3):
        clock.step(hours)
        assert await (await connect()).claim(["q"], 9) == []  # before its next beat
        await presence.beat()
        assert await (await connect()).claim(["q"], 9) == []
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []


async def test_after_a_clock_was_set_back_own_leases_end_in_time(
    connect: Connect, store: Any, clock: SteppedClock
) -> None:
    await store.publish([Message(queue="q", payload=b"x")])
    (claim,) = await store.claim(["q"], 1, LEASE)
    clock.step(-1)
    assert await store.claim(["q"]) == []
    clock.advance(LEASE - 1)
    assert await (await connect()).claim(["q"]) == []
    clock.advance(1)
    (again,) = await (await connect()).claim(["q"])
    assert (again.receipt.id, again.deliveries, again.due_us) == (claim.receipt.id, 2, clock.now())


async def test_after_a_clock_was_set_back_the_messages_of_a_dead_worker_come_back(
    connect: Connect, store: Any, clock: SteppedClock
) -> None:
    await store.workers.join()
    claims = await held(store)
    clock.step(-1)
    for seconds in (0, LEASE + 1, LEASE + 1):
        clock.advance(seconds)
        got = await (await connect()).claim(["q"], 9)
    assert {claim.receipt.id for claim in got} == {claim.receipt.id for claim in claims}
    assert {claim.due_us for claim in got} == {clock.now()}


async def test_long_leases_are_left_as_they_are(store: Any, clock: ManualClock) -> None:
    """More of them than one search reads, and leases of streams."""
    await store.publish([Message(queue="q", payload=b"x") for _ in range(2500)])
    claims = await store.claim(["q"], 1200, 1000) + await store.claim(["q"], 1200, 2000)
    rows = {row.id: row.lease_us for row in await store.operations.find([c.receipt.id for c in claims])}
    for _ in range(4):
        clock.advance(1)
        await store.workers.reap()
    assert {row.id: row.lease_us for row in await store.operations.find(list(rows))} == rows
    assert await store.extend([claims[0].receipt], 5000) == []
    await store.workers.reap()
    (row,) = await store.operations.find([claims[0].receipt.id])
    assert row.lease_us == clock.now() + 5000 * SECOND
