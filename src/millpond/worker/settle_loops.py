"""A settle loop for each shard: outcomes of one that does not answer delay those of no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millpond.outcome import Outcome
from millpond.worker.delivery import Delivery
from millpond.worker.settle_loop import SettleLoop


class SettleLoops:
    """The settle loops of a worker, made when a shard has its first outcome. `make` makes one.

    A pond of one database has one loop.
    """

    def __init__(self, make: Callable[[], SettleLoop]) -> None:
        self._make = make
        self._loops: dict[str | None, SettleLoop] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = self._stopping = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Number of outcomes that are not written yet."""
        return sum(map(len, self._loops.values()))

    @property
    def waiting_since(self) -> float | None:
        """Monotonic time since which outcomes wait on every shard that has any; None without one.

        A shard that does not answer is no obstacle to the others.
        """
        times = [at for loop in self._loops.values() if (at := loop.waiting_since) is not None]
        return max(times, default=None)

    def add(self, delivery: Delivery, outcome: Outcome) -> None:
        """Add an outcome; it is written within a few milliseconds."""
        self._of(delivery).add(delivery, outcome)

    async def write(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Add an outcome and wait until it is durable; False if its receipt was stale."""
        return await self._of(delivery).write(delivery, outcome)

    def flush_if_idle(self) -> None:
        """Flush now if no handler runs: no further outcome would join the batches."""
        for loop in self._loops.values():
            loop.flush_if_idle()

    def _of(self, delivery: Delivery) -> SettleLoop:
        shard = delivery.claim.receipt.shard
        loop = self._loops.get(shard)
        if loop is None:
            loop = self._loops[shard] = self._make()
            if self._running:
                self._start(loop)
            if self._stopping:
                loop.stop()
        return loop

    def _start(self, loop: SettleLoop) -> None:
        self._tasks.add(asyncio.create_task(loop.run()))
        self._changed.set()

    async def run(self) -> None:
        """Run until stopped and every added outcome is written."""
        self._running = True
        for loop in self._loops.values():
            self._start(loop)
        try:
            while self._tasks or not self._stopping:
                changed = asyncio.create_task(self._changed.wait())
                try:
                    done, _ = await asyncio.wait([*self._tasks, changed], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                self._changed.clear()
                for task in done & self._tasks:
                    self._tasks.discard(task)
                    task.result()  # an error of a loop ends the worker
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def stop(self) -> None:
        self._stopping = True
        for loop in self._loops.values():
            loop.stop()
        self._changed.set()
