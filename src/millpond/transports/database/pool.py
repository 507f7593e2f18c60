"""A small pool, for drivers whose own lacks what we need: session settings, and distrust after errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any


class Pool:
    """At most `size` connections; the one used last is used next, so that the others may rest."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        close: Callable[[Any], Awaitable[None]],
        size: int,
        usable: Callable[[BaseException], bool],
    ) -> None:
        self._connect = connect
        self._close = close
        self._usable = usable
        self._free: list[Any] = []
        self._slots = asyncio.Semaphore(size)
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection for one operation. After an error that leaves its state in doubt it is thrown away."""
        async with self._slots:
            connection = self._free.pop() if self._free else await self._connect()
            try:
                yield connection
            except BaseException as e:
                # A lost connection says that the server went away: the resting ones are as dead.
                if self._usable(e):
                    self._free.append(connection)
                else:
                    await self._discard([connection, *self._free])
                raise
            if self._closed:
                await self._discard([connection])
            else:
                self._free.append(connection)

    async def close(self) -> None:
        self._closed = True
        await self._discard(self._free)

    async def _discard(self, connections: list[Any]) -> None:
        for connection in connections:
            await self._close(connection)
        self._free = [c for c in self._free if c not in connections]
