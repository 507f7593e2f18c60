"""Shared by the fault tests of Spark: drivers to kill, and the check of all messages afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.faults import spark_job
from tests.faults.checker import Tally
from tests.faults.plan import Aim
from tests.faults.processes import Process, history
from tests.faults.setup import Setup
from tests.faults.spark_plan import QUEUE, TARGET, Job
from tests.waiting import until

PATIENCE = 600.0
"""Seconds for a step of a JVM that takes ten on a quiet machine."""
_STARVED = "Timed out while waiting for the Python worker to connect back"
"""The error of Spark when Python takes ten seconds to start, on a busy machine; not our fault."""
_PUBLISH = 5000


class Queries:
    """The query of one scenario, run by one driver process after the other."""

    def __init__(self, here: Setup, **options: Any) -> None:
        self.here = here
        self.place = here.folder / options.pop("place", "query")
        self.place.mkdir()
        self._options = options

    def prepare(self, aim: Aim | None = None) -> Process:
        """A driver that starts its session and then waits for the file to go."""
        return self.here.processes.start(self._job(aim), "tests.faults.spark_job")

    def _job(self, aim: Aim | None = None) -> Job:
        return Job(url=self.here.url, folder=str(self.here.folder), place=str(self.place), aim=aim, **self._options)

    def go(self, driver: Process) -> Process:
        (self.here.folder / f"go-{driver.pid}").touch()
        return driver

    def start(self, aim: Aim | None = None) -> Process:
        return self.go(self.prepare(aim))

    async def ended(self, driver: Process) -> Process:
        """Wait for the end of the driver, or of its replacement."""
        await driver.ended(PATIENCE)
        return await self.ended(self.start(driver.plan.aim)) if is_starved(driver) else driver

    async def finish(self, driver: Process | None = None) -> None:
        """Let a driver process the remaining messages, to its end."""
        last = await self.ended(driver or self.start())
        assert last.code == 0, last.log[-6000:]

    async def finish_on(self, spark: Any) -> None:
        """The same on an existing session, which saves the start time."""
        await asyncio.to_thread(spark_job.start(spark, self._job()).awaitTermination)

    async def advance(self, driver: Process, batches: int) -> Process:
        """Wait until this driver, or its replacement, has begun and a number of batches are acknowledged."""

        def has_begun() -> bool:
            return driver.code is not None or any(
                "began" in line and line["pid"] == driver.pid for line in history(self.here.folder).read()
            )

        await until(has_begun, f"the driver {driver.pid}", PATIENCE, every=0.01)
        enough = await acked(self.here) + batches

        async def has_advanced() -> bool:
            return driver.code is not None or await acked(self.here) >= enough

        await until(has_advanced, f"{batches} batches of the driver {driver.pid}", PATIENCE, every=0.05)
        if is_starved(driver):
            return await self.advance(self.start(driver.plan.aim), batches)
        assert driver.code is None, f"ended with {driver.code}:\n{driver.log[-6000:]}"
        return driver

    async def goes_on(self, driver: Process) -> bool:
        """Whether this driver acknowledges another batch; otherwise it ended."""
        enough = await acked(self.here) + 1

        async def is_decided() -> bool:
            return driver.code is not None or await acked(self.here) >= enough

        await until(is_decided, f"the driver {driver.pid} to go on or end", PATIENCE, every=0.05)
        return driver.code is None

    async def sunk(self) -> list[str]:
        """Messages in the sink."""
        if self._options.get("sink") == "queue":
            staged = await self.here.one("SELECT count(*) FROM millpond_staging")
            assert staged == 0, "rows that dead drivers had loaded are collected"
            return await in_target(self.here)
        return self.files()

    def files(self) -> list[str]:
        """Messages in the files of all batches."""
        import pyarrow.parquet

        found: list[str] = []
        for path in sorted(Path(self.place, "files").glob("*/part-*.parquet")):
            rows = pyarrow.parquet.read_table(path)
            assert set(rows["deliveries"].to_pylist()) <= {1}, "a repeated batch is no new delivery"
            found += rows["number"].to_pylist()
        return found


def is_starved(driver: Process) -> bool:
    return driver.code == 1 and _STARVED in driver.log


async def publish(here: Setup, count: int, producer: str = "m") -> None:
    for start in range(0, count, _PUBLISH):
        await here.publish(QUEUE, [f"{producer}-{n}" for n in range(start, min(start + _PUBLISH, count))])


async def acked(here: Setup) -> int:
    """The number of the last claim that is acknowledged."""
    return int(await here.one("SELECT coalesce(max(acked_seq), 0) FROM millpond_stream"))


async def held(here: Setup) -> int:
    return int(
        await here.one(f"SELECT count(*) FROM millpond_message WHERE queue = '{QUEUE}' AND state = 'PROCESSING'")
    )


async def in_target(here: Setup) -> list[str]:
    rows = await here.rows(f"SELECT payload FROM millpond_message WHERE queue = '{TARGET}'")
    return [bytes(payload).decode() for (payload,) in rows]


async def judge(here: Setup, scenario: str, faults: int, sunk: Iterable[str], **more: Any) -> None:
    """Each message once in the sink, each acknowledged, none left claimed."""
    counted = Counter(sunk)
    tally = Tally(len(here.confirmed))
    tally.lost = here.confirmed - set(counted)
    tally.unexpected = set(counted) - here.confirmed
    tally.doubled = sum(count - 1 for count in counted.values())
    left_claimed = await held(here)
    await here.report(scenario, tally, faults, left_claimed=left_claimed, **more)
    assert not tally.lost
    assert not tally.unexpected
    assert tally.doubled == 0
    assert left_claimed == 0
    left = await here.one(f"SELECT count(*) FROM millpond_message WHERE queue = '{QUEUE}'")
    done = await here.one(f"SELECT count(*) FROM millpond_archive WHERE queue = '{QUEUE}' AND state = 'COMPLETED'")
    assert (left, done) == (0, len(here.confirmed))
