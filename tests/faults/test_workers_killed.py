"""Workers killed with `kill -9`, at random and at chosen points, and the time until their messages run elsewhere."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.plan import Aim
from tests.faults.processes import beside, history, some_time, stop
from tests.faults.setup import ALL, PATIENT, Setup
from tests.waiting import until

AIMS = [
    Aim("claim", "before", 2),
    Aim("claim", "amid", 1),
    Aim("claim", "amid", 2),
    Aim("claim", "after", 1),
    Aim("handler", "before", 5),
    Aim("effect", "before", 3),
    Aim("settle", "before", 2),
    Aim("settle", "amid", 1),
    Aim("settle", "amid", 3),
    Aim("settle", "after", 2),
    Aim("commit", "before", 3),
    Aim("committed", "before", 3),
]


@pytest.mark.slow
@pytest.mark.databases(*ALL)
async def test_at_random(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        kills, messages, size = 6, 600, 3
        if long:
            kills, messages, size = (300, 100_000, 8) if here.name == "postgres" else (60, 10_000, 8)
        options = {"max_workers": 4, "lease": 10, **PATIENT}
        async with here.processes.keep_workers(size, here.plan("plain", "exact", options=options)) as workers:
            producing = asyncio.create_task(here.produce("a", messages))
            await until(lambda: history(here.folder).read(), "the first worker")
            for _ in range(kills):
                await some_time(here.chance, 0.2, 1.0)
                here.chance.choice(workers).kill()
            await producing
            await here.drained(within=3600 if long else 60)
        await here.judge("workers killed at random", kills)
        assert here.processes.restarts == kills

    await everywhere(scenario)


@pytest.mark.slow
@pytest.mark.databases(*ALL)
async def test_at_chosen_points(everywhere: Everywhere, long: bool) -> None:
    async def scenario(here: Setup) -> None:
        options = {"max_workers": 4, "fetch": 20, "lease": 60, **PATIENT}
        survivor = here.processes.start(here.plan("plain", "exact", options=options))

        enough = asyncio.Event()

        async def produce() -> None:
            n = 0
            while not enough.is_set():
                await here.produce(f"b{n}", 20, batch=10)
                await asyncio.sleep(0.05)
                n += 1

        async with beside(produce()) as producing:
            for _ in range(10 if long else 1):
                victims = [here.processes.start(here.plan("plain", "exact", options=options, aim=aim)) for aim in AIMS]
                for victim in victims:
                    code = await victim.ended()
                    assert code == -signal.SIGKILL, (victim.plan.aim, victim.log[-3000:])
            enough.set()
            await producing
        await here.drained()
        await stop(survivor)
        await here.judge("workers killed at chosen points", len(here.processes.all) - 1)

    await everywhere(scenario)


@pytest.mark.databases(*ALL)
async def test_messages_come_back_in_about_two_seconds(everywhere: Everywhere, long: bool) -> None:
    """Not after the lease, which is a minute here."""

    async def scenario(here: Setup) -> None:
        held, waits = 100, []
        options = {"max_workers": held, "lease": 60}
        survivor_plan = here.plan("sleeper", folder="survivor", options=options)
        survivor = here.processes.start(survivor_plan)
        seen = history(survivor_plan.folder)
        await here.steady(survivor)
        for n in range(10 if long else 1):
            # While it is stopped, the other gets the messages. It holds its lock, so it does not count as dead.
            await here.stand_still(survivor)
            victim_plan = here.plan("sleeper", folder=f"victim-{n}", options=options)
            victim = here.processes.start(victim_plan)
            await here.publish("sleeper", [f"c{n}-{i}" for i in range(held)])
            await until(lambda: len(started(victim_plan.folder)) == held, "the handlers of the victim")  # noqa: B023
            survivor.signal(signal.SIGCONT)
            await here.steady(survivor, victim)
            victim.kill()
            killed_at = time.monotonic()
            await until(lambda: len(started(survivor_plan.folder)) == held * (n + 1), "the messages to come back")  # noqa: B023
            waits.append(time.monotonic() - killed_at)
            (here.folder / "survivor" / "released").touch()
            await here.drained()
            (here.folder / "survivor" / "released").unlink()
        here.processes.all[-1].kill()
        runs = [line for line in seen.read() if "started" in line]
        tally = await here.tally()
        tally.lost = here.confirmed - {line["started"] for line in runs}
        tally.doubled = len(runs)
        tally.unflagged = {line["started"] for line in runs if line["deliveries"] != 2}
        await here.report("a killed worker's messages", tally, len(waits), back_after=f"{max(waits):.2f}s")
        assert not tally.lost
        assert not tally.unflagged
        assert max(waits) < 15, waits  # on a busy machine

    await everywhere(scenario)


def started(folder: str) -> list[str]:
    return [line["started"] for line in history(folder).read() if "started" in line]
