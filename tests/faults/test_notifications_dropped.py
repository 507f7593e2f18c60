"""Wake-ups are hints: if all are dropped, polling finds each message within `max_poll`."""

from __future__ import annotations

import asyncio
import time

import pytest

import millpond
from tests.faults.conftest import Everywhere
from tests.faults.processes import history, stop
from tests.faults.setup import ALL, Setup
from tests.waiting import until

MAX_POLL = 1.0


@pytest.mark.databases(*ALL)
async def test_polling_finds_everything(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        messages = 50 if long else 3
        plan = here.plan("sleeper", options={"max_workers": messages, "max_poll": MAX_POLL})
        worker = here.processes.start(plan)
        await worker.began()
        silent = await millpond.connect(here.url, notify=False)
        waits = []
        for n in range(messages):
            await here.publish("sleeper", [f"n-{n}"], silent)
            published = time.monotonic()
            await until(lambda: len(starts(plan.folder)) == n + 1, "a message to be found", every=0.005)  # noqa: B023
            waits.append(time.monotonic() - published)
            await asyncio.sleep(here.chance.uniform(0, 0.2))  # at any time between two polls
        await silent.close()
        (here.folder / "released").touch()
        await here.drained()
        await stop(worker)
        tally = await here.tally()
        tally.lost = here.confirmed - set(starts(plan.folder))
        tally.doubled = len(starts(plan.folder)) - messages
        await here.report("notifications dropped", tally, messages, found_after=f"{max(waits):.2f}s")
        assert not tally.lost
        assert tally.doubled == 0
        assert max(waits) < MAX_POLL + 15, waits  # a poll, plus delays of a busy machine

    await everywhere(scenario)


def starts(folder: str) -> list[str]:
    return [line["started"] for line in history(folder).read() if "started" in line]
