"""A small connection pool with session settings. It discards connections after errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from millpond.transports.database.sql.dialect import ErrorKind

_USABLE = {ErrorKind.BUSY, ErrorKind.DUPLICATE, ErrorKind.DATA, ErrorKind.UNMIGRATED, ErrorKind.OTHER}
"""Errors after which a connection is in order."""


class Pool:
    """A pool of at most `size` connections. The one used last is used next, and the others stay idle."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        close: Callable[[Any], Awaitable[None]],
        size: int,
        error_kind: Callable[[BaseException], ErrorKind],
    ) -> None:
        self._connect = connect
        self._close = close
        self._error_kind = error_kind
        self._free: list[Any] = []
        self._slots = asyncio.Semaphore(size)
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """A connection for one operation. After an error that leaves its state unknown it is closed."""
        async with self._slots:
            connection = self._free.pop() if self._free else await self._connect()
            try:
                yield connection
            except Exception as e:
                kind = self._error_kind(e)
                if kind is ErrorKind.LOST:
                    # The server is gone: the idle connections are dead too.
                    await self._discard_free()
                await self._give_back(connection, kind in _USABLE)
                raise
            except BaseException:  # cancelled in the middle of a result
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
