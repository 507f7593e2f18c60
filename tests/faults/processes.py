"""Worker processes that can be killed, stopped and restarted; none outlives its test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any, Self

from servers.processes import family
from tests.faults.history import History
from tests.faults.plan import Plan
from tests.waiting import SOON, until

ROOT = Path(__file__).resolve().parents[2]
WORKER = ("millpond", "run", "tests.faults.app:pond")


class Process:
    """One worker process, or one command with several."""

    def __init__(self, plan: Plan, command: list[str], log: IO[bytes]) -> None:
        self.plan = plan
        self._log = Path(log.name)
        self._popen = subprocess.Popen(
            command, cwd=ROOT, env=plan.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it is alive."""
        return self._popen.poll()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def children(self) -> list[int]:
        return family(self.pid)[1:]

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """`kill -9` of the process and its children."""
        for pid in family(self.pid) if self.code is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()

    async def began(self, within: float = SOON) -> None:
        """Whether its worker runs and handles signals."""

        def is_told() -> bool:
            return any(line.get("began") and line["pid"] == self.pid for line in history(self.plan.folder).read())

        await until(is_told, f"the start of process {self.pid}", within, every=0.05)

    async def ended(self, within: float = SOON) -> int:
        await until(lambda: self.code is not None, f"the end of process {self.pid}", within)
        assert self.code is not None
        return self.code


class Processes:
    """All processes of a scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Process] = []
        self.restarts = 0
        folder.mkdir(parents=True, exist_ok=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.all:
            process.kill()

    def start(self, plan: Plan, *command: str) -> Process:
        """A process with this plan; by default a worker alone, without a supervisor."""
        with (self.folder / f"log-{len(self.all)}").open("wb") as log:
            process = Process(plan, [sys.executable, "-m", *(command or WORKER)], log)
        self.all.append(process)
        return process

    @contextlib.asynccontextmanager
    async def keep_workers(self, count: int, plan: Plan) -> AsyncIterator[list[Process]]:
        """A number of workers; one that ends is replaced while the context lasts."""
        workers = [self.start(plan) for _ in range(count)]

        async def replace() -> None:
            while True:
                for n, process in enumerate(workers):
                    if process.code is not None:
                        self.restarts += 1
                        workers[n] = self.start(plan)
                await asyncio.sleep(0.02)

        async with beside(replace()):
            yield workers
        for process in workers:
            await process.began()
        await stop(*workers)


async def stop(*processes: Process, within: float = SOON) -> None:
    """Send SIGTERM; every process must end with code 0."""
    for process in processes:
        process.signal(signal.SIGTERM)
    for process in processes:
        code = await process.ended(within)
        assert code == 0, f"ended with {code}:\n{process.log[-4000:]}"


def history(folder: Path | str) -> History:
    """Lines that the processes of a folder wrote."""
    return History(Path(folder) / "history")


@contextlib.asynccontextmanager
async def beside(work: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Run work while the context lasts, then cancel it. Its failure is raised."""
    task = asyncio.ensure_future(work)
    try:
        yield task
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def some_time(chance: random.Random, least: float, most: float) -> None:
    """A random time between two faults."""
    await asyncio.sleep(chance.uniform(least, most))
