"""A key range moves to and fro under load, while movers are killed before each step, or two operators work at once.

Nothing is lost, no repeat is unflagged, ids stay known, and the shard beside them keeps its rate. All publishers and
workers were connected before the moves: each has an old map again and again.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from millpond import Message
from tests.faults.processes import ROOT
from tests.faults.test_shards import NAMES, Load, judge, three_shards
from tests.shards.test_moves import STEPS
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.server]

RANGE = "55-aa"
"""That of the shard `b`. It moves to `c` and back; `a` has no part in this."""
SCHEDULED = 30
"""Messages of each step. Half of them wait while their range moves: workers would take all others first."""
LATER = 3600.0


async def python(*arguments: str) -> tuple[int, str]:
    """Run a module. Returns its exit code, or minus the signal that ended it, and its errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def move(target: str, urls: list[str]) -> tuple[int, str]:
    return await python("millpond", "shards", "move", RANGE, "--to", target, *urls)


async def publish_scheduled(load: Load, seen: list[Message]) -> None:
    """Publish messages, half of them due after all moves. Ids of earlier ones, published again, must be known."""
    new = [
        Message(queue="q", payload=b'"b"', key=load.key("b"), id=uuid4(), delay=LATER if n % 2 else 0)
        for n in range(SCHEDULED)
    ]
    load.known |= {one.id: "b" for one in await load.store.publish(new)}
    again = await load.store.publish(seen)
    assert not any(one.new for one in again), "an id is known, wherever its range is"
    seen[:] = [*seen[-4 * SCHEDULED :], *new]


@asynccontextmanager
async def measured(scenario: str, long: bool) -> AsyncIterator[tuple[Load, list[str], list[int]]]:
    """A load on three shards, and its judge. The list gets the number of faults."""
    window, faults = 60.0 if long else 5.0, [0]
    async with three_shards() as (_, _, urls), Load(urls).running() as load:
        await until(lambda: {name for _, name in load.times} == set(NAMES))
        before = await load.rate(window)
        began, first = time.monotonic(), len(load.times)
        yield load, urls, faults
        share = window / (time.monotonic() - began)
        during = Counter(name for _, name in load.times[first:])
        during = Counter({name: round(count * share) for name, count in during.items()})
        await load.store.operations.reschedule([id_ for id_ in load.known if id_ not in load.handled], delay=0)
        await judge(load, scenario, before, during, *faults, long, others=("a",))


async def test_movers_are_killed_before_each_step(long: bool) -> None:
    targets, seen = itertools.cycle(["c", "b"]), list[Message]()
    steps = 5 * STEPS if long else ("switch target", "remove", "activate")
    async with measured("shard: movers killed", long) as (load, urls, faults):
        for step in steps:
            target = next(targets)
            await publish_scheduled(load, seen)
            code, errors = await python("tests.faults.mover", RANGE, target, step, *urls)
            assert code == -signal.SIGKILL, errors
            faults[0] += 1
            # A publish may have to wait until the change goes on.
            (code, errors), _ = await asyncio.gather(move(target, urls), publish_scheduled(load, seen))
            assert code == 0, errors
            await publish_scheduled(load, seen)


async def test_two_operators_work_at_once(long: bool) -> None:
    """They want the same, or the opposite, and one of them may end with an error."""
    seen: list[Message] = []
    async with measured("shard: two operators", long) as (load, urls, faults):
        for target, other in (15 if long else 1) * [("c", "c"), ("b", "c")]:
            await publish_scheduled(load, seen)
            ends = await asyncio.gather(move(target, urls), move(other, urls))
            faults[0] += 1
            assert not any("Traceback" in errors for _, errors in ends), ends

            async def has_moved(target: str = target, other: str = other) -> bool:
                codes = [(await move(one, urls))[0] for one in dict.fromkeys((other, target))]
                return codes[-1] == 0

            await until(has_moved, "the pending change to be finished", within=240)
            await publish_scheduled(load, seen)
