"""In-process hints about queues: their lanes, queues with new messages, and callers that wait.

Hints only save queries. A claim is right without them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from millpond.loop import running_loop
from millpond.message import Draft
from millpond.outcome import Ack, GiveBack, Nack, Outcome, Reject
from millpond.transports.database.messages.lanes import Lanes
from millpond.transports.database.messages.marked_lanes import MarkedLanes
from millpond.transports.database.messages.reread_lanes import RereadLanes
from millpond.transports.database.sql.dialect import Dialect

_FRESH = 1000
"""Number of fresh queues from which on only queues that were claimed here are kept."""
_CLAIMED = 1000
"""Maximum number of queues whose lanes are kept. Then those that were claimed longest ago are forgotten."""


def new_lanes(d: Dialect) -> Lanes:
    """Hints about a queue that was not claimed yet."""
    return RereadLanes() if d.marks is None else MarkedLanes(d.marks, d.no_floor)


class Hints:
    """Hints of one store, shared by its verbs and rooms."""

    def __init__(self, d: Dialect) -> None:
        self._d = d
        self.lanes: dict[str, Lanes] = {}
        self.fresh: set[str] = set()
        """Queues that may have new messages since their last claim."""
        self._waiting: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, Sequence[str]]] = {}

    def lanes_of(self, queue: str) -> Lanes:
        lanes = self.lanes.pop(queue, None) or new_lanes(self._d)
        self.lanes[queue] = lanes  # at the end: the first is the one that was claimed longest ago
        if len(self.lanes) > _CLAIMED:
            del self.lanes[next(iter(self.lanes))]
        return lanes

    def _freshen(self, queues: Iterable[str]) -> None:
        self.fresh.update(queues)
        if len(self.fresh) > _FRESH:
            # The others were never claimed here. A poll finds their messages if they are claimed later.
            self.fresh.intersection_update(self.lanes)

    def due_again(self, queues: Iterable[str]) -> None:
        """Messages of these queues may be due below the floors of their lanes."""
        self._freshen(queues)
        self.drop_floors()
        self.wake()

    def drop_floors(self) -> None:
        for lanes in self.lanes.values():
            lanes.fall()

    @contextmanager
    def waiting(self, queues: Sequence[str]) -> Iterator[asyncio.Event]:
        """An event that is set when one of these queues may have a due message."""
        event = asyncio.Event()
        self._waiting[event] = (asyncio.get_running_loop(), queues)
        try:
            yield event
        finally:
            del self._waiting[event]

    def wake(self, queue: str | None = None) -> None:
        """Wake the callers that wait for this queue; None: all of them."""
        if not self._waiting:
            return
        here = running_loop()
        # A copy: handles on one database in memory may be in other threads.
        for event, (loop, names) in list(self._waiting.items()):
            if queue is None or queue in names:
                if loop is here:
                    event.set()
                else:
                    loop.call_soon_threadsafe(event.set)

    def notified(self, queue: str | None) -> None:
        """The database sent a notification of a queue. None: notifications may have been missed for a while."""
        # Also without a name: a claim that runs just now may have begun before that message came. Waiters are woken.
        self._freshen(self._not_waited_for() if queue is None else [queue])
        self.wake(queue)

    def _not_waited_for(self) -> set[str]:
        return set(self.lanes).difference(*(names for _, names in list(self._waiting.values())))

    def published(self, drafts: Sequence[Draft]) -> None:
        self._freshen([drafts[0].queue] if len(drafts) == 1 else {draft.queue for draft in drafts})
        if self.lanes:
            if any([draft.given or draft.due_us is not None or draft.unique is not None for draft in drafts]):
                self.drop_floors()
            for draft in drafts:
                if (lanes := self.lanes.get(draft.queue)) is not None:
                    lanes.published(draft.priority)
        self.wake()

    def settled(self, outcomes: Sequence[Outcome], *, clock_stands: bool) -> None:
        """`clock_stands`: a test's clock. Otherwise a nack's due time is later than any floor."""
        kinds = set(map(type, outcomes))
        if GiveBack in kinds or (Nack in kinds and clock_stands):
            self.drop_floors()
        if not kinds <= {Ack, Reject}:
            self.wake()
