"""Connections cut by a proxy between workers and their database: at random, and while a reply is on its way.

After a lost reply to a commit it is unknown whether it happened; the store finds out.
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
from tests.faults.load import load
from tests.faults.processes import beside, some_time, stop
from tests.faults.setup import PATIENT, SERVERS, Setup, message
from tests.waiting import until

pytestmark = pytest.mark.slow

LEASE = 30.123457
"""These bytes identify a claim among PostgreSQL's statements."""


@pytest.mark.databases(*SERVERS)
async def test_under_load(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
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


@pytest.mark.databases(*SERVERS)
async def test_a_subscriber_of_three_queues(everywhere: Everywhere, long: bool) -> None:
    """Replies to claims are lost while messages of other queues have been claimed in the same call."""

    async def scenario(here: Setup) -> None:
        queues = ["poison", "second", "third"]
        faults = 50 if long else 6
        with Proxy(here.server.port) as proxy:
            plan = here.plan(
                "poison",
                folder="worker",
                beside={"poison": queues[1:]},
                options={"max_workers": 1000, **PATIENT},
                url=proxy.url(here.url),
            )
            worker = here.processes.start(plan)
            other = here.processes.start(here.plan("plain", folder="other"))
            await worker.began()
            async with load(here) as others:
                before = await others.rate(10 if long else 1)
                mark = await others.mark()
                for n in range(faults):
                    lost = proxy.cut_after(queues[n % 3].encode())
                    numbers = {queue: [f"slow-{queue}-{n}-{i}" for i in range(6)] for queue in queues}
                    batch = [message(queue, number) for queue in queues for number in numbers[queue]]
                    await here.store.publish(batch)
                    here.confirmed.update(*numbers.values())
                    await until(lost.is_set, f"{here.name}: a lost reply to a claim")
                during = await others.rate_since(mark)
            (here.folder / "worker" / "released").touch()
            await here.drained()
            await stop(worker, other)
        await here.judge("replies to claims of three queues lost", faults, rate=during / before)

    await everywhere(scenario)


async def lost_reply(here: Setup, proxy: Proxy, kind: str, n: int) -> None:
    """The server executes the statement, and its reply is lost with the connection."""
    number, id_ = f"{kind}{n}", uuid4()
    if kind == "commit":
        pattern = COMMIT.encode()
    elif here.name == "mariadb":
        pattern = b"COMMIT"  # of the first statement: a claim, a settle or a beat
    else:  # one statement, identified by its lease or by a message id
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
