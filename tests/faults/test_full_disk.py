"""The disk of a database is full: results wait until there is room again, and no finished handler runs twice."""

from __future__ import annotations

import asyncio

import pytest

from millpond import Message
from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import stop
from tests.faults.setup import ALL, PATIENT, Setup, message
from tests.waiting import until

HELD = 300
"""Number of handlers that end while the disk is full."""
PADDING = "x" * 8000
"""A header of each of their messages: the tables have no room left for them."""


@pytest.mark.databases(*ALL, small_disk=True, short="sqlite")
async def test_results_wait_for_room(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        options = {"max_workers": HELD, "lease": 20 if long else 30, **PATIENT}
        worker = here.processes.start(here.plan("plain", "poison", folder="worker", options=options))
        held = [f"slow-{n}" for n in range(HELD)]
        await here.store.publish([padded("poison", number) for number in held])
        here.confirmed.update(held)
        await here.are_running(*held)
        async with load(here) as others:
            before = await others.rate(5 if long else 1)
            here.disk.fill()
            (here.folder / "worker" / "released").touch()
            await until(lambda: worker.log.count("outcomes wait") >= 3, f"{here.name}: results that wait")
            await asyncio.sleep(60 if long else 0)  # longer than the lease
            here.disk.free()
            after = await others.rate(5 if long else 1)
        await here.drained()
        await stop(worker)
        await here.judge("full disk", 1, rate=after / before)
        again = "SELECT count(*) FROM millpond_archive WHERE queue = 'poison' AND deliveries > 1"
        assert await here.one(again) == 0

    await everywhere(scenario)


def padded(queue: str, number: str) -> Message:
    plain = message(queue, number)
    return Message(queue=queue, payload=plain.payload, headers={**plain.headers, "padding": PADDING})
