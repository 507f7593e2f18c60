"""A process that kills itself at a chosen point of its work, as `kill -9` from outside does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

from millpond import transports
from tests.faults.plan import Aim

T = TypeVar("T")


class Aimed:
    """Counts the points that the process reaches, and kills it at the chosen one."""

    def __init__(self, aim: Aim | None) -> None:
        self._aim = aim
        self._count = 0
        self._took = 0.002
        """Duration of the last call in seconds; the next one is killed within that time."""

    def at(self, point: str) -> None:
        if self._is_hit(point, "before"):
            die()

    async def around(self, point: str, call: Awaitable[T]) -> T:
        self.at(point)
        self.soon(point)
        started = time.monotonic()
        result = await call
        self._took = time.monotonic() - started
        # An empty claim does not count; after a claim with messages the process dies holding them.
        if (point != "claim" or result) and self._is_hit(point, "after"):
            die()
        return result

    def soon(self, point: str) -> None:
        """Die at a random time during the next call."""
        if self._is_hit(point, "amid"):
            threading.Timer(random.uniform(0, self._took), die).start()

    def _is_hit(self, point: str, when: str) -> bool:
        if self._aim is None or (self._aim.point, self._aim.when) != (point, when):
            return False
        self._count += 1
        return self._count == self._aim.nth


class AimedTransport:
    """The worker's transport, with a point before and after each call."""

    def __init__(self, inner: Any, aimed: Aimed) -> None:
        self._inner = inner
        self._aimed = aimed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def claim(self, *args: Any, **more: Any) -> Any:
        return await self._aimed.around("claim", self._inner.claim(*args, **more))

    async def settle(self, *args: Any, **more: Any) -> Any:
        return await self._aimed.around("settle", self._inner.settle(*args, **more))


def take_aim(aimed: Aimed) -> None:
    """Add the points to every transport that is opened from now on, without changes in the library."""
    connect = transports.connect

    async def aimed_connect(*args: Any, **more: Any) -> Any:
        return AimedTransport(await connect(*args, **more), aimed)

    transports.connect = aimed_connect  # type: ignore[assignment]


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")
