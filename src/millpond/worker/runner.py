"""A runner: one of the places where a handler runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from millpond.worker.delivery import Delivery

Why = Literal["timeout", "lost", "stop"]


class Runner:
    """What runs in one place, and how to interrupt it."""

    __slots__ = ("call", "deliveries", "interrupted", "started", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.deliveries: Sequence[Delivery] = ()
        self.started = 0.0
        self.interrupted: Why | None = None
        self.call: asyncio.Future[Any] | None = None
        """What a thread is at, for synchronous handlers."""

    def interrupt(self, why: Why) -> None:
        """Cancel the handler. One in a thread is told, and runs on."""
        if self.task is not None and self.interrupted is None:
            self.interrupted = why
            for delivery in self.deliveries:
                delivery.interrupted = True
            self.task.cancel()

    def uncancel(self) -> None:
        """Fit for the next message, after an interruption or a handler that cancelled itself."""
        while self.task is not None and self.task.cancelling():
            self.task.uncancel()
