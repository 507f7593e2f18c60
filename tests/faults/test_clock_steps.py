"""The database's clock is set forward and back by hours: living workers keep their messages, dead ones lose theirs."""

from __future__ import annotations

import pytest

import millpond
from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import Process, stop
from tests.faults.setup import ALL, Setup
from tests.file_clock import FileClock
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.databases(*ALL, short="sqlite", alone=True)
async def test_the_clock_is_set(everywhere: Everywhere, long: bool) -> None:
    """A worker dies at each step. Another one has a handler that runs through all of them, longer than its lease."""

    async def scenario(here: Setup) -> None:
        offset = here.folder / "hours"
        clock = FileClock(offset)
        clock.step(0)
        here.store = await millpond.connect(here.url, clock=clock)
        steps = [1, -1] * (5 if long else 1)
        victims = [await holder(here, f"victim-{n}", offset) for n in range(len(steps))]
        living = here.processes.start(
            here.plan("plain", "poison", folder="living", options={"lease": 3, "max_workers": 20}, clock=str(offset))
        )
        await here.publish("poison", ["slow-kept"])
        await here.are_running("slow-kept")
        before, rates = await rate(here, "before", 5 if long else 1), []
        for n, hours in enumerate(steps):
            victims[n].kill()
            clock.step(hours)
            rates.append(await rate(here, f"step-{n}", 5 if long else 1))
            again = f"SELECT count(*) FROM effects WHERE number = 'slow-victim-{n}'"
            await until(lambda: twice(here, again), f"{here.name}: the message of a dead worker", every=0.1)  # noqa: B023
        (here.folder / "living" / "released").touch()
        await here.drained()
        await stop(living)
        tally = await here.judge("steps of the clock", len(steps), rate=sum(rates) / len(rates) / before)
        assert tally.doubled == len(steps)
        await here.store.close()

    await everywhere(scenario)


async def holder(here: Setup, name: str, offset: object) -> Process:
    """A worker that holds one message, and has no room for another one."""
    process = here.processes.start(
        here.plan("poison", folder=name, options={"lease": 600, "max_workers": 1, "fetch": 1}, clock=str(offset))
    )
    await here.publish("poison", [f"slow-{name}"])
    await here.are_running(f"slow-{name}")
    return process


async def rate(here: Setup, name: str, seconds: float) -> float:
    """A message that is published between two steps waits until the clock has its time."""
    async with load(here, name) as others:
        measured = await others.rate(seconds)
    await here.drained_of("plain")
    return measured


async def twice(here: Setup, query: str) -> bool:
    return bool(await here.one(query) == 2)
