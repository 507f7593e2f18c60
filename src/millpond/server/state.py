"""The parts that all requests of a server share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from millpond.clock import monotonic
from millpond.control import Control, QueueView
from millpond.control.exported_days import ExportedDays
from millpond.control.history import Every, SettledCounts, SettledHistory
from millpond.errors import InvalidOption
from millpond.seam.transport import Capability, Transport
from millpond.server.claim_lines import ClaimLines
from millpond.server.grants import Grant, Role, matches_any
from millpond.server.limits import Places, Rates
from millpond.server.metrics import RequestMetrics
from millpond.server.rpc.streams import OpenStreams
from millpond.server.settings import ServerSettings
from millpond.server.tokens import TokenBook

log = logging.getLogger("millpond.server")

_READY_WITHIN = 5.0
_SAME_READY = 1.0
"""Seconds for which one look at the database serves every probe."""
_SAME_OVERVIEW = 1.0
"""Seconds for which one count of all queues serves every caller."""


class ServerState:
    """A transport with its control, tokens and limits. `close` ends the tasks, not the transport."""

    def __init__(self, transport: Transport, settings: ServerSettings | None = None) -> None:
        self.transport = transport
        self.settings = settings or ServerSettings()
        self.control = Control(transport)
        has_access = Capability.ACCESS in transport.capabilities
        self.access = transport.access if has_access else None
        self._history = SettledHistory(self.control.operations, self.in_background)
        lake = self.settings.lake
        self._days = None if lake is None else ExportedDays(lake, self.in_background)
        self.tokens = TokenBook(self.access)
        limits = self.settings.limits
        self.rates = Rates(limits.rate)
        self.failed_logins = Rates(10.0)
        self.connections = Places(limits.connections, "requests")
        self.waiting = Places(limits.waiting, "waiting claims")
        self.lines = ClaimLines(transport)
        self.streams = OpenStreams(transport)
        """Messages that gRPC clients have. Without such clients it does nothing."""
        self.metrics = RequestMetrics()
        self.stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._overview: list[QueueView] = []
        self._overview_at: float | None = None
        self._overview_lock = asyncio.Lock()
        self._obstacle: str | None = None
        self._checked_at: float | None = None
        self._check_lock = asyncio.Lock()

    async def overview(self) -> list[QueueView]:
        """Counts and rates of all queues, at most a second old."""
        async with self._overview_lock:
            if self._overview_at is None or monotonic() - self._overview_at > _SAME_OVERVIEW:
                self._overview = await self.control.overview()
                self._overview_at = monotonic()
        return self._overview

    async def history(
        self, queue: str | None, grant: Grant, by: Every, *, within: float, new_only: bool = False
    ) -> SettledCounts:
        """Settled messages of one queue, or of all that the caller reaches, in each of the last minutes or hours.

        Those of days are counted in the lake. It waits at most so many seconds for counts.
        `new_only`: only if a queue was not counted before.
        """
        if by == "day":
            if self._days is None:
                raise InvalidOption("days are counted in a lake; start the server with --lake PATH")
            within = 0 if new_only and self._days.is_known else within
            return await self._days.counts(lambda name: queue in (None, name) and grant.reaches(name), within=within)
        names = [queue] if queue is not None else []
        if queue is None:
            names += [view.stats.queue for view in await self.overview() if grant.reaches(view.stats.queue)]
        if new_only and self._history.is_known(names, by):
            within = 0
        return await self._history.counts(names, by, within=within)

    async def obstacle(self) -> str | None:
        """The reason why requests cannot be answered, at most a second old; None: they can."""
        if self.stopping.is_set():
            return "the server stops"
        async with self._check_lock:
            if self._checked_at is None or monotonic() - self._checked_at > _SAME_READY:
                self._obstacle = await self._check()
                self._checked_at = monotonic()
        return self._obstacle

    async def _check(self) -> str | None:
        try:
            async with asyncio.timeout(_READY_WITHIN):
                await self.transport.operations.has_queue("millpond.ready")
        except TimeoutError:
            return f"the database did not answer within {_READY_WITHIN:g} s"
        except Exception as e:
            return f"the database cannot be used: {type(e).__name__}"
        return None

    def sees_bodies(self, grant: Grant, queue: str) -> bool:
        """Whether the caller may read bodies, headers and errors of this queue: a role of it is not masked there."""
        masks = self.settings.mask
        return any(
            role in grant.roles and not matches_any(masks.get(role, ()), queue) for role in (Role.READ, Role.OPERATE)
        )

    def in_background(self, work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        """Run work that outlives its request."""
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed: %s", task.get_name(), error)

    async def close(self) -> None:
        self.stopping.set()
        await self.lines.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
