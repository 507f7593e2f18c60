"""Signs of life: the worker's beat, and longer leases for what is held.

They come from a thread with connections of its own, so that a handler that blocks the event loop does not
lose its lease before its timeout. A transport that only this event loop can use is served by a task instead;
then nothing is claimed before leases that are overdue have been lengthened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from millpond.clock import monotonic
from millpond.errors import MillpondError
from millpond.message import Receipt
from millpond.transport import Presence, Transport
from millpond.worker.attempt import Attempts

log = logging.getLogger("millpond.worker")

BEAT_EVERY = 0.5
_EXTEND_AT_ONCE = 1000
_END_WITHIN = 6.0
"""Seconds for the last words: a presence takes up to five of them to leave a database that does not answer."""

Refused = Callable[[Attempts, list[Receipt]], None]


class Heartbeat:
    """Beats and extends until stopped. `connect` opens a transport for the thread; None: a task does it here."""

    def __init__(
        self,
        transport: Transport,
        connect: Callable[[], Awaitable[Transport]] | None,
        presence: Presence | None,
        attempts: Sequence[Attempts],
    ) -> None:
        self._transport = transport
        self._connect = connect
        self._presence = presence
        self._attempts = attempts
        self._loop = asyncio.get_running_loop()
        self._beaten = True
        self._extended = {a: monotonic() for a in attempts}
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._task_loop = self._loop
        self._ended = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether signs of life get through: without them, nothing new is claimed."""
        if self._thread is None:
            # After a handler that blocked us, leases may be over that nobody has taken; lengthen them first.
            now = monotonic()
            if any(now - at > 2 * a.subscription.heartbeat_s for a, at in self._extended.items() if a.held):
                return False
        return self._beaten

    def start(self) -> None:
        if self._connect is None:
            self._task = asyncio.create_task(self._run(self._transport, lambda a, receipts: a.refused(receipts)))
        else:
            self._thread = threading.Thread(target=self._run_thread, name="millpond-heartbeat", daemon=True)
            self._thread.start()

    async def stop(self) -> None:
        """End, in a few seconds at most."""
        if self._thread is None:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task], timeout=_END_WITHIN)
            return
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # it ended by itself
                self._task_loop.call_soon_threadsafe(self._task.cancel)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_WITHIN):
                await self._ended.wait()

    def _run_thread(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(self._in_thread())
        finally:
            self._in_loop(self._ended.set)

    async def _in_thread(self) -> None:
        assert self._connect is not None
        self._task, self._task_loop = asyncio.current_task(), asyncio.get_running_loop()

        while True:
            try:
                transport = await self._connect()
                break
            except MillpondError as e:
                self._beaten = False
                log.warning("the heartbeat cannot connect: %s", e)
                await asyncio.sleep(BEAT_EVERY)
        try:
            await self._run(transport, lambda a, receipts: self._in_loop(a.refused, receipts))
        finally:
            await transport.close()

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the worker's loop was closed
            self._loop.call_soon_threadsafe(call, *args)

    async def _run(self, transport: Transport, refused: Refused) -> None:
        pause = min([BEAT_EVERY, *(attempts.subscription.heartbeat_s / 2 for attempts in self._attempts)])
        try:
            while True:
                try:
                    if self._presence is not None:
                        self._beaten = await self._presence.beat()
                    for attempts in self._attempts:
                        if monotonic() - self._extended[attempts] >= attempts.subscription.heartbeat_s:
                            await self._extend(transport, attempts, refused)
                    self._beaten = self._beaten or self._presence is None
                except Exception as e:
                    if self._beaten:  # told once, not twice a second
                        trace = None if isinstance(e, MillpondError) else e
                        log.warning("no sign of life gets through; nothing is claimed: %s", e, exc_info=trace)
                    self._beaten = False
                await asyncio.sleep(pause)
        finally:
            if self._presence is not None:
                await self._presence.leave()  # here, where its session lives

    async def _extend(self, transport: Transport, attempts: Attempts, refused: Refused) -> None:
        began = monotonic()
        receipts = attempts.to_extend()
        for start in range(0, len(receipts), _EXTEND_AT_ONCE):
            stale = await transport.extend(receipts[start : start + _EXTEND_AT_ONCE], attempts.subscription.lease)
            if stale:
                refused(attempts, stale)
        self._extended[attempts] = began  # not before: what failed is tried again at once
