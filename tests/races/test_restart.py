"""A database restarts while living workers hold thousands of claims: none is delivered again."""

from __future__ import annotations

import asyncio

import pytest

import millpond
from millpond import Message, State, Transport
from servers import MariaDB, Postgres
from tests.races.processes import Actors, report
from tests.races.roles import beating
from tests.waiting import until

pytestmark = pytest.mark.slow

WORKERS, EACH = 3, 1_000


@pytest.mark.server
@pytest.mark.timeout(900)
async def test_none_is_delivered_again(actors: Actors) -> None:
    with Postgres() as postgres, MariaDB() as mariadb:
        await asyncio.gather(restarts(postgres, actors), restarts(mariadb, actors))


async def restarts(server: Postgres | MariaDB, actors: Actors) -> None:
    store: Transport = await millpond.connect(server.url, migrate=True)  # type: ignore[assignment]
    for _ in range(WORKERS):
        await store.publish([Message(queue="q", payload=b"x") for _ in range(EACH)])
    workers = [
        await actors.start("holder", url=server.url, number=n, queue="q", count=EACH, lease=600, join=True)
        for n in range(WORKERS)
    ]
    for worker in workers:
        assert (await worker.receive()) == {"held": EACH, "deliveries": [1]}
    presence = await store.workers.join("reaper")
    reaped = 0
    async with beating(presence) as beats:

        async def judge(seconds: float) -> None:
            """Reap for this time, counted from the time when our lock is back."""
            nonlocal reaped
            await until(presence.beat)
            end = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < end:
                reaped += await store.workers.reap()
                await asyncio.sleep(0.5)

        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await judge(3.5)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await judge(11)  # longer than a reaper waits for workers that have not beaten since
        missed = beats.count(False)
    for worker in workers:
        worker.send("settle")
    reply = [await worker.receive() for worker in workers]
    for worker in workers:
        await worker.ends()
    (stats,) = await store.operations.count(["q"])
    rows = await store.operations.archived("q", limit=WORKERS * EACH)
    doubled = sum(row.deliveries - 1 for row in rows)
    missed += sum(s["missed"] for s in reply)
    lost = WORKERS * EACH - stats.counts[State.COMPLETED]
    report(
        "two restarts",
        server.url,
        messages=WORKERS * EACH,
        faults=2,
        lost=lost,
        doubled=doubled,
        missed_beats=missed,
    )
    assert (lost, doubled, reaped) == (0, 0, 0)
    assert [(s["refused"], s["reaped"]) for s in reply] == [(0, 0)] * WORKERS
    assert missed  # the restarts were noticed, by any of them: `until` above may take the only one of the reaper
    await store.close()
