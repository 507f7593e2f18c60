"""A small pool, for drivers whose own lacks what we need: session settings, and distrust after errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from millpond.transports.database.dialect import Trouble


class Pool:
    """At most `size` connections; the one used last is used next, so that the others may rest."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        close: Callable[[Any], Awaitable[None]],
        size: int,
        trouble: Callable[[BaseException], Trouble],
    ) -> None:
        self._connect = connect
        self._close = close
        self._trouble = trouble
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
            except Exception as e:
                trouble = self._trouble(e)
                if trouble is Trouble.LOST:
                    # The server went away: the resting ones are as dead.
                    await self._discard_free()
                await self._give_back(connection, trouble in (Trouble.BUSY, Trouble.OTHER, Trouble.UNMIGRATED))
                raise
            except BaseException:  # cancelled in the middle of an answer
                await self._close(connection)
                raise
            await self._give_back(connection, True)

    async def close(self) -> None:
        self._closed = True
        await self._discard_free()

    async def _give_back(self, connection: Any, usable: bool) -> None:
        if usable and not self._closed:
            self._free.append(connection)
        else:
            await self._close(connection)

    async def _discard_free(self) -> None:
        while self._free:
            await self._close(self._free.pop())
