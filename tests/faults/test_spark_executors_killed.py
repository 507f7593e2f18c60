"""Executors of a real cluster killed with `kill -9` during a streaming query: the query continues by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from servers import SparkCluster
from servers.processes import family
from tests.faults.conftest import Everywhere
from tests.faults.processes import some_time
from tests.faults.setup import Setup
from tests.faults.spark_queries import PATIENCE, Queries, judge, publish
from tests.waiting import until

pytestmark = [pytest.mark.java, pytest.mark.long]


@pytest.mark.parametrize("sink", ["files", "queue"])
@pytest.mark.databases("postgres")
async def test_in_mid_batch(everywhere: Everywhere, sink: str) -> None:
    async def scenario(here: Setup) -> None:
        kills = 3
        await publish(here, 60_000)
        cluster = SparkCluster()
        try:
            await asyncio.to_thread(cluster.start)
            queries = Queries(here, per_trigger=1000, master=cluster.url, settings=cluster.settings, sink=sink)
            driver = queries.start()
            for _ in range(kills):
                driver = await queries.advance(driver, 2)
                await some_time(here.chance, 0.0, 1.0)
                pids = await until(lambda: executors(cluster), "an executor", PATIENCE)
                os.kill(here.chance.choice(pids), signal.SIGKILL)
            await queries.finish(driver)  # the driver that was started
        finally:
            await asyncio.to_thread(cluster.close)
        await judge(here, f"spark executors killed, {sink}", kills, await queries.sunk())

    await everywhere(scenario)


def executors(cluster: SparkCluster) -> list[int]:
    """JVMs that run tasks, without their parent shells and daemons and their Python children."""
    return [pid for worker in cluster.workers for pid in family(worker.pid) if is_executor(pid)]


def is_executor(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return command[0].endswith(b"java") and b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in command
