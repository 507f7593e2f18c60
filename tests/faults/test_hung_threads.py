"""All threads of a worker's subscriber hang: another worker handles its messages, its other queue goes on."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import stop
from tests.faults.setup import ALL, PATIENT, Setup
from tests.waiting import until

pytestmark = pytest.mark.slow

THREADS = 4


@pytest.mark.databases(*ALL, short="sqlite", alone=True)
async def test_all_threads_hang(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        rounds = 20 if long else 1
        rates = []
        for n in range(rounds):
            options = {"max_workers": THREADS, "timeout": 1.0, "lease": 4, **PATIENT}
            stuck = here.processes.start(here.plan("plain", "thread", folder=f"stuck-{n}", options=options))
            hung = [f"hang-{n}-{i}" for i in range(THREADS)]
            await here.publish("thread", hung)
            await here.are_running(*hung)
            async with load(here, f"load-{n}") as others:
                before = await others.rate(1)
                await here.publish("thread", [f"good-{n}-{i}" for i in range(50)])
                await until(lambda: "hang beyond their timeout" in stuck.log, f"{here.name}: hung threads")  # noqa: B023
                rates.append(await others.rate(1) / before)
                other = here.processes.start(here.plan("thread", folder=f"other-{n}", options=options))
                await here.drained_of("thread")
            (here.folder / f"stuck-{n}" / "released").touch()
            await here.drained()
            await stop(stuck, other)
        tally = await here.judge("all threads hang", rounds, rate=sum(rates) / rounds)
        assert tally.doubled >= rounds * THREADS  # on a busy machine other handlers exceed their timeout too

    await everywhere(scenario)
