"""Messages that have nothing to do with a fault, offered without a pause: their throughput shows its effect on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from millpond.clock import monotonic
from tests.faults.processes import beside
from tests.waiting import SOON, until

if TYPE_CHECKING:
    from tests.faults.setup import Setup

_AHEAD = 200
"""Number of messages that wait at least, in long forms."""
_GENTLY = 20
"""Number of messages of each publish in short forms, which run beside other tests: about 200 a second."""
_LEAST = 100
"""Minimum number of completed messages from which a rate is computed."""


class Load:
    """Messages of the queue `plain`."""

    def __init__(self, here: Setup, name: str) -> None:
        self._here = here
        self._name = name
        self._published = 0

    async def offer(self) -> None:
        """Publish whenever few messages wait, until cancelled."""
        number, pause = (_AHEAD, 0.02) if self._here.long else (_GENTLY, 0.1)
        while True:
            waiting = await self._here.one("SELECT count(*) FROM millpond_message WHERE queue = 'plain'")
            if waiting < number:
                start, self._published = self._published, self._published + number
                await self._here.publish("plain", [f"{self._name}-{n}" for n in range(start, start + number)])
            await asyncio.sleep(pause)

    async def rate(self, seconds: float) -> float:
        """Number of messages that are completed per second, measured for a time and for some messages at least."""
        return await self.rate_since(await self.mark(), seconds)

    async def mark(self) -> tuple[int, float]:
        """The number of completed messages, and the time."""
        return await self._done(), monotonic()

    async def rate_since(self, mark: tuple[int, float], seconds: float = 0.0) -> float:
        """The rate since a mark that is at least so old, with some messages at least."""
        before, began = mark

        async def enough() -> int:
            done = await self._done() - before
            return done if done >= _LEAST and monotonic() - began >= seconds else 0

        done: int = await until(enough, f"{self._here.name}: messages without a fault", seconds + SOON, every=0.05)
        return done / (monotonic() - began)

    async def _done(self) -> int:
        text = "SELECT count(*) FROM millpond_archive WHERE queue = 'plain' AND state = 'COMPLETED'"
        return int(await self._here.one(text))


@contextlib.asynccontextmanager
async def load(here: Setup, name: str = "load") -> AsyncIterator[Load]:
    """Offer messages while the context lasts. A worker of `plain` is needed."""
    offered = Load(here, name)
    async with beside(offered.offer()):
        await offered.rate(0.0)  # not counted: the first messages meet a worker that has just begun
        yield offered
