"""The queue's half of the demo: publish, work, kill a worker, and see it all come to its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from millpond.cli.app import Refused
from millpond.cli.demo.ground import QUEUE, Ground, orders
from millpond.cli.demo.screen import Screen
from millpond.cli.supervise import Supervisor
from millpond.clock import monotonic
from millpond.control import Control
from millpond.message import State
from millpond.pond import Millpond
from millpond.worker.crew import Crew
from millpond.worker.process import own_command
from millpond.worker.progress import Rate

WORKERS = 2
_BATCH = 5_000
_EXPRESS = 25
"""Every so many orders one that goes before the others."""
_KILL_AT = 0.35
"""The part of all orders after which a worker dies."""
_LOOK_EVERY = 0.2
_PATIENCE = 10.0
"""Seconds after which nobody waits any longer to hear of a dead worker's messages: it had none."""
LIVE = (State.PENDING, State.PROCESSING, State.RETRYABLE)

Counts = dict[State, int]


async def publish(ground: Ground, screen: Screen, count: int) -> None:
    pond = Millpond(ground.url, migrate=True)
    began = monotonic()
    bodies = list(orders(count))
    try:
        with screen.bar(count) as update:
            for start in range(0, count, _BATCH):
                part = bodies[start : start + _BATCH]
                express = [body for n, body in enumerate(part) if n % _EXPRESS == 0]
                await pond.publish_many(QUEUE, [body for n, body in enumerate(part) if n % _EXPRESS])
                await pond.publish_many(QUEUE, express, priority=10)
                update(start + len(part), "published")
    finally:
        await pond.close()
    screen.say(f"{count:,} orders in {monotonic() - began:.1f} s; one in {_EXPRESS} is express and goes first.")


async def work(control: Control, ground: Ground, screen: Screen, count: int) -> Counts:
    """Two worker processes until nothing is left, one of which is killed on the way. What became of the messages."""
    with ground.log.open("a") as log:
        crew = Supervisor(
            own_command(["run", f"{ground.shop.stem}:pond"]),
            WORKERS,
            grace=15.0,
            until_idle=False,
            say=lambda line: print(line, file=log, flush=True),
            environment=ground.environment,
        )
        return await worked(control, crew, screen, count, meanwhile=_Murder(crew, screen, count))


async def worked(
    control: Control, crew: Crew, screen: Screen, count: int, meanwhile: Callable[[int], bool] = lambda done: True
) -> Counts:
    """Let a crew work until nothing is left; what became of all messages."""
    running, watching = asyncio.create_task(crew.run()), asyncio.create_task(_watch(control, screen, count, meanwhile))
    try:
        await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
        if not watching.done():
            raise Refused(f"the workers ended before the work was done: {crew.last_words or 'their log says why'}")
        return watching.result()
    finally:
        watching.cancel()
        crew.stop()
        await running


async def _watch(control: Control, screen: Screen, count: int, meanwhile: Callable[[int], bool]) -> Counts:
    rate, before = Rate(), settled(await counts(control))
    with screen.bar(count) as update:
        while True:
            now = await counts(control)
            done = settled(now) - before
            update(done, _line(now, rate(done)))
            if meanwhile(done) and not any(now[state] for state in LIVE):
                return now
            await asyncio.sleep(_LOOK_EVERY)


class _Murder:
    """Kills one of the workers when so much is done, and tells how its messages come back."""

    def __init__(self, crew: Supervisor, screen: Screen, count: int) -> None:
        self._crew = crew
        self._screen = screen
        self._count = count
        self._at: float | None = None
        self._back = 0

    def __call__(self, done: int) -> bool:
        """Whether there is nothing more to tell. What workers tell of themselves comes a little late."""
        if self._at is None and _KILL_AT * self._count <= done < self._count and self._crew.pids:
            victim, self._at = self._crew.pids[-1], monotonic()
            os.kill(victim, signal.SIGKILL)
            self._screen.notice(f"kill -9 {victim}: one of the two workers dies with its messages in hand.")
        back = self._crew.status.counts.get("reaped", 0)
        if self._at is not None and back > self._back:
            self._back = back
            self._screen.notice(f"{monotonic() - self._at:.1f} s later its {back} messages are back, for the living.")
        return self._at is None or self._back > 0 or monotonic() - self._at > _PATIENCE


async def counts(control: Control) -> Counts:
    (stats,) = await control.counts([QUEUE])
    return {state: stats.counts.get(state, 0) for state in State}


def settled(now: Counts) -> int:
    return now[State.COMPLETED] + now[State.FAILED]


def _line(now: Counts, rate: float) -> str:
    return (
        f"{rate:,.0f}/s, {now[State.PENDING]:,} waiting, {now[State.PROCESSING]:,} in hand, "
        f"{now[State.RETRYABLE]:,} to retry, {now[State.FAILED]:,} failed"
    )
