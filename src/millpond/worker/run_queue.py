"""Deliveries that wait to be started, and the slots that run them.

A slot is woken when deliveries arrive, and further slots only when a handler has to wait: one slot runs handlers that
never wait one after the other, without a task switch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

from millpond.clock import monotonic
from millpond.worker.delivery import Delivery

Why = Literal["timeout", "lost", "cut off", "stop", "cancelled"]


class HandlerSlot:
    """The deliveries that one of `max_workers` handlers runs on, and how to interrupt it."""

    __slots__ = ("call", "deliveries", "interrupted", "started", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.deliveries: Sequence[Delivery] = ()
        self.started = 0.0
        self.interrupted: Why | None = None
        self.call: asyncio.Future[Any] | None = None
        """The call that a thread executes, for synchronous handlers."""

    def interrupt(self, why: Why) -> None:
        """Cancel the handler. One in a thread runs on; it can read `Delivery.interrupted`."""
        if self.task is not None and self.interrupted is None:
            self.interrupted = why
            for delivery in self.deliveries:
                delivery.interrupted = True
            self.task.cancel()


class RunQueue:
    """Deliveries in the order of their claims.

    The heartbeat's thread may take all of them at any time: slots expect that.
    """

    def __init__(self) -> None:
        self.deliveries: deque[Delivery] = deque()
        self.since = 0.0
        """Time at which the first of them came."""
        self._idle: deque[asyncio.Future[None]] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def add(self, deliveries: Sequence[Delivery]) -> None:
        if not self.deliveries:
            self.since = monotonic()
        self.deliveries.extend(deliveries)
        if deliveries:
            self._arrived.set()
            self._wake_one()

    def drop(self, deliveries: Iterable[Delivery]) -> None:
        """Remove these; they are not started."""
        for delivery in deliveries:
            with suppress(ValueError):  # it is not among them
                self.deliveries.remove(delivery)

    def take_all(self) -> list[Delivery]:
        """Remove and return all, the last one first; safe in another thread."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self.deliveries.pop())
        return taken

    def close(self) -> None:
        """Start nothing more and wake every slot that waits."""
        self._closed = True
        self._arrived.set()
        while self._idle:
            self._wake_one()

    async def wait(self) -> None:
        """Wait until woken."""
        idle = asyncio.get_running_loop().create_future()
        self._idle.append(idle)
        await idle

    def wake_more(self) -> None:
        """Wake two idle slots because a handler has to wait; each may wake two more."""
        for _ in range(min(2, len(self.deliveries))):
            self._wake_one()

    def _wake_one(self) -> None:
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return

    def take_batch(self, most: int) -> tuple[Delivery, ...]:
        """Remove and return the next batch. A message that failed before runs alone: a poison message then fails its
        neighbours once, not until their retries are used up."""
        ready = self.deliveries
        batch: list[Delivery] = []
        with suppress(IndexError):
            while len(batch) < most:
                failed_before = ready[0].claim.attempts > 0
                if failed_before and batch:
                    break
                batch.append(ready.popleft())
                if failed_before:
                    break
        return tuple(batch)

    async def gather_batch(self, most: int, within: float) -> None:
        """Wait until a full batch is there, at most `within` seconds."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(within):
                while len(self.deliveries) < most and not self._closed:
                    await self._arrived.wait()
                    self._arrived.clear()
        except TimeoutError:
            return
