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
_BEAT_AGAIN = 0.1
"""Seconds after a beat that did not get through: who is back first must not be taken for dead by the others."""
_EXTEND_AT_ONCE = 1000
_FINISH_WITHIN = 1.0
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
        self._beaten = self._extends = True
        self._extended = {a: monotonic() for a in attempts}
        self._beats = False
        self._beat_loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether signs of life get through: without them, nothing new is claimed."""
        if self._connect is None:
            # After a handler that blocked us, leases may be over that nobody has taken; lengthen them first.
            now = monotonic()
            if any(now - at > 2 * a.subscription.heartbeat_s for a, at in self._extended.items() if a.held):
                return False
        return self._beaten and self._extends

    def start(self) -> None:
        if self._connect is None:
            self._task = asyncio.create_task(self._here())
        else:
            threading.Thread(target=self._run_thread, name="millpond-heartbeat", daemon=True).start()

    async def stop(self) -> None:
        """End, in a few seconds at most."""
        self._tell(self._stopping.set)
        if not await self._has_ended(_FINISH_WITHIN) and self._task is not None:
            self._tell(self._task.cancel)  # it waits for a database that does not answer
            await self._has_ended(_END_WITHIN)
        if self._presence is not None and not self._beats:
            await self._presence.leave()  # it never left this loop

    async def _has_ended(self, within: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._ended.wait()
        return self._ended.is_set()

    async def _here(self) -> None:
        self._beat_loop = self._loop
        try:
            await self._run(self._transport, lambda attempts, receipts: attempts.refused(receipts))
        finally:
            self._ended.set()

    def _run_thread(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(self._in_thread())
        finally:
            _call_in(self._loop, self._ended.set)

    async def _in_thread(self) -> None:
        assert self._connect is not None
        self._task, self._beat_loop = asyncio.current_task(), asyncio.get_running_loop()
        while not self._stopping.is_set():
            try:
                transport = await self._connect()
            except MillpondError as e:
                self._beaten = False
                log.warning("the heartbeat cannot connect; nothing is claimed: %s", e)
                await self._pause(BEAT_EVERY)
                continue
            try:
                await self._run(transport, lambda a, receipts: _call_in(self._loop, a.refused, receipts))
            finally:
                await transport.close()

    def _tell(self, call: Callable[..., Any]) -> None:
        """Say something where the beating is done. What a thread that is about to begin misses, it sees."""
        if self._beat_loop is None:
            self._stopping.set()
        else:
            _call_in(self._beat_loop, call)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _run(self, transport: Transport, refused: Refused) -> None:
        self._beats = True
        try:
            # Side by side: while an extend waits for a database that is away, the beat must not, since it is what
            # tells others that we live when the database is back.
            await asyncio.gather(self._beating(), self._extending(transport, refused))
        finally:
            if self._presence is not None:
                await self._presence.leave()  # here, where its session lives

    async def _beating(self) -> None:
        while self._presence is not None:
            try:
                self._beaten = await self._presence.beat()
            except Exception as e:
                self._beaten = self._trouble(self._beaten, e)
            if self._stopping.is_set():
                return
            await self._pause(BEAT_EVERY if self._beaten else _BEAT_AGAIN)

    async def _extending(self, transport: Transport, refused: Refused) -> None:
        pause = min([BEAT_EVERY, *(attempts.subscription.heartbeat_s / 2 for attempts in self._attempts)])
        while not self._stopping.is_set():
            try:
                for attempts in self._attempts:
                    if monotonic() - self._extended[attempts] >= attempts.subscription.heartbeat_s:
                        await self._extend(transport, attempts, refused)
                self._extends = True
            except Exception as e:
                self._extends = self._trouble(self._extends, e)
            await self._pause(pause)

    def _trouble(self, told: bool, error: Exception) -> bool:
        if told:  # once, not twice a second
            trace = None if isinstance(error, MillpondError) else error
            log.warning("no sign of life gets through; nothing is claimed: %s", error, exc_info=trace)
        return False

    async def _extend(self, transport: Transport, attempts: Attempts, refused: Refused) -> None:
        began = monotonic()
        receipts = attempts.to_extend()
        for start in range(0, len(receipts), _EXTEND_AT_ONCE):
            stale = await transport.extend(receipts[start : start + _EXTEND_AT_ONCE], attempts.subscription.lease)
            if stale:
                refused(attempts, stale)
        self._extended[attempts] = began  # not before: what failed is tried again at once


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(call, *args)
