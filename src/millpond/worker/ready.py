"""What waits to be started, and the runners that wait for it.

A runner is woken when something arrives, and then only when a handler has to wait: handlers that never wait are run
by one runner after the other, without a task switch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from millpond.worker.delivery import Delivery


class Ready:
    """Deliveries in the order of their claims."""

    def __init__(self) -> None:
        self.deliveries: deque[Delivery] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def add(self, deliveries: Sequence[Delivery]) -> None:
        self.deliveries.extend(deliveries)
        if deliveries:
            self._arrived.set()
            self._wake_one()

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """Let these not be started."""
        for delivery in deliveries:
            if delivery in self.deliveries:
                self.deliveries.remove(delivery)

    def close(self) -> None:
        """Nothing more will be started: whoever waits need not."""
        self._closed = True
        self._arrived.set()
        while self._idle:
            self._wake_one()

    async def some(self) -> None:
        """Wait to be woken."""
        idle = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        await idle

    def wake(self) -> None:
        """A handler has to wait: let two others begin, so that soon all are at work."""
        for _ in range(min(2, len(self.deliveries))):
            self._wake_one()

    def _wake_one(self) -> None:
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return

    def batch(self, most: int) -> tuple[Delivery, ...]:
        """The next ones to run together. What failed before runs alone: poison fails its neighbours once, not until
        their retries are used up."""
        ready = self.deliveries
        batch: list[Delivery] = []
        while ready and len(batch) < most:
            failed_before = ready[0].claim.attempts > 0
            if failed_before and batch:
                break
            batch.append(ready.popleft())
            if failed_before:
                break
        return tuple(batch)

    async def gathered(self, most: int, within: float) -> None:
        """Wait until a whole batch is there, or the time to gather it is over."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(within):
                while len(self.deliveries) < most and not self._closed:
                    await self._arrived.wait()
                    self._arrived.clear()
        except TimeoutError:
            return
