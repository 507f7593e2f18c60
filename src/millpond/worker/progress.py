"""How workers get on, in a line: now and then in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from millpond.clock import monotonic
from millpond.worker.crew import Status

log = logging.getLogger("millpond.run")

EVERY = 10.0
"""Seconds between two lines in the log, while there is something to tell."""
_WINDOW = 3.0
"""Seconds that a rate is the mean of."""
_SETTLED = ("ack", "nack", "reject")


class Rate:
    """Per second, over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, total: int) -> float:
        now = monotonic()
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        return (total - before) / (now - then) if now > then else 0.0


def line(status: Status, rate: float) -> str:
    """
    >>> line(Status(True, 16, {"ack": 1200, "nack": 3, "reject": 1}), 240.4)
    '240/s, 1,204 handled, 16 in flight, 3 retried, 1 failed'
    """
    counts = status.counts
    parts = [
        f"{rate:,.0f}/s",
        f"{sum(counts.get(name, 0) for name in _SETTLED):,} handled",
        f"{status.in_flight:,} in flight",
        f"{counts.get('nack', 0):,} retried",
        f"{counts.get('reject', 0):,} failed",
    ]
    if lost := counts.get("lease lost", 0):
        parts.append(f"{lost:,} leases lost")
    return ", ".join(parts)


class Teller:
    """What there is to say of a status that changes."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._rate = Rate()
        self._rate(0)
        self._told: Mapping[str, int] = {}

    def now(self) -> tuple[Status, str]:
        current = self._status()
        return current, line(current, self._rate(sum(current.counts.get(name, 0) for name in _SETTLED)))

    def tell(self) -> None:
        current, text = self.now()
        if current.counts != self._told:  # an idle worker is quiet
            self._told = current.counts
            log.info("%s", text, extra={"event": "Progress", "counts": dict(current.counts)})


@asynccontextmanager
async def told(status: Callable[[], Status], *, every: float = EVERY) -> AsyncIterator[None]:
    """Lines in the log, as long as this lasts."""
    teller = Teller(status)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(every)
            teller.tell()

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        teller.tell()
