"""RabbitMQ whose time stands still until a test moves it.

A broker times delays by its own clock, which no test can set. Here a delayed message waits in this file instead of a
wait queue, until the test's clock says that it is due; then it goes to its queue as the broker would send it. All
else is the broker's. How the broker keeps time is tested in tests/rabbitmq, by its own clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

import millpond
from millpond import ManualClock, Store
from millpond.transports.rabbitmq.publisher import Parcel, Publisher

VERBS = ("publish", "claim", "extend", "settle", "wait", "reap")


class RabbitByHand:
    """One virtual host for all tests; its queues are emptied before each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._handles: list[Any] = []
        self._queues: set[str] = set()
        self._waiting: list[tuple[int, int, Parcel]] = []
        self._number = count()

    def empty(self) -> None:
        for handle in self._handles:
            self._queues |= handle.topology.known
        self._handles, self._waiting = [], []

    async def connect(self, **options: Any) -> Store:
        clock: ManualClock = options.setdefault("clock", ManualClock())
        options.setdefault("consumer_timeout", 30 * 86_400)  # no broker waits so long, but its clock stands still
        handle: Any = await millpond.connect(self._url, **options)
        if self._queues:
            await self._purge(handle)
        self._handles.append(handle)
        send = handle.publisher.send

        async def send_or_hold(parcels: Sequence[Parcel]) -> None:
            for parcel in parcels:
                if parcel.delay_us > 0:
                    due = clock.now() + parcel.delay_us
                    heapq.heappush(self._waiting, (due, next(self._number), Parcel(parcel.envelope)))
            if now := [parcel for parcel in parcels if parcel.delay_us <= 0]:
                await send(now)

        handle.publisher.send = send_or_hold
        for verb in VERBS:
            self._keep_time(handle, verb, clock, handle.publisher, send)
        return handle  # type: ignore[no-any-return]

    def _keep_time(self, handle: Any, verb: str, clock: ManualClock, publisher: Publisher, send: Any) -> None:
        """Before each verb, what has fallen due since goes to its queue."""
        do = getattr(handle, verb)

        async def on_time(*args: Any, **options: Any) -> Any:
            due = []
            while self._waiting and self._waiting[0][0] <= clock.now():
                due.append(heapq.heappop(self._waiting)[2])
            if due:
                await send(due)
            if verb == "wait" and self._waiting and args[1:]:
                seconds = (self._waiting[0][0] - clock.now()) / 1_000_000
                args = (args[0], min(args[1], seconds) if isinstance(args[1], float) else args[1])
            return await do(*args, **options)

        setattr(handle, verb, on_time)

    async def _purge(self, handle: Any) -> None:
        """What the last test has left; all before it did so too."""
        channel = await handle.publishing.channel()
        while self._queues:
            await channel._underlay.queue_purge(self._queues.pop())
        await channel.close()
