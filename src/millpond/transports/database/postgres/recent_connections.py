"""Connections of a pool that were used a moment ago."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg

_IDLE = 1.0
"""Seconds after which an unused connection goes back to the pool, which closes those that stay idle for long."""


class RecentConnections:
    """Keeps connections between two uses: the pool makes a task and moves a timer for each use, a fifth of a publish.

    None is kept while a caller waits for the pool.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._free: list[Any] = []
        self._idle: set[Any] = set()
        """Those among the free ones that were not used since the timer last ended."""
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._closed = False

    def take(self) -> Any:
        """A connection that was kept; None if there is none."""
        while self._free:
            connection = self._free.pop()
            self._idle.discard(connection)
            if _is_open(connection):
                return connection
            self._release(connection)
        return None

    async def acquire(self) -> Any:
        """A connection of the pool."""
        self._waiting += 1
        try:
            return await self._pool.acquire()
        finally:
            self._waiting -= 1

    def keep(self, connection: Any) -> bool:
        """Whether the connection was kept; otherwise it is to be released."""
        if self._waiting or self._closed:
            return False
        self._free.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_IDLE, self._release_idle)
        return True

    def _release_idle(self) -> None:
        for connection in self._idle:
            self._free.remove(connection)
            self._release(connection)
        self._idle = set(self._free)
        self._timer = asyncio.get_running_loop().call_later(_IDLE, self._release_idle) if self._free else None

    def _release(self, connection: Any) -> None:
        release = asyncio.ensure_future(self._pool.release(connection))
        self._releasing.add(release)
        release.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Give all connections back to the pool."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        free, self._free = self._free, []
        for connection in free:
            await self._pool.release(connection)
        await asyncio.gather(*self._releasing, return_exceptions=True)


def _is_open(connection: Any) -> bool:
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:  # it was closed, and the pool has its place back
        return False
