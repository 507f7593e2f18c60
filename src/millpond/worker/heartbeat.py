"""Signs of life: the worker's beat, and longer leases for what runs long.

They come from a thread with connections of its own, so that a handler that blocks the event loop does not
lose its lease before its timeout. A transport that only this process has is served by a task instead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence

from millpond.clock import monotonic
from millpond.errors import MillpondError
from millpond.message import Receipt
from millpond.transport import Capability, Presence, Transport
from millpond.worker.attempt import Attempts

log = logging.getLogger("millpond.worker")

BEAT_EVERY = 0.5
_EXTEND_AT_ONCE = 1000


class Heartbeat:
    """Beats and extends until stopped."""

    def __init__(
        self,
        transport: Transport,
        connect: Callable[[], Awaitable[Transport]],
        presence: Presence | None,
        attempts: Sequence[Attempts],
        lost: Callable[[Attempts, list[Receipt]], None],
    ) -> None:
        self._transport = transport
        self._connect = connect
        self._presence = presence
        self._attempts = attempts
        self._lost = lost
        self._alive = True
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def alive(self) -> bool:
        """Whether the last beat got through: without one, nothing new is claimed."""
        return self._alive

    def start(self) -> None:
        if Capability.SHARED in self._transport.capabilities:
            self._thread = threading.Thread(target=self._run_thread, name="millpond-heartbeat", daemon=True)
            self._thread.start()
        else:
            self._task = asyncio.create_task(self._run(self._transport, self._lost, self._stopping))

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is not None:
            await self._task
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run_thread(self) -> None:
        asyncio.run(self._in_thread())

    async def _in_thread(self) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()

        async def watch() -> None:
            await self._stopping.wait()
            loop.call_soon_threadsafe(stopping.set)

        watching = asyncio.run_coroutine_threadsafe(watch(), self._loop)
        transport = None
        while transport is None and not stopping.is_set():
            try:
                transport = await self._connect()
            except MillpondError as e:
                log.warning("the heartbeat cannot connect yet: %s", e)
                await _pause(stopping, 1.0)
        try:
            if transport is not None:
                await self._run(transport, self._tell_lost, stopping)
        finally:
            watching.cancel()
            if transport is not None:
                await transport.close()

    def _tell_lost(self, attempts: Attempts, receipts: list[Receipt]) -> None:
        self._loop.call_soon_threadsafe(self._lost, attempts, receipts)

    async def _run(
        self, transport: Transport, lost: Callable[[Attempts, list[Receipt]], None], stopping: asyncio.Event
    ) -> None:
        extended = {id(attempts): monotonic() for attempts in self._attempts}
        pause = min([BEAT_EVERY, *(attempts.subscription.heartbeat_s / 2 for attempts in self._attempts)])
        while not stopping.is_set():
            try:
                if self._presence is not None:
                    self._alive = await self._presence.beat()
                for attempts in self._attempts:
                    if monotonic() - extended[id(attempts)] >= attempts.subscription.heartbeat_s:
                        extended[id(attempts)] = monotonic()
                        await self._extend(transport, attempts, lost)
            except MillpondError as e:
                self._alive = self._presence is None
                log.warning("no sign of life gets through: %s", e)
            await _pause(stopping, pause)
        if self._presence is not None:
            await self._presence.leave()  # here, where its session lives

    async def _extend(
        self, transport: Transport, attempts: Attempts, lost: Callable[[Attempts, list[Receipt]], None]
    ) -> None:
        receipts = attempts.to_extend()
        for start in range(0, len(receipts), _EXTEND_AT_ONCE):
            refused = await transport.extend(receipts[start : start + _EXTEND_AT_ONCE], attempts.subscription.lease)
            if refused:
                lost(attempts, refused)


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
