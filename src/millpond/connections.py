"""Connections of a pond: one transport per event loop, connected when it is first needed.

A transport belongs to the event loop that opened it. Synchronous callers need no loop: within their own transaction
nothing is connected, and without one a private thread waits for them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from millpond import transports
from millpond.errors import Closed, InvalidOption, MillpondError, not_supported
from millpond.loop import LoopThread, running_loop
from millpond.seam.transport import Capability, Transport
from millpond.telemetry import Telemetry
from millpond.transports.url import Url

if TYPE_CHECKING:
    from millpond.seam.transactions import Transactions

T = TypeVar("T")


class LoopConnections:
    """Transports to one address, one per event loop."""

    def __init__(
        self, url: Url, options: Mapping[str, Any], telemetry: Telemetry, address: transports.Address | None = None
    ) -> None:
        self._url = url
        self._raw = transports.shared_by_handles(address or url.raw)
        self._options = options
        self._telemetry = telemetry
        self._opening: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[Transport]] = WeakKeyDictionary()
        self._thread: LoopThread | None = None
        self._guard = threading.Lock()
        self._closed = False
        self._in_memory: list[Transport] = []
        """Transports that keep messages in this process, which would end with the event loop that opened them."""
        self._pid = os.getpid()
        self._left_by_fork: list[Any] = []

    async def transport(self) -> Transport:
        """The transport of this event loop."""
        self._check_open()
        loop = asyncio.get_running_loop()
        opening = self._opening.get(loop)
        if opening is not None and opening.done() and not opening.cancelled() and opening.exception() is None:
            return opening.result()
        if opening is None or opening.done():
            opening = loop.create_task(self._connect())
            with self._guard:
                self._opening[loop] = opening
        # Shielded: other callers may wait for the same connection when one of them is cancelled.
        return await asyncio.shield(opening)

    async def _connect(self) -> Transport:
        transport = await transports.connect(self._raw, telemetry=self._telemetry, **self._options)
        if Capability.SHARED not in transport.capabilities:
            self._in_memory.append(transport)
        if transports.is_database(self._raw):
            self._transactions.learn_from(transport.transactions)
        return transport

    def limit_to(self, shards: Sequence[str]) -> None:
        """Claim only from these shards, given by name or key range."""
        if isinstance(self._raw, str):
            raise InvalidOption("shards can be chosen only for a pond of several URLs")
        if self._opening:
            raise MillpondError("the pond is connected already; choose its shards before the first call")
        self._options = {**self._options, "shards": list(shards)}

    def heartbeat_connect(self, transport: Transport) -> Callable[[], Awaitable[Transport]] | None:
        """A function that opens a second transport to the same messages, for the heartbeat's thread.

        None where that is impossible: in memory, on the caller's pool, which belongs to this loop, and where a
        receipt belongs to the connection that claimed.
        """
        needed = Capability.SHARED | Capability.FREE_RECEIPTS
        if needed not in transport.capabilities or self._options.get("pool") is not None:
            return None
        options = {**self._options, "pool_size": 1, "migrate": False}
        return lambda: transports.connect(self._raw, **options)

    @property
    def transactions(self) -> Transactions:
        """The transactions room, which needs no pooled connection."""
        self._check_open()
        return self._transactions

    @cached_property
    def _transactions(self) -> Transactions:
        from millpond.transports.instrumented import instrumented_transactions  # only for programs that connect

        return instrumented_transactions(transports.transactions(self._raw, **self._options), self._telemetry)

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine to its end from synchronous code.

        It runs in a loop that has a transport already and runs in another thread: a handler's thread shares its
        worker's connections. Otherwise it runs in a private thread.
        """
        self._check_open()
        here = running_loop()
        with self._guard:
            loops = list(self._opening)
        for loop in loops:
            if loop is not here and loop.is_running() and self._may_wait_for(loop):
                return asyncio.run_coroutine_threadsafe(work(), loop).result()
        if self._options.get("pool") is not None:
            raise InvalidOption(
                "the pool given to this pond belongs to an event loop; call publish_sync from another thread while "
                "that loop runs and the pond is connected in it, or give within= a connection"
            )
        with self._guard:
            if self._thread is None or not self._thread.is_alive():
                self._thread = LoopThread()
            thread = self._thread
        return thread.wait_for(work())

    def _may_wait_for(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this thread may wait for work in a loop of another thread."""
        return True

    async def close(self) -> None:
        """Close the connections of this loop and of the private thread; every later call raises `Closed`."""
        self._closed = True
        await self.disconnect()
        self._in_memory.clear()

    async def disconnect(self) -> None:
        """Close the connections of this loop and of the private thread. The next call connects anew."""
        await asyncio.to_thread(self._close_thread)
        await self._close_transport()

    def close_sync(self) -> None:
        self._closed = True
        self._close_thread()
        self._in_memory.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the pond at {self._url} was closed; make a new one")
        if self._pid != os.getpid():
            if self._in_memory:
                raise not_supported("a pond that was connected before a fork", Capability.SHARED)
            # After a fork the connections and threads belong to the parent. They are kept alive, because closing a
            # connection here would end the parent's session or release its locks.
            self._left_by_fork.append((dict(self._opening), self._thread))
            self._opening, self._thread, self._guard = WeakKeyDictionary(), None, threading.Lock()
            self._pid = os.getpid()

    def _close_thread(self) -> None:
        with self._guard:
            thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            thread.wait_for(self._close_transport())
            thread.end()

    async def _close_transport(self) -> None:
        with self._guard:
            opening = self._opening.pop(asyncio.get_running_loop(), None)
        if opening is not None:
            try:
                transport = await opening
            except Exception:  # it was raised to the caller that connected
                return
            await transport.close()
