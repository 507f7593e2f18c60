"""Calls on one asynchronous connection run one after the other.

Savepoints of two calls at once would mix, and the failure of one would undo part of the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class _Lock:
    """The lock of one connection, and the number of calls that hold it or wait for it."""

    __slots__ = ("calls", "lock")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.calls = 0


# By identity: some drivers' connections can neither be hashed nor be referenced weakly. An entry lives as long as its
# calls, and these keep the connection alive.
_locks: dict[int, _Lock] = {}


@asynccontextmanager
async def connection_lock(connection: Any) -> AsyncIterator[None]:
    """Wait until no other call runs on the connection."""
    lock = _locks.setdefault(id(connection), _Lock())
    lock.calls += 1
    try:
        async with lock.lock:
            yield
    finally:
        lock.calls -= 1
        if lock.calls == 0:
            del _locks[id(connection)]
