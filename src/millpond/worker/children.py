"""The child processes of a worker: started on demand, used again, ended when they are idle for some seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from millpond.clock import monotonic
from millpond.loop import Backoff
from millpond.telemetry import Event
from millpond.worker.child_messages import Announce, Idle
from millpond.worker.child_process import ChildProcess

log = logging.getLogger("millpond.worker")

_START_WITHIN = 120.0
"""Seconds for a child to import the application and to call its `on_start` functions."""
_AT_ONCE = 2
"""Number of children that start at the same time: imports of ten would take all CPUs for seconds."""
_IDLE_FOR = 10.0
"""Seconds for which a child waits for the next suspect."""


class NotStarted(Exception):
    """A child process ended before it was ready."""


class Children:
    """`command` starts a child; the number of its socket is added. `announce` is called with the events of children."""

    def __init__(self, command: Sequence[str], announce: Callable[[Event], None]) -> None:
        self._command = command
        self.announce = announce
        self._idle: list[ChildProcess] = []
        self._alive: set[ChildProcess] = set()
        self._ends: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Semaphore(_AT_ONCE)
        self._start_at = 0.0
        self._pauses = Backoff(1.0, 60.0)

    @property
    def may_start(self) -> bool:
        """False for some seconds after a child could not be started."""
        return monotonic() >= self._start_at

    async def take(self, *, unused: bool) -> ChildProcess:
        """An idle child, or a new one: always a new one if it must be `unused`. Raises `NotStarted`."""
        while self._idle and not unused:
            child = self._idle.pop()
            if child.alive:
                return child
            await self.drop(child)
        if self._idle:
            self._end_soon(self._idle[0])  # there are never more than run at once
        try:
            async with self._starting, asyncio.timeout(_START_WITHIN):
                child = await self._start()
        except (NotStarted, OSError, TimeoutError) as e:
            self.pause(str(e) or f"not ready after {_START_WITHIN:g} s")
            raise NotStarted from e
        return child

    def pause(self, how: str) -> None:
        """A child ended before it ran a message: the next one starts later."""
        pause = self._pauses.next()
        self._start_at = monotonic() + pause
        log.error("no child process for suspects (%s); the next one starts in %.0f s", how, pause)

    async def _start(self) -> ChildProcess:
        child = await ChildProcess.start(self._command)
        self._alive.add(child)
        try:
            while not isinstance(message := await child.receive(), Idle):
                if message is None:
                    raise NotStarted(await child.how_it_ended())
                if isinstance(message, Announce):
                    self.announce(message.event)
        except BaseException:
            await self.drop(child)
            raise
        return child

    def keep(self, child: ChildProcess) -> None:
        """Keep a child for the next suspect, for some seconds."""
        self._pauses.reset()
        child.used, child.idle_since = True, monotonic()
        self._idle.append(child)
        asyncio.get_running_loop().call_later(_IDLE_FOR, self._end_idle)

    async def drop(self, child: ChildProcess) -> None:
        child.kill()
        self._alive.discard(child)
        await child.close()

    def _end_idle(self, idle_for: float = _IDLE_FOR) -> None:
        now = monotonic()
        for child in [c for c in self._idle if now - c.idle_since >= idle_for]:
            self._end_soon(child)

    def _end_soon(self, child: ChildProcess) -> None:
        self._idle.remove(child)
        end = asyncio.create_task(self._end(child))
        self._ends.add(end)
        end.add_done_callback(self._ends.discard)

    async def _end(self, child: ChildProcess) -> None:
        await child.end()
        self._alive.discard(child)

    async def end(self) -> None:
        """End all idle children, and wait for that."""
        self._end_idle(0.0)
        while self._ends:
            await asyncio.wait(self._ends)

    def kill(self) -> None:
        for child in self._alive:
            child.kill()
