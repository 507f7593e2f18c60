"""The database server killed with `kill -9` in the middle of a batch: the query fails or waits, then continues."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.processes import some_time
from tests.faults.setup import SERVERS, Setup
from tests.faults.spark_queries import Queries, held, judge, publish

pytestmark = [pytest.mark.java, pytest.mark.long]


@pytest.mark.databases(*SERVERS, own=True)
async def test_in_mid_batch(everywhere: Everywhere) -> None:
    async def scenario(here: Setup) -> None:
        crashes, in_flight, restarts = 4, 0, 0
        await publish(here, 20_000)
        queries = Queries(here, per_trigger=500)
        driver = queries.start()
        for _ in range(crashes):
            driver = await queries.advance(driver, 2)
            await some_time(here.chance, 0.0, 0.5)
            await asyncio.to_thread(here.server.kill)
            await asyncio.to_thread(here.server.start)
            in_flight += await held(here) > 0
            # A task that was reading fails, and with it a local query: its operator restarts it.
            if not await queries.goes_on(driver):
                restarts += 1
                driver = queries.start()
        await queries.finish(driver)
        more = {"in_flight": in_flight, "restarts": restarts}
        await judge(here, "database killed under spark", crashes, queries.files(), **more)
        assert in_flight > 0

    await everywhere(scenario)
