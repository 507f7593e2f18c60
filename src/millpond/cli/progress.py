"""How a worker gets on: one line that lives on a terminal, or a line in the log now and then."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from millpond.clock import monotonic

log = logging.getLogger("millpond.run")

EVERY = 10.0
"""Seconds between two lines in the log, while there is something to tell."""
_WINDOW = 3.0
"""Seconds that a rate is the mean of."""
_SETTLED = ("ack", "nack", "reject")


class Status(msgspec.Struct, frozen=True):
    """What one worker says of itself."""

    ready: bool = False
    in_flight: int = 0
    counts: Mapping[str, int] = {}

    def __add__(self, other: Status) -> Status:
        counts = Counter(self.counts)
        counts.update(other.counts)
        return Status(self.ready or other.ready, self.in_flight + other.in_flight, counts)


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


@asynccontextmanager
async def shown(status: Callable[[], Status], console: Console, *, every: float = EVERY) -> AsyncIterator[None]:
    """Show it as long as this lasts: on a terminal by a line that changes, elsewhere by lines in the log."""
    rate = Rate()

    def now() -> tuple[Status, str]:
        current = status()
        return current, line(current, rate(sum(current.counts.get(name, 0) for name in _SETTLED)))

    if console.is_terminal:
        with Live(get_renderable=lambda: Text(now()[1], "bold"), console=console, transient=True):
            yield
        return

    told: Mapping[str, int] = {}

    def tell() -> None:
        nonlocal told
        current, text = now()
        if current.counts != told:  # an idle worker is quiet
            told = current.counts
            log.info("%s", text, extra={"event": "Progress", "counts": dict(current.counts)})

    async def go_on() -> None:
        while True:
            await asyncio.sleep(every)
            tell()

    rate(0)
    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        tell()
