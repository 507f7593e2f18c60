"""Networks that are cut, and clocks that make a step: a living worker keeps its claims, a dead one loses them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, Claim, Message, State, Transport
from millpond.transports.url import Url
from servers import Proxy
from tests.file_clock import FileClock
from tests.races.processes import Actors, report
from tests.races.roles import beating, connect
from tests.triggers import execute
from tests.waiting import until

pytestmark = pytest.mark.slow

COUNT = 20


async def publish(store: Transport, count: int = COUNT) -> None:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(count)])


async def claim_all(store: Transport, count: int, **options: Any) -> list[Claim]:
    """Reap as a worker does, and claim until there are that many."""
    claims: list[Claim] = []

    async def got() -> bool:
        await store.workers.reap()
        claims.extend(await store.claim(["q"], COUNT, **options))
        return len(claims) >= count

    await until(got, every=0.5)
    return claims


@pytest.mark.long  # the workers of tests/worker/test_held.py have shorter ones
@pytest.mark.parametrize("workers", [1, 2])
async def test_an_outage_for_all_that_is_longer_than_the_lease(
    server_url: str, server_store: Transport, actors: Actors, workers: int
) -> None:
    """No worker loses a claim, neither to another one nor to itself."""
    lease = 2.0
    await publish(server_store, workers * COUNT)
    with Proxy(Url(server_url).port or 0) as proxy:
        url = proxy.url(server_url)
        holders = []
        for number in range(workers):
            holder = await actors.start(
                "holder", url=url, number=number, queue="q", count=COUNT, lease=lease, join=True, by_worker=True
            )
            assert (await holder.receive())["held"] == COUNT
            holders.append(holder)
        for _ in range(2):
            await asyncio.sleep(4)  # long enough for them to judge each other
            proxy.refuse()
            proxy.cut()
            await asyncio.sleep(3 * lease)
            proxy.accept()
        await asyncio.sleep(2 * lease)
        for holder in holders:
            holder.send("settle")
        replies = [await holder.receive() for holder in holders]
        assert [(reply["refused"], reply["reaped"]) for reply in replies] == [(0, 0)] * workers
        for holder in holders:
            await holder.ends()
    report("outage longer than the lease", server_url, messages=workers * COUNT, faults=2)


async def test_a_worker_that_is_cut_off_alone(server_url: str, server_store: Transport) -> None:
    """Others take its claims after `dead_after` and not before. It joins anew, and finds its receipts stale."""
    dead_after = 4.0
    await publish(server_store)
    with Proxy(Url(server_url).port or 0) as proxy:
        cut_off: Any = await millpond.connect(proxy.url(server_url))
        presence = await cut_off.workers.join("cut off", dead_after=dead_after)
        lost = await cut_off.claim(["q"], COUNT, 600, by_worker=True)
        async with beating(await server_store.workers.join("other")), beating(presence) as beats:
            observed = time.monotonic() + 5
            while time.monotonic() < observed:
                assert await server_store.workers.reap() == 0
                await asyncio.sleep(0.2)
            proxy.refuse()
            proxy.cut()
            at = time.monotonic()
            taken = await claim_all(server_store, COUNT, lease=600, by_worker=True)
            seconds = time.monotonic() - at
            assert seconds > dead_after - 1, "from its last beat on, which a busy machine delays"
            # Its row goes last, after its messages.
            await until(lambda: execute(server_url, "SELECT count(*) FROM millpond_worker") == [(1,)])
            proxy.accept()
            await until(lambda: beats[-1])
            assert len(execute(server_url, "SELECT id FROM millpond_worker")) == 2
            receipts = [claim.receipt for claim in lost]
            assert set(await cut_off.workers.stale(receipts)) == set(receipts)
            await publish(server_store)
            again = await cut_off.claim(["q"], COUNT, 600, by_worker=True)
            for _ in range(6):
                assert await server_store.workers.reap() == 0
                await asyncio.sleep(0.5)
            assert await cut_off.settle([Ack(claim.receipt) for claim in again]) == []
        assert {claim.crashes for claim in taken} == {1}
        assert await server_store.settle([Ack(claim.receipt) for claim in taken]) == []
        await cut_off.close()
    report("one worker cut off", server_url, messages=COUNT, faults=1, seconds=round(seconds, 2))


async def test_a_dead_worker_without_a_row(url: str, store: Transport, actors: Actors) -> None:
    """Its claims come back long before their lease, and this is no crash. The row of a living worker returns."""
    await publish(store, 2 * COUNT)
    joined = {"url": url, "queue": "q", "count": COUNT, "lease": 600, "join": True, "by_worker": True}
    dead = await actors.start("holder", number=0, **joined)
    assert (await dead.receive())["held"] == COUNT
    living = await actors.start("holder", number=1, **joined)
    assert (await living.receive())["held"] == COUNT
    async with beating(await store.workers.join("reaper")):
        await dead.kill()
        execute(url, "DELETE FROM millpond_worker")
        claims = await claim_all(store, COUNT)
        assert {(claim.deliveries, claim.crashes) for claim in claims} == {(2, 0)}
        living.send("settle")
        assert (await living.receive())["refused"] == 0
        await living.ends()


@pytest.mark.parametrize("hours", [1, pytest.param(-1, marks=pytest.mark.long_on_servers)], ids=["forward", "back"])
async def test_a_step_of_the_database_clock(
    url: str, store: Transport, actors: Actors, tmp_path: Path, hours: int
) -> None:
    """A killed worker's claims come back in seconds; a living worker keeps its own, also with a short lease."""
    offset = tmp_path / "hours"
    clock = FileClock(offset)
    clock.step(0)
    reaper = await connect(url, str(offset))
    await publish(reaper, 2 * COUNT)
    joined = {"url": url, "queue": "q", "count": COUNT, "join": True, "by_worker": True, "clock": str(offset)}
    living = await actors.start("holder", number=0, lease=3, **joined)
    assert (await living.receive())["held"] == COUNT
    killed = await actors.start("holder", number=1, lease=600, **joined)
    assert (await killed.receive())["held"] == COUNT
    async with beating(await reaper.workers.join("reaper")) as beats:
        observed = time.monotonic() + 4
        while time.monotonic() < observed:
            assert await reaper.workers.reap() == 0
            await asyncio.sleep(0.5)
        await killed.kill()
        at = time.monotonic()
        for step in range(1, 4):  # the clock makes further steps while the dead worker is judged
            clock.step(hours * step)
            await asyncio.sleep(0.5)
        claims = await claim_all(reaper, COUNT)
        seconds = time.monotonic() - at
        assert len(claims) == COUNT
        assert {claim.due_us <= clock.now() for claim in claims} == {True}
        assert False not in beats
        kept = time.monotonic() + 6
        while time.monotonic() < kept:  # two leases of the living worker
            assert await reaper.workers.reap() == 0
            await asyncio.sleep(0.5)
        living.send("settle")
        assert (await living.receive())["refused"] == 0
        await living.ends()
    (stats,) = await reaper.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == COUNT
    await reaper.close()
    report("step of the clock", url, messages=2 * COUNT, faults=1, seconds=round(seconds, 2))
    assert seconds < 60
