"""Status of workers: counts, rates, and a line in the log every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec

from millpond.clock import monotonic

log = logging.getLogger("millpond.run")

EVERY = 10.0
"""Seconds between two lines in the log, while the counts change."""
_WINDOW = 3.0
"""Seconds over which a rate is the mean."""
_FEW = 10
"""Number of handled messages below which a rate means nothing."""
_SETTLED = ("ack", "nack", "reject")


class Status(msgspec.Struct, frozen=True):
    """Status of one worker, or the sum of several."""

    ready: bool = False
    in_flight: int = 0
    counts: Mapping[str, int] = {}

    def __add__(self, other: Status) -> Status:
        counts = Counter(self.counts)
        counts.update(other.counts)
        return Status(self.ready or other.ready, self.in_flight + other.in_flight, counts)

    @property
    def settled(self) -> int:
        return sum(self.counts.get(name, 0) for name in _SETTLED)


class Rate:
    """Per second, over the last few seconds. None until a second has passed and there are more than a few messages."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, total: int) -> float | None:
        now = monotonic()
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        return (total - before) / (now - then) if now - then >= 1 and total >= _FEW else None


def status_line(status: Status, rate: float | None = None) -> str:
    """
    >>> status_line(Status(True, 16, {"ack": 1200, "nack": 3, "reject": 1}), 240.4)
    '240/s, 1,204 handled, 16 in flight, 3 retried, 1 failed'
    """
    counts = status.counts
    parts = [f"{rate:,.0f}/s"] if rate is not None else []
    parts += [
        f"{status.settled:,} handled",
        f"{status.in_flight:,} in flight",
        f"{counts.get('nack', 0):,} retried",
        f"{counts.get('reject', 0):,} failed",
    ]
    if lost := counts.get("lease lost", 0):
        parts.append(f"{lost:,} leases lost")
    return ", ".join(parts)


class StatusLog:
    """A changing status as lines of text."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._rate = Rate()
        self._rate(0)
        self._logged: Mapping[str, int] = {}

    def line(self) -> str:
        return self._line(self._status())

    def write(self) -> None:
        """Log a line, unless the counts are the same as in the last one: an idle worker is quiet."""
        status = self._status()
        text = self._line(status)
        if status.counts != self._logged:
            self._logged = status.counts
            log.info("%s", text, extra={"event": "Progress", "counts": dict(status.counts)})

    def _line(self, status: Status) -> str:
        return status_line(status, self._rate(status.settled))


@asynccontextmanager
async def log_status(status: Callable[[], Status], *, every: float = EVERY) -> AsyncIterator[None]:
    """Log a line every few seconds while the context lasts, and one at its end."""
    status_log = StatusLog(status)

    async def write_lines() -> None:
        while True:
            await asyncio.sleep(every)
            status_log.write()

    task = asyncio.create_task(write_lines())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        status_log.write()
