"""Live counts for the dashboard: one task counts all queues while pages are open, and wakes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.responses import Response, StreamingResponse

from millpond.clock import monotonic
from millpond.control import QueueView
from millpond.message import State
from millpond.server.handlers.call import Call
from millpond.server.limits import Places, TooMany
from millpond.server.state import ServerState

log = logging.getLogger("millpond.server")

_EVERY = 2.0
_SHARE = 10
"""Counting takes at most one part in this number of the time."""
_KEPT = 300
"""Samples: ten minutes."""
_CHECK_EVERY = 0.5
_LONGEST = 20.0
"""Seconds of a stream of events inside another application, which waits for its end before it stops."""
_TICK = 5.0
"""Seconds after which pages are read again although nothing changed: ages grow."""
_MOST = 500
"""Open pages at one time."""
_LINGER = 600.0
"""Seconds for which counting continues without an open page, for the charts of the next one."""


class Sample(msgspec.Struct, frozen=True):
    """Rates and waiting messages of a queue at one time."""

    at: float
    completed: float
    failed: float
    waiting: int


class LiveCounts:
    """Samples of all queues, and a number that changes with them."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._places = Places(_MOST, "open pages")
        self._samples: deque[dict[str, Sample]] = deque(maxlen=_KEPT)
        self._last: object = None
        self._task_runs = False
        self._watched_at = 0.0
        self.version = 0

    def samples(self, reaches: Callable[[str], bool]) -> list[Sample]:
        """The sums of the queues that `reaches` allows, oldest first."""
        found = []
        for by_queue in self._samples:
            own = [sample for queue, sample in by_queue.items() if reaches(queue)]
            at = next(iter(by_queue.values())).at if by_queue else None
            if at is not None:
                found.append(
                    Sample(at, sum(s.completed for s in own), sum(s.failed for s in own), sum(s.waiting for s in own))
                )
        return found

    async def begin(self) -> None:
        """Begin to count, or continue. The first page has a first sample."""
        if not self._samples:
            self._add(await self._state.overview())
        self.watch()

    def watch(self) -> None:
        self._watched_at = monotonic()
        if not self._task_runs:
            self._task_runs = True
            self._state.in_background(self._beat(), "count of queues for the dashboard")

    async def _beat(self) -> None:
        try:
            while self._places.taken or monotonic() - self._watched_at < _LINGER:
                began = monotonic()
                try:
                    self._add(await self._state.overview())
                except Exception as e:
                    self.version += 1  # the pages are read again, and show the error
                    log.warning("queues were not counted for the dashboard: %s", e)
                await asyncio.sleep(max(_EVERY, (monotonic() - began) * _SHARE))
        finally:
            self._task_runs = False

    def _add(self, views: list[QueueView]) -> None:
        at = monotonic()
        self._samples.append(
            {
                view.stats.queue: Sample(
                    at,
                    view.completed_per_second,
                    view.failed_per_second,
                    view.stats.counts.get(State.PENDING, 0) + view.stats.counts.get(State.RETRYABLE, 0),
                )
                for view in views
            }
        )
        facts = [(view.stats.queue, dict(view.stats.counts), view.stats.paused) for view in views]
        if facts != self._last:
            self._last = facts
            self.version += 1

    async def events(self, caller: str) -> AsyncIterator[str]:
        """Server-sent events: `refresh` when a page must be read again."""
        with contextlib.ExitStack() as places:
            try:
                places.enter_context(self._places.one())
                places.enter_context(self._places.share(caller))
            except TooMany:  # others were quicker; the browser asks again
                return
            self.watch()
            seen, read_at = self.version, monotonic()
            yield "retry: 2000\n\n"
            until = monotonic() + _LONGEST if self._state.settings.mounted else math.inf
            while not self._state.stopping.is_set():
                if monotonic() > until:
                    yield "event: again\ndata:\n\n"
                    return
                if self.version != seen or monotonic() - read_at >= _TICK:
                    self.watch()
                    seen, read_at = self.version, monotonic()
                    yield f"event: refresh\ndata: {seen}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._state.stopping.wait(), _CHECK_EVERY)

    def is_full(self, caller: str) -> bool:
        return self._places.is_full(caller)


async def events(call: Call) -> Response:
    """Server-sent events that wake open pages."""
    live_counts: LiveCounts = call.request.state.live_counts
    if live_counts.is_full(call.grant.name):  # EventSource gives up after this; the page stays usable
        return Response(status_code=204)
    return StreamingResponse(
        live_counts.events(call.grant.name), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )
