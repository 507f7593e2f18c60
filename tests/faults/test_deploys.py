"""Deploys over a long job: each stops its worker in an orderly way, and no stop counts as a crash."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.load import load
from tests.faults.processes import WORKER, Process, stop
from tests.faults.setup import ALL, Setup
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.databases(*ALL, short="sqlite", alone=True)
async def test_three_deploys_over_a_long_job(everywhere: Everywhere, long: bool) -> None:
    """A worker that has begun to stop is killed in the last deploy: this is no crash either."""

    async def scenario(here: Setup) -> None:
        deploys = 12 if long else 3
        old = start(here, 0)
        await here.publish("poison", ["slow-job"])
        await here.are_running("slow-job")
        async with load(here) as others:
            before = await others.rate(5 if long else 1)
            mark = await others.mark()
            for n in range(1, deploys + 1):
                new = start(here, n)
                await new.began()
                await end(here, old, killed=n % 3 == 0)
                await until(lambda n=n: ran(here, n + 1), f"{here.name}: the job again", every=0.1)
                old = new
            during = await others.rate_since(mark)
            assert await here.rows("SELECT deliveries, crashes FROM millpond_message WHERE queue = 'poison'") == [
                (deploys + 1, 0)
            ]
            (here.folder / f"worker-{deploys}" / "released").touch()
            after = await others.rate(5 if long else 0)
        await here.drained()
        await stop(old)
        tally = await here.judge("deploys over a long job", deploys, rate=2 * during / (before + after))
        assert tally.doubled >= deploys

    await everywhere(scenario)


def start(here: Setup, n: int) -> Process:
    killed = (n + 1) % 3 == 0
    grace = "10m" if killed else "200ms"  # one that is killed must not end before
    plan = here.plan("plain", "poison", folder=f"worker-{n}")
    return here.processes.start(plan, *WORKER, "--graceful-timeout", grace)


async def end(here: Setup, worker: Process, *, killed: bool) -> None:
    if not killed:
        await stop(worker)
        return
    worker.signal(signal.SIGTERM)

    async def recorded() -> bool:
        rows = await here.rows("SELECT name, stopping FROM millpond_worker")
        return any(stopping and name.endswith(f":{worker.pid}") for name, stopping in rows)

    await until(recorded, f"{here.name}: a worker that stops")
    worker.kill()


async def ran(here: Setup, times: int) -> bool:
    return bool(await here.one("SELECT count(*) FROM effects WHERE number = 'slow-job'") == times)
