"""Handlers on Spark: executors, workers and drivers killed with `kill -9` while they work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from servers import SparkCluster
from servers.processes import family
from tests.faults.conftest import Everywhere
from tests.faults.plan import VARIABLE
from tests.faults.processes import ROOT, Process, history, some_time, stop
from tests.faults.setup import PATIENT, Setup
from tests.faults.spark_queries import PATIENCE
from tests.faults.test_spark_executors_killed import executors
from tests.waiting import until

pytestmark = [pytest.mark.java, pytest.mark.long]

MESSAGES = 20_000


@pytest.mark.databases("postgres", "mariadb")
async def test_on_a_cluster(everywhere: Everywhere) -> None:
    async def scenario(here: Setup) -> None:
        rounds = 4
        cluster = SparkCluster()
        try:
            await asyncio.to_thread(cluster.start)
            producing = asyncio.create_task(here.produce("h", MESSAGES))
            driver = start(here, cluster.url, cluster.settings)
            for _ in range(rounds):
                await at_work(here, driver)
                executor = here.chance.choice(await until(lambda: executors(cluster), "an executor", PATIENCE))
                kill(*(family(executor) if here.chance.random() < 0.5 else [executor]))
                await at_work(here, driver)
                kill(here.chance.choice(await until(lambda: workers(here), "a worker", PATIENCE)))
                await at_work(here, driver)
                driver.kill()
                driver = start(here, cluster.url, cluster.settings)
            await producing
            await here.drained(within=PATIENCE)
            await listening(driver)
            await stop(driver, within=PATIENCE)
        finally:
            await asyncio.to_thread(cluster.close)
        await here.judge("spark handlers killed on a cluster", 3 * rounds)

    await everywhere(scenario)


@pytest.mark.databases("sqlite")
async def test_on_one_machine(everywhere: Everywhere) -> None:
    async def scenario(here: Setup) -> None:
        kills = 6
        producing = asyncio.create_task(here.produce("h", MESSAGES // 4))
        driver = start(here, "local[2]", {})
        for _ in range(kills):
            await at_work(here, driver)
            driver.kill()
            driver = start(here, "local[2]", {})
        await producing
        await here.drained(within=PATIENCE)
        await listening(driver)
        await stop(driver, within=PATIENCE)
        await here.judge("spark handlers killed on one machine", kills)

    await everywhere(scenario)


def start(here: Setup, master: str, settings: dict[str, str]) -> Process:
    plan = here.plan("plain", "exact", options={"max_workers": 4, "lease": 10, **PATIENT})
    # Executors have neither the driver's environment nor its folder.
    theirs = {"spark.executorEnv." + VARIABLE: plan.environment()[VARIABLE], "spark.executorEnv.PYTHONPATH": str(ROOT)}
    conf = [word for name, value in (settings | theirs).items() for word in ("--conf", f"{name}={value}")]
    options = ["--on", "spark", "--master", master, "--tasks", "2", *conf]
    return here.processes.start(plan, "millpond", "run", "tests.faults.app:pond", *options)


async def at_work(here: Setup, driver: Process) -> None:
    """Wait until a living worker has begun, and some time more."""
    before = len(workers(here, all=True))

    def is_working() -> bool:
        assert driver.code is None, driver.log[-6000:]
        return len(workers(here)) >= 1 and (len(workers(here)) == 2 or len(workers(here, all=True)) > before)

    await until(is_working, "a worker", PATIENCE, every=0.05)
    await some_time(here.chance, 0.5, 3.0)


async def listening(driver: Process) -> None:
    """Wait until the driver handles signals: workers of the previous one may have done all while its session starts."""
    await until(lambda: "tasks of" in driver.log, "the driver", PATIENCE, every=0.05)


def workers(here: Setup, *, all: bool = False) -> list[int]:
    """Worker processes that have begun and are alive."""
    begun = [line["pid"] for line in history(here.folder).read() if line.get("began")]
    return [pid for pid in begun if all or os.path.exists(f"/proc/{pid}")]


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
