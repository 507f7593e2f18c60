"""Outages that are longer than the lease, for all workers and for one of them alone."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from servers import Proxy
from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import Process, stop
from tests.faults.setup import PATIENT, SERVERS, Setup
from tests.faults.test_many_handlers import beats_again
from tests.waiting import until

pytestmark = pytest.mark.slow

LEASE = 3.0
HELD = 10
"""Number of messages that one of two workers holds."""


@pytest.mark.databases(*SERVERS, short="postgres", alone=True)
async def test_longer_than_the_lease(everywhere: Everywhere, long: bool) -> None:
    rounds = 10 if long else 1

    async def for_all(here: Setup) -> None:
        """No running handler is started again."""
        with ExitStack() as stack:
            proxies = [stack.enter_context(Proxy(here.server.port)) for _ in range(2)]
            workers = await two_workers(here, *proxies)
            async with load(here) as others:
                before = await others.rate(1)
                for _ in range(rounds):
                    for proxy in proxies:
                        cut_off(proxy)
                    await asyncio.sleep(2 * LEASE)
                    for proxy in proxies:
                        proxy.accept()
                    await beats_again(here, *workers)
                await asyncio.sleep(2 * LEASE)  # a wrong judgement would show by now
                after = await others.rate(1)
            assert await runs(here) == HELD
            await finish(here, *workers)
            assert await runs(here) == HELD
        await here.judge("outage for all workers", rounds, rate=after / before)

    async def for_one(here: Setup) -> None:
        """The other one starts its messages again, and goes on meanwhile."""
        with Proxy(here.server.port) as proxy, Proxy(here.server.port) as others_proxy:
            cut, other = await two_workers(here, proxy, others_proxy)
            async with load(here) as others:
                before = await others.rate(1)
                cut_off(proxy)
                during = await others.rate(2 * LEASE)
                await until(lambda: all_again(here), f"{here.name}: the messages of the worker that is cut off")
                proxy.accept()
                await beats_again(here, cut, other)
            await finish(here, cut, other)
        tally = await here.judge("outage for one worker", 1, rate=during / before)
        assert tally.doubled >= HELD

    await everywhere(for_all, for_one)


async def two_workers(here: Setup, *proxies: Proxy) -> list[Process]:
    """The first of them holds messages."""
    workers = []
    for name, proxy in zip(("first", "second"), proxies, strict=True):
        options = {"lease": LEASE, "max_workers": 2 * HELD, **PATIENT}
        plan = here.plan("plain", "poison", folder=name, options=options, url=proxy.url(here.url))
        workers.append(here.processes.start(plan))
        if name == "first":
            held = [f"slow-{n}" for n in range(HELD)]
            await here.publish("poison", held)
            await here.are_running(*held)
    await here.steady(*workers)
    return workers


def cut_off(proxy: Proxy) -> None:
    proxy.refuse()
    proxy.cut()


async def finish(here: Setup, *workers: Process) -> None:
    for name in ("first", "second"):
        (here.folder / name / "released").touch()
    await here.drained()
    await stop(*workers)


async def runs(here: Setup) -> int:
    return int(await here.one("SELECT count(*) FROM effects WHERE substr(number, 1, 4) = 'slow'"))


async def all_again(here: Setup) -> bool:
    return await runs(here) == 2 * HELD
