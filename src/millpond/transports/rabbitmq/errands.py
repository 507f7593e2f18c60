"""Messages that arrive and are not for claims as they are: each is published elsewhere, then acked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from millpond.errors import MillpondError, StoreUnavailable
from millpond.transports.rabbitmq.driver import Channel
from millpond.transports.rabbitmq.publisher import Parcel

log = logging.getLogger("millpond.rabbitmq")

_AT_ONCE = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

Send = Callable[[Sequence[Parcel]], Awaitable[None]]


class Errand(msgspec.Struct, frozen=True, gc=False):
    """Publish this instead of that delivery."""

    channel: Channel
    tag: int
    parcel: Parcel


class Errands:
    """Done together and in the order of their arrival.

    What fails is tried again for as long as its channel lives: given back to the broker, the message would have a
    delivery counted that nobody ran.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._todo: list[Errand] = []
        self._running: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()

    def add(self, errand: Errand) -> None:
        self._todo.append(errand)
        if self._running is None:
            self._tried.clear()
            self._running = asyncio.ensure_future(self._run())

    async def tried(self) -> None:
        """Return when all are done, or the broker would not have them just now."""
        if self._running is not None:
            await self._tried.wait()

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while some := self._todo[:_AT_ONCE]:
                self._tried.clear()
                try:
                    await do(some, self._send)
                except MillpondError as e:
                    log.warning("%d messages are moved later: %s", len(self._todo), e)
                    self._tried.set()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                    self._todo = [errand for errand in self._todo if not errand.channel.closed]
                else:
                    del self._todo[: len(some)]
                    pause = _FIRST_PAUSE
        finally:
            self._running = None
            self._tried.set()


async def do(errands: Sequence[Errand], send: Send) -> None:
    """All at once. A channel that is lost before the acks brings its messages again, and they tell that."""
    await send([errand.parcel for errand in errands])
    tags: dict[Channel, list[int]] = {}
    for errand in errands:
        tags.setdefault(errand.channel, []).append(errand.tag)
    for channel, some in tags.items():
        with contextlib.suppress(StoreUnavailable):
            await channel.ack(some)
