"""The database server killed with `kill -9` under load: workers wait for it and continue; nothing is lost.

Committed data survives the end of the server's processes. A power cut, which also loses data that the operating system
has not written yet, is not tested here.
"""

from __future__ import annotations

import asyncio
import time

import pytest

import millpond
from millpond import Transport
from tests.faults.conftest import Everywhere
from tests.faults.processes import beside, some_time, stop
from tests.faults.setup import PATIENT, SERVERS, Setup
from tests.waiting import until

RESUME = 30.0
"""Seconds after the server's return within which workers must work again."""


@pytest.mark.slow
@pytest.mark.databases(*SERVERS, own=True)
async def test_under_load(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        crashes, messages = (50, 50_000) if long else (2, 400)
        options = {"max_workers": 8, "lease": 30, **PATIENT}
        workers = [here.processes.start(here.plan("plain", "exact", options=options)) for _ in range(2)]
        await here.steady(*workers)  # a worker that has not connected yet would rightly end, and test nothing
        # One producer waits for the server. The other gives up at once; the result of its last publish is unknown.
        impatient = await millpond.connect(here.url, reconnect_timeout=0)
        enough = asyncio.Event()

        async def produce(name: str, store: Transport) -> None:
            n = 0
            while not enough.is_set() or n < messages // 40:
                await here.produce(f"{name}{n}", 20, batch=10, store=store)
                await asyncio.sleep(0.02)
                n += 1

        resumed = []
        async with beside(produce("patient", here.store)) as patient, beside(produce("impatient", impatient)) as other:
            for _ in range(crashes):
                await until(lambda: at_work(here), "work to be done", every=0.05)
                await some_time(here.chance, 0.0, 0.5)
                await asyncio.to_thread(here.server.kill)
                await asyncio.to_thread(here.server.start)
                back = time.monotonic()
                await until(lambda: at_work(here), "workers to go on", every=0.05)
                resumed.append(time.monotonic() - back)
            enough.set()
            await asyncio.gather(patient, other)
        await impatient.close()
        await here.drained(within=600 if long else 60)
        await stop(*workers)  # the same processes as at the beginning
        worst = max(resumed)
        await here.judge("database killed under load", crashes, unknown=len(here.unknown), resumed=f"{worst:.2f}s")
        assert worst < RESUME

    await everywhere(scenario)


async def at_work(here: Setup) -> bool:
    """Whether the number of settled messages grows."""
    count = "SELECT count(*) FROM millpond_archive"
    before = await here.one(count)
    await asyncio.sleep(0.05)
    return bool(await here.one(count) > before)
