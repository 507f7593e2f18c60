"""Lateness of messages that another process publishes for now or later: `on_time`, and that process.

`python -m bench.on_time COUNT` publishes; the URL is on stdin, because it contains a password.
"""

import asyncio
import statistics
import sys
import time
from asyncio.subprocess import PIPE

from bench.contestants import ROOT
from bench.databases import Database
from bench.measure import Measurement, single
from bench.scenario import Scenario, fresh
from bench.side import QUEUE
from bench.sizes import Sizes
from bench.store_side import open_store
from millpond import Delivery, Millpond

_DELAYS = (0.0, 0.3, 1.0, 3.0)
_PAUSE = 0.25
"""Seconds between two messages: the worker has nothing to do meanwhile."""
_MAX_POLL = 60.0
_FINISH = 60.0
"""Maximum seconds for the messages that are left at the end."""


async def on_time(scenario: Scenario, database: Database, sizes: Sizes) -> list[Measurement]:
    """One idle worker with a long `max_poll`. Lateness is the time from the due time to the handler."""
    late, done = list[float](), asyncio.Event()
    async with fresh(database) as url:
        await (await open_store(url)).close()
        async with Millpond(url) as pond:

            @pond.subscriber(QUEUE, max_poll=_MAX_POLL)
            async def handle(body: int, delivery: Delivery) -> None:
                late.append(1000 * (time.time() - delivery.claim.due_us / 1e6))
                if len(late) == sizes.latency:
                    done.set()

            working = asyncio.create_task(pond.run(signals=False))
            await _publish_elsewhere(url, sizes.latency)
            async with asyncio.timeout(_FINISH):
                await done.wait()
            pond.stop()
            await working
    what = "lateness of messages of another process"
    facts = {"messages": len(late), "delays in s": list(_DELAYS), "max_poll in s": _MAX_POLL}
    median = single(f"{scenario.name}-p50", f"{what}, p50", "", statistics.median(late), "ms", **facts)
    return [median, single(f"{scenario.name}-max", f"{what}, max", "", max(late), "ms", at_most=scenario.bar, **facts)]


async def _publish_elsewhere(url: str, count: int) -> None:
    command = (sys.executable, "-m", "bench.on_time", str(count))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, cwd=ROOT)
    await process.communicate(url.encode())
    if process.returncode:
        raise RuntimeError(f"the process that publishes ended with {process.returncode}")


async def _publish(url: str, count: int) -> None:
    async with Millpond(url) as pond:
        for n in range(count):
            await pond.publish(QUEUE, n, delay=_DELAYS[n % len(_DELAYS)])
            await asyncio.sleep(_PAUSE)


if __name__ == "__main__":
    asyncio.run(_publish(sys.stdin.read(), int(sys.argv[1])))
