"""Handlers on Spark against a worker without Spark, against coroutines without a queue, and against micro-batches.

Two long-running tasks of `local[2]` against one worker process, and against the same coroutines in two processes. The
measured time is from the first handled message to the last; the start of Spark is reported separately.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import psycopg

import millpond.spark
from bench.contestants import ROOT
from bench.databases import BASE, COLUMNS
from bench.measure import Measurement, Work, ratio, take_turns
from bench.side import PAYLOAD, PRIORITY, QUEUE
from bench.spark import handled
from bench.spark.setup import Setup

NO_OP_BAR, SLOW_BAR = 0.5, 0.8
TASKS = 2
PER_TRIGGER = 10_000
FILL = (
    f"INSERT INTO millpond_message ({COLUMNS}) SELECT gen_random_uuid(), %s, %s, %s::bigint + n, 'PENDING', %s, "
    "%s::bigint + n FROM generate_series(1, %s) n"
)
Contestant = Callable[[Path, str], Awaitable[None]]
"""Handles all messages and writes their times to the folder."""


async def handlers(setup: Setup, rows: int, rounds: int) -> list[Measurement]:
    return await Handlers(setup, max(rows // 20, 100)).measure(rounds)


class Handlers:
    def __init__(self, setup: Setup, count: int) -> None:
        self._setup = setup
        self._count = count
        self._whole: dict[str, list[float]] = {}
        """Seconds of complete runs, including start and end."""

    async def measure(self, rounds: int) -> list[Measurement]:
        """The first round is a warm-up."""
        count = self._count
        no_op = await take_turns(
            {
                "spark": self._work("no-op", self._spark),
                "worker": self._work("no-op", self._worker),
                "micro-batches": self._work("no-op", self._micro_batches),
            },
            rounds + 1,
        )
        slow = await take_turns(
            {
                "spark": self._work("slow", self._spark),
                "coroutines": self._work("slow", self._coroutines),
                "micro-batches": self._work("slow", self._micro_batches),
            },
            rounds + 1,
        )
        a, b, c = (no_op[name][1:] for name in ("spark", "worker", "micro-batches"))
        d, e, f = (slow[name][1:] for name in ("spark", "coroutines", "micro-batches"))
        slowly = f"async handlers of 5 ms on Spark, {handled.AT_ONCE} at once in each of {TASKS} tasks"
        plain, micro = "the same coroutines without a queue", f"micro-batches of {PER_TRIGGER:,}"
        found = [
            ratio("spark-handlers", "no-op handlers on Spark", "one worker process", a, b, count, at_least=NO_OP_BAR),
            ratio("spark-handlers-micro", "no-op handlers on Spark", micro, a, c, count),
            ratio("spark-handlers-slow", slowly, plain, d, e, count, at_least=SLOW_BAR),
            ratio("spark-handlers-slow-micro", slowly, micro, d, f, count),
        ]
        whole = {name: round(statistics.median(took[1:]), 1) for name, took in self._whole.items()}
        return [measurement.with_facts({"seconds of whole runs": whole}) for measurement in found]

    def _work(self, kind: str, contestant: Contestant) -> Work:
        whole = self._whole.setdefault(f"{kind} {contestant.__name__.strip('_')}", [])

        async def timed() -> float:
            self._setup.execute("TRUNCATE millpond_message, millpond_archive")
            with psycopg.connect(self._setup.url, autocommit=True) as connection:
                connection.execute(FILL, (QUEUE, PRIORITY, BASE, PAYLOAD, BASE, self._count))
                connection.execute("VACUUM ANALYZE millpond_message")
                connection.execute("CHECKPOINT")
            with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
                began = time.monotonic()
                await contestant(Path(folder), kind)
                whole.append(time.monotonic() - began)
                return handled.seconds(Path(folder), self._count)

        return timed

    def _module(self, folder: Path, kind: str) -> str:
        """Write the module that both kinds of workers import."""
        name = f"handled_{uuid4().hex}"
        made = f"pond_at({self._setup.url!r}, {str(folder)!r}, {kind!r})"
        (folder / f"{name}.py").write_text(f"from bench.spark.handled import pond_at\npond = {made}\n")
        return name

    async def _spark(self, folder: Path, kind: str) -> None:
        pond, at = handled.pond_at(self._setup.url, str(folder), kind), f"{self._module(folder, kind)}:pond"
        sys.path[:0] = [str(folder), str(ROOT)]  # tasks of a local Spark use our path
        try:
            await asyncio.to_thread(millpond.spark.run, pond, self._setup.spark, at=at, tasks=TASKS, until_idle=True)
        finally:
            del sys.path[:2]

    async def _worker(self, folder: Path, kind: str) -> None:
        command = ("-m", "millpond", "run", self._module(folder, kind), "--until-idle", "--log-level", "error")
        await _processes([command], folder)

    async def _coroutines(self, folder: Path, kind: str) -> None:
        each = self._count // TASKS
        await _processes([("-m", "bench.spark.handled", str(folder), str(each))] * TASKS, folder)

    async def _micro_batches(self, folder: Path, kind: str) -> None:
        def drain() -> None:
            options = {"url": self._setup.url, "queue": QUEUE, "stream": uuid4().hex, "minPartitions": TASKS}
            stream = self._setup.spark.readStream.format("millpond").options(
                **options, maxMessagesPerTrigger=PER_TRIGGER
            )
            rows = stream.load().select("id", "payload").mapInArrow(handled.batches(str(folder), kind), "id string")
            writer = rows.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
            writer.trigger(availableNow=True).start().awaitTermination()

        await asyncio.to_thread(drain)


async def _processes(commands: list[tuple[str, ...]], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    started = [
        await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, env=environment)
        for command in commands
    ]
    for process in started:
        if await process.wait():
            raise RuntimeError(f"a process ended with {process.returncode}")
