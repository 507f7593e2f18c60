"""Acks within a caller's transaction that rolls back, stalls, or commits after the lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import millpond
from millpond import Ack, Claim, Message, Nack, Receipt, State, Transport
from tests.races.processes import report
from tests.rooms.transactions import callers
from tests.rooms.transactions.callers import CallerCalls
from tests.waiting import until

pytestmark = pytest.mark.slow

SERVERS = {
    "psycopg": ("postgres", callers.psycopg_sync),
    "asyncpg": ("postgres", callers.asyncpg_connection),
    "pymysql": ("mariadb", callers.pymysql_connection),
}
ALL = {"sqlite3": ("sqlite", callers.sqlite3_legacy), **SERVERS}


class Scene:
    def __init__(self, url: str, store: Transport, calls: CallerCalls) -> None:
        self.url = url
        self.store = store
        self.calls = calls

    async def claimed(self, count: int, lease: float) -> list[Claim]:
        await self.store.publish([Message(queue="q", payload=b"x") for _ in range(count)])
        claims = await self.store.claim(["q"], count, lease)
        assert len(claims) == count
        return claims

    async def state(self, claim: Claim) -> list[tuple[State, int]]:
        return [(row.state, row.deliveries) for row in await self.store.operations.find([claim.receipt.id])]


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    kind, caller = ALL[request.param]
    url = request.getfixturevalue(f"{kind}_url")
    store: Transport = await millpond.connect(url, migrate=True)  # type: ignore[assignment]
    async with caller(url) as calls:
        yield Scene(url, store, calls)
    await store.close()


on_all = pytest.mark.parametrize("scene", callers.params(ALL), indirect=True)
on_servers = pytest.mark.parametrize("scene", callers.params(SERVERS), indirect=True)


@on_all
async def test_it_rolls_back(scene: Scene) -> None:
    """The rollback leaves no trace: the receipt is still valid and can be settled."""
    (claim,) = await scene.claimed(1, 60)
    for _ in range(3):
        assert await scene.store.settle([Ack(claim.receipt)], within=scene.calls.within) == []
        await scene.calls.rollback()
        assert await scene.state(claim) == [(State.PROCESSING, 1)]
    assert await scene.store.extend([claim.receipt], 60) == []
    assert await scene.store.settle([Ack(claim.receipt)]) == []
    assert await scene.state(claim) == [(State.COMPLETED, 1)]
    report("ack rolled back", scene.url, messages=1, faults=3)


@on_servers
async def test_it_stalls(scene: Scene) -> None:
    """An open transaction blocks no other verb: other messages are settled, extended and reaped."""
    store = scene.store
    held, lapsed, acked, extended = await scene.claimed(4, 0.2)
    assert await store.extend([acked.receipt, extended.receipt], 60) == []
    assert await store.settle([Ack(held.receipt)], within=scene.calls.within) == []
    async with asyncio.timeout(60):
        # Its lease is over, but another transaction has locked its row.
        assert await until(store.workers.reap) == 1
        assert await scene.state(lapsed) == [(State.PENDING, 1)]
        assert await store.workers.reap() == 0
        assert await store.extend([held.receipt, extended.receipt], 0.2) == []
        settling = asyncio.create_task(store.settle([Nack(held.receipt), Ack(acked.receipt)]))

        async def others_are_settled() -> bool:
            return await scene.state(acked) == [(State.COMPLETED, 1)]

        await until(others_are_settled)
        assert lapsed.receipt.id in [c.receipt.id for c in await store.claim(["q"], 10)]
        assert await scene.state(held) == [(State.PROCESSING, 1)]
        assert not settling.done()
        await scene.calls.commit()
        # The transaction won; the late nack is refused.
        assert await settling == [held.receipt]
    assert await scene.state(held) == [(State.COMPLETED, 1)]
    report("ack stalls", scene.url, messages=4, faults=1)


@on_all
async def test_it_commits_after_the_lease(scene: Scene) -> None:
    """No worker claimed the message meanwhile, so the commit counts; a reaper skips the locked row."""
    store = scene.store
    (claim,) = await scene.claimed(1, 0.1)
    assert await store.settle([Ack(claim.receipt)], within=scene.calls.within) == []
    await asyncio.sleep(0.2)  # the lease is over
    reaping = asyncio.create_task(store.workers.reap())  # on SQLite it waits for the only writer
    await asyncio.wait([reaping], timeout=0.5)
    await scene.calls.commit()
    assert await reaping == 0
    assert await store.workers.reap() == 0
    assert await store.claim(["q"], 1) == []
    assert await scene.state(claim) == [(State.COMPLETED, 1)]
    report("ack commits after the lease", scene.url, messages=1, faults=1)


@on_all
async def test_it_begins_after_another_claim(scene: Scene) -> None:
    (old,) = await scene.claimed(1, 0.001)
    assert await until(scene.store.workers.reap) == 1
    (new,) = await scene.store.claim(["q"], 1, 60)
    refused: list[Receipt] = await scene.store.settle([Ack(old.receipt)], within=scene.calls.within)
    assert refused == [old.receipt]
    await scene.calls.commit()
    assert await scene.state(new) == [(State.PROCESSING, 2)]
    assert await scene.store.settle([Ack(new.receipt)]) == []
    report("ack by a zombie", scene.url, messages=1, faults=1)
