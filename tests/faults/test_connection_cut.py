"""Connections cut by a proxy between workers and their database: at random, and while a reply is on its way.

A reply that is lost in a commit leaves nobody knowing whether it happened; the store finds out.
"""

from __future__ import annotations

import asyncio
import struct
from uuid import uuid4

import pytest

from millpond import Message
from servers import Proxy
from tests.faults.conftest import Everywhere
from tests.faults.effects import COMMIT
from tests.faults.ground import PATIENT, SERVERS, Ground, message
from tests.faults.processes import beside, some_time, stop
from tests.waiting import until

LEASE = 30.123457
"""Its bytes tell PostgreSQL's claims from other statements."""


@pytest.mark.databases(*SERVERS)
async def test_under_load(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Ground) -> None:
        rounds = 50 if long else 2
        options = {"max_workers": 8, "lease": LEASE, **PATIENT}
        enough = asyncio.Event()
        faults = 0

        async def produce() -> None:
            n = 0
            while not enough.is_set():
                await here.produce(f"p{n}", 20, batch=10)
                await asyncio.sleep(0.05)
                n += 1

        with Proxy(here.server.port) as proxy:
            url = proxy.url(here.url)
            plan = here.plan("plain", "exact", options=options, url=url, effects_url=url)
            workers = [here.processes.start(plan) for _ in range(2)]
            for worker in workers:
                await worker.began()
            async with beside(produce()) as producing:
                for n in range(rounds):
                    for kind in ("claim", "settle", "commit"):
                        await lost_reply(here, proxy, kind, n)
                        faults += 1
                    for kind in ("cut", "refuse", "black hole"):
                        await some_time(here.chance, 0.05, 0.3)
                        await misbehave(proxy, kind)
                        faults += 1
                enough.set()
                await producing
            await here.drained()
            await stop(*workers)
        await here.judge("connections cut", faults)

    await everywhere(scenario)


async def lost_reply(here: Ground, proxy: Proxy, kind: str, n: int) -> None:
    """The server does what it was asked, and its answer is lost with the connection."""
    number, id_ = f"{kind}{n}", uuid4()
    if kind == "commit":
        pattern = COMMIT.encode()
    elif here.name == "mariadb":
        pattern = b"COMMIT"  # of whatever comes first: a claim, a settle, a beat
    else:  # one statement, known by its lease, or by the id of a message
        pattern = struct.pack(">q", round(LEASE * 1e6)) if kind == "claim" else id_.bytes
    happened = proxy.cut_after(pattern)
    chosen = message("plain", number)
    await here.store.publish([Message(queue=chosen.queue, payload=chosen.payload, headers=chosen.headers, id=id_)])
    here.confirmed.add(number)
    await until(happened.is_set, f"{here.name}: a lost reply to a {kind}")


async def misbehave(proxy: Proxy, kind: str) -> None:
    match kind:
        case "cut":
            proxy.cut()
        case "refuse":
            proxy.refuse()
            proxy.cut()
            await asyncio.sleep(0.5)
            proxy.accept()
        case "black hole":
            proxy.black_hole()
            await asyncio.sleep(0.5)
            proxy.resume()
