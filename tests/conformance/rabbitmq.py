"""RabbitMQ whose time stands still until a test moves it.

A broker times delays by its own clock, which no test can set. Here a delayed message waits in this file instead of a
wait queue until it is due by the test's clock; then it goes to its queue as the broker would send it. Everything else
is done by the broker. Tests in tests/rabbitmq use the broker's own clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

import millpond
from millpond import ManualClock, Transport
from millpond.transports.rabbitmq.outgoing import OutgoingMessage

VERBS = ("publish", "claim", "extend", "settle", "wait")


class RabbitByHand:
    """One virtual host for all tests; its queues are emptied before each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._handles: list[Any] = []
        self._queues: set[str] = set()
        self._waiting: list[tuple[int, int, OutgoingMessage]] = []
        self._number = count()

    def empty(self) -> None:
        for handle in self._handles:
            self._queues |= handle.topology.known
        self._handles, self._waiting = [], []

    async def connect(self, **options: Any) -> Transport:
        clock: ManualClock = options.setdefault("clock", ManualClock())
        options.setdefault(
            "consumer_timeout", 30 * 86_400
        )  # longer than any broker waits, because the clock stands still
        handle: Any = await millpond.connect(self._url, **options)
        if self._queues:
            await self._purge(handle)
        self._handles.append(handle)
        send, send_each = handle.publisher.send, handle.publisher.send_each

        def hold(messages: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
            """Keep messages with a delay, and return the others."""
            for message in messages:
                if message.delay_us > 0:
                    due = clock.now() + message.delay_us
                    heapq.heappush(self._waiting, (due, next(self._number), OutgoingMessage(message.envelope)))
            return [message for message in messages if message.delay_us <= 0]

        async def send_or_hold(messages: Sequence[OutgoingMessage]) -> None:
            await send(hold(messages))

        async def send_each_or_hold(messages: Sequence[OutgoingMessage]) -> list[Exception | None]:
            errors = iter(await send_each(hold(messages)))
            return [None if message.delay_us > 0 else next(errors) for message in messages]

        handle.publisher.send, handle.publisher.send_each = send_or_hold, send_each_or_hold
        for verb in VERBS:
            self._keep_time(handle, verb, clock, send)
        self._keep_time(handle.workers, "reap", clock, send)
        return handle  # type: ignore[no-any-return]

    def _keep_time(self, room: Any, verb: str, clock: ManualClock, send: Any) -> None:
        """Send due messages to their queues before each call of a verb."""
        do = getattr(room, verb)

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

        setattr(room, verb, on_time)

    async def _purge(self, handle: Any) -> None:
        """Purge the queues of the last test. Each test before it did the same."""
        channel = await handle.publisher_pool.channel()
        while self._queues:
            await channel._underlay.queue_purge(self._queues.pop())
        await channel.close()
