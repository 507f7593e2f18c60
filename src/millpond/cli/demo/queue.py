"""The queue part of the demo: publish, run two workers, kill one, and wait until all messages are settled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from millpond.cli.app import Declined
from millpond.cli.demo.demo_folder import QUEUE, DemoFolder, orders
from millpond.cli.demo.screen import Screen
from millpond.clock import monotonic
from millpond.control import Control
from millpond.message import LIVE, State
from millpond.pond import Millpond
from millpond.worker.processes import ProcessSupervisor, own_command
from millpond.worker.status import Rate
from millpond.worker.supervisor import Supervisor

WORKERS = 2
_BATCH = 5_000
_EXPRESS = 25
"""One in this number of orders has a higher priority."""
_KILL_AT = 0.35
"""Fraction of the orders after which a worker is killed."""
_POLL_EVERY = 0.2
_PATIENCE = 10.0
"""Maximum seconds to wait for messages of the killed worker; after that it had none."""

Counts = dict[State, int]


async def publish(demo: DemoFolder, screen: Screen, count: int) -> None:
    pond = Millpond(demo.url, migrate=True)
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
    screen.print(f"{count:,} orders in {monotonic() - began:.1f} s; one in {_EXPRESS} is express and goes first.")


async def work(control: Control, demo: DemoFolder, screen: Screen, count: int) -> Counts:
    """Run two worker processes until all messages are settled, and kill one meanwhile. Returns the counts."""
    with demo.log.open("a") as log:
        supervisor = ProcessSupervisor(
            own_command(["run", f"{demo.shop.stem}:pond"]),
            WORKERS,
            grace=15.0,
            until_idle=False,
            on_log=lambda line: print(line, file=log, flush=True),
            environment=demo.environment,
        )
        return await run_until_done(
            control, supervisor, screen, count, meanwhile=_KillOneWorker(supervisor, screen, count)
        )


async def run_until_done(
    control: Control,
    supervisor: Supervisor,
    screen: Screen,
    count: int,
    meanwhile: Callable[[int], bool] = lambda done: True,
) -> Counts:
    """Run a supervisor until all messages are settled. Returns the counts."""
    running = asyncio.create_task(supervisor.run())
    watching = asyncio.create_task(_watch(control, screen, count, meanwhile))
    try:
        await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
        if not watching.done():
            raise Declined(f"the workers ended before the work was done: {supervisor.last_output or 'see their log'}")
        return watching.result()
    finally:
        watching.cancel()
        supervisor.stop()
        await running


async def _watch(control: Control, screen: Screen, count: int, meanwhile: Callable[[int], bool]) -> Counts:
    rate, before = Rate(), settled_count(await counts(control))
    with screen.bar(count) as update:
        while True:
            now = await counts(control)
            done = settled_count(now) - before
            update(done, _line(now, rate(done)))
            if meanwhile(done) and not any(now[state] for state in LIVE):
                return now
            await asyncio.sleep(_POLL_EVERY)


class _KillOneWorker:
    """Kills one worker when a fraction of the work is done, and prints when its messages come back."""

    def __init__(self, supervisor: ProcessSupervisor, screen: Screen, count: int) -> None:
        self._supervisor = supervisor
        self._screen = screen
        self._count = count
        self._at: float | None = None
        self._back = 0

    def __call__(self, done: int) -> bool:
        """True when no more notice is expected. The status of workers arrives with a delay."""
        if self._at is None and _KILL_AT * self._count <= done < self._count and self._supervisor.pids:
            victim, self._at = self._supervisor.pids[-1], monotonic()
            os.kill(victim, signal.SIGKILL)
            self._screen.notice(f"kill -9 {victim}: one of the two workers dies while it handles messages.")
        back = self._supervisor.status.counts.get("reaped", 0)
        if self._at is not None and back > self._back:
            self._back = back
            self._screen.notice(
                f"{monotonic() - self._at:.1f} s later its {back} messages are back and go to the other workers."
            )
        return self._at is None or self._back > 0 or monotonic() - self._at > _PATIENCE


async def counts(control: Control) -> Counts:
    (stats,) = await control.operations.count([QUEUE])
    return {state: stats.counts.get(state, 0) for state in State}


def settled_count(now: Counts) -> int:
    return now[State.COMPLETED] + now[State.FAILED]


def _line(now: Counts, rate: float | None) -> str:
    return (
        f"{rate or 0:,.0f}/s, {now[State.PENDING]:,} waiting, {now[State.PROCESSING]:,} in hand, "
        f"{now[State.RETRYABLE]:,} to retry, {now[State.FAILED]:,} failed"
    )
