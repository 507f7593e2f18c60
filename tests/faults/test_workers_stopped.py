"""A worker that is stopped for longer than its lease: others do its work, and its late results are refused."""

from __future__ import annotations

import signal
import time

import pytest

from tests.faults.conftest import Everywhere
from tests.faults.effects import OUTSIDE
from tests.faults.processes import Process, history, stop
from tests.faults.setup import ALL, Setup
from tests.waiting import until

pytestmark = pytest.mark.slow_on_servers

LEASE = 4.0


@pytest.mark.databases(*ALL)
async def test_stopped_past_the_lease(everywhere: Everywhere, long: bool) -> None:
    """`plain` tries to ack late; `exact` tries to commit its effect late, in a transaction that must fail."""

    async def scenario(here: Setup) -> None:
        rounds, each = (20 if long else 1), 10
        for n in range(rounds):
            # Without cancelling: the handlers must produce late results.
            options = {"max_workers": 2 * each, "lease": LEASE, "cancel_lost": False}
            plan = here.plan("plain", "exact", folder=f"late-{n}", options=options, hold=True)
            late = here.processes.start(plan)
            for queue in ("plain", "exact"):
                await here.publish(queue, [f"{queue}{n}-{i}" for i in range(each)])
            held = await here.live()

            async def all_run() -> bool:
                return len(await runs_of(here, late)) == held  # noqa: B023

            await until(all_run, "the handlers of the late worker", every=0.05)
            await here.stand_still(late)
            other = here.processes.start(here.plan("plain", "exact", folder=f"other-{n}", options=options))
            await here.drained()
            (here.folder / f"late-{n}" / "released").touch()
            late.signal(signal.SIGCONT)

            def refused() -> bool:
                return sum(line.get("lost", 0) for line in history(plan.folder).read()) >= 2 * each  # noqa: B023

            await until(refused, "the late results to be refused")
            await stop(late, other)
        tally = await here.judge("worker stopped past its lease", rounds, refused=2 * each * rounds)
        assert tally.doubled == 2 * each * rounds  # each a second time, never a third time

    await everywhere(scenario)


@pytest.mark.databases(*ALL)
async def test_stuck_in_a_handler(everywhere: Everywhere) -> None:
    """A handler that blocks its process, as C code may: other workers get its message and its neighbours."""

    async def scenario(here: Setup) -> None:
        options = {"max_workers": 4, "lease": LEASE, "timeout": 1.0}
        plan = here.plan("poison", folder="stuck", options=options)
        await here.publish("poison", ["stick-0", *(f"good-{n}" for n in range(20))])
        stuck = here.processes.start(plan)

        async def sticks() -> bool:
            return "stick-0" in await runs_of(here, stuck)

        await until(sticks, "the stuck handler", every=0.05)
        other = here.processes.start(here.plan("poison", folder="other", options=options))
        await other.began()
        began = time.monotonic()
        await here.drained()
        stuck.kill()
        await stop(other)
        await here.judge("worker stuck in a handler", 1, done_after=f"{time.monotonic() - began:.1f}s")

    await everywhere(scenario)


async def runs_of(here: Setup, process: Process) -> list[str]:
    rows = await here.rows(f"SELECT number FROM effects WHERE place = '{OUTSIDE}' AND pid = {process.pid}")
    return [number for (number,) in rows]
