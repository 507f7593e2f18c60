"""Connections of a pool that were used a moment ago."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
from asyncpg.protocol import NO_TIMEOUT

from millpond.clock import monotonic
from millpond.transports.database.sql.statement import Query, Rows, Step, Style

_IDLE = 1.0
"""Seconds after which an unused connection goes back to the pool, which closes those that stay idle for long."""
_PREPARE_AT = 8
"""Number of a statement's use from which on it is kept. Preparing it costs a round trip."""


class RecentConnection:
    """A connection of the pool until it goes back there.

    Statements that repeat are prepared here, and have one timer together. The driver would look up each one by its text
    and set a timer for it, together a sixth of a publish.
    """

    def __init__(self, pooled: Any, timeout: float) -> None:
        self.pooled = pooled
        self._timeout = timeout
        self._prepared: dict[str, Any] = {}
        self._uses: dict[str, int] = {}
        self._task: asyncio.Task[Any] | None = None
        """The task that waits for a statement."""
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        """The timer has cancelled the task."""

    async def run_alone(self, step: Step) -> Rows:
        """Run a statement outside of a transaction. It ends with `TimeoutError` after the timeout."""
        assert type(step) is Query
        text, values = step.statement.render(Style.DOLLAR, step.params)
        statement = self._prepared.get(text)
        if statement is None:
            self._uses[text] = uses = self._uses.get(text, 0) + 1
            if uses < _PREPARE_AT:
                rows: Rows = await self.pooled.fetch(text, *values)
                return rows
            # With another text: the driver does not close a statement whose text it has in its cache.
            statement = self._prepared[text] = await self.pooled.prepare(f"{text} ")
        self._task = task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._began = monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._look)
        try:
            rows = await statement.fetch(*values, timeout=NO_TIMEOUT)
        except asyncio.CancelledError:
            # As `asyncio.timeout` does it, so that a caller's own cancellation at the same time is kept.
            if self._expired and task.uncancel() <= cancelling:
                raise TimeoutError from None
            raise
        finally:
            self._task, self._expired = None, False
        return rows

    def _look(self) -> None:
        """Cancel the wait for a statement that runs for too long. The driver then cancels it in the server."""
        self._timer = None
        if self._task is None:
            return  # the next statement sets the timer again
        left = self._began + self._timeout - monotonic()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._expired = True
            self._task.cancel()

    def end(self) -> None:
        """The connection is about to go back to the pool, which makes its prepared statements invalid."""
        self._prepared.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class RecentConnections:
    """Keeps connections between two uses: the pool makes a task and moves a timer for each use, a fifth of a publish.

    None is kept while a caller waits for the pool.
    """

    def __init__(self, pool: Any, timeout: float) -> None:
        self._pool = pool
        self._timeout = timeout
        self._free: list[RecentConnection] = []
        self._idle: set[RecentConnection] = set()
        """Those among the free ones that were not used since the timer last ended."""
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._closed = False

    def take(self) -> RecentConnection | None:
        """A connection that was kept; None if there is none."""
        while self._free:
            connection = self._free.pop()
            if self._idle:
                self._idle.discard(connection)
            if _is_open(connection):
                return connection
            self._release_soon(connection)
        return None

    async def acquire(self) -> RecentConnection:
        """A connection of the pool."""
        self._waiting += 1
        try:
            return RecentConnection(await self._pool.acquire(), self._timeout)
        finally:
            self._waiting -= 1

    def keep(self, connection: RecentConnection) -> bool:
        """Whether the connection was kept; otherwise it is to be released."""
        if self._waiting or self._closed:
            return False
        self._free.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_IDLE, self._release_idle)
        return True

    async def release(self, connection: RecentConnection) -> None:
        connection.end()
        await self._pool.release(connection.pooled)

    def _release_idle(self) -> None:
        for connection in self._idle:
            self._free.remove(connection)
            self._release_soon(connection)
        self._idle = set(self._free)
        self._timer = asyncio.get_running_loop().call_later(_IDLE, self._release_idle) if self._free else None

    def _release_soon(self, connection: RecentConnection) -> None:
        release = asyncio.ensure_future(self.release(connection))
        self._releasing.add(release)
        release.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Give all connections back to the pool."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        free, self._free = self._free, []
        for connection in free:
            await self.release(connection)
        await asyncio.gather(*self._releasing, return_exceptions=True)


def _is_open(connection: RecentConnection) -> bool:
    try:
        return not connection.pooled.is_closed()
    except asyncpg.InterfaceError:  # it was closed, and the pool has its place back
        return False
