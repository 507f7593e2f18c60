"""The connections of a pond: a URL becomes a transport when it is first needed.

A transport belongs to the event loop that opened it, so there is one for each loop. Synchronous callers need none:
within their own transaction nothing is connected at all, and without one a private thread does the waiting.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from millpond import transports
from millpond.errors import Closed, InvalidOption, not_supported
from millpond.loop import LoopThread
from millpond.telemetry import Telemetry
from millpond.transport import Capability, Store, Transport
from millpond.transports.observed import Observed
from millpond.transports.url import Url

T = TypeVar("T")


class Connections:
    """The transports to one URL: one for each event loop."""

    def __init__(self, url: Url, options: Mapping[str, Any], telemetry: Telemetry) -> None:
        self._url = url
        self._options = options
        self._telemetry = telemetry
        self._opening: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[Transport]] = WeakKeyDictionary()
        self._thread: LoopThread | None = None
        self._guard = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._left_by_fork: list[Any] = []

    async def here(self) -> Transport:
        """The transport of this event loop."""
        self._check_open()
        loop = asyncio.get_running_loop()
        opening = self._opening.get(loop)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opening[loop] = loop.create_task(
                transports.connect(self._url.raw, telemetry=self._telemetry, **self._options)
            )
        # Shielded: others may be waiting for the same connection when one of them is cancelled.
        return await asyncio.shield(opening)

    async def here_unless(self, stopped: asyncio.Event) -> Transport | None:
        """The transport, or None if somebody says stop before there is a connection."""
        connecting, stopping = asyncio.ensure_future(self.here()), asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
            return connecting.result() if connecting.done() else None
        finally:
            connecting.cancel()
            stopping.cancel()

    def beside(self, transport: Transport) -> Callable[[], Awaitable[Transport]] | None:
        """How to open a second transport to the same messages, for the heartbeat's own thread. None where there
        cannot be one: in memory, on the caller's own pool, which belongs to this loop, and where a receipt belongs
        to the connection that claimed."""
        needed = Capability.SHARED | Capability.FREE_RECEIPTS
        if needed not in transport.capabilities or self._options.get("pool") is not None:
            return None
        options = {**self._options, "pool_size": 1, "migrate": False}
        return lambda: transports.connect(self._url.raw, **options)

    @contextmanager
    def replaced_by(self, transport: Transport) -> Iterator[None]:
        """In this event loop, use another transport for a while."""
        loop = asyncio.get_running_loop()
        was = self._opening.get(loop)
        opened = loop.create_future()
        opened.set_result(transport)
        self._opening[loop] = opened
        try:
            yield
        finally:
            if was is None:
                del self._opening[loop]
            else:
                self._opening[loop] = was

    # --- for synchronous callers --------------------------------------------------------------------

    @property
    def detached(self) -> Store:
        """A store without connections, for what happens within transactions of the caller's."""
        self._check_open()
        return self._detached

    @cached_property
    def _detached(self) -> Store:
        store: Any = Observed(transports.detached(self._url.raw, **self._options), self._telemetry)
        return cast(Store, store)

    def wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine to its end from synchronous code.

        In the loop that has a transport already, if that runs in another thread: a handler's thread shares its
        worker's connections. Otherwise in a thread of our own.
        """
        self._check_open()
        here = _running_loop()
        for loop in list(self._opening):
            if loop is not here and loop.is_running():
                return asyncio.run_coroutine_threadsafe(work(), loop).result()
        with self._guard:
            if self._thread is None or not self._thread.is_alive():
                self._thread = LoopThread()
            thread = self._thread
        thread.wait_for(self._check_shared())
        return thread.wait_for(work())

    async def _check_shared(self) -> None:
        """A second transport must reach the same messages, by connections of its own."""
        if self._options.get("pool") is not None:
            raise InvalidOption(
                "the pool given to this pond belongs to an event loop; call publish_sync from another thread while "
                "that loop runs and the pond is connected in it, or give within= a connection"
            )
        if Capability.SHARED not in (await self.here()).capabilities:
            raise not_supported(
                "publish_sync outside a thread of a connected pond (await pond.publish instead)", Capability.SHARED
            )

    # --- the end ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Give back the connections of this loop and of the private thread; every later call raises `Closed`."""
        self._closed = True
        await asyncio.to_thread(self._close_thread)
        await self._close_here()

    def close_sync(self) -> None:
        self._closed = True
        self._close_thread()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the pond at {self._url} was closed; make a new one")
        if self._pid != os.getpid():
            # After a fork neither the parent's connections nor its threads are ours. They are kept, since
            # closing a connection here would speak to the parent's server, or let go of its locks.
            self._left_by_fork.append((dict(self._opening), self._thread))
            self._opening, self._thread, self._guard = WeakKeyDictionary(), None, threading.Lock()
            self._pid = os.getpid()

    def _close_thread(self) -> None:
        with self._guard:
            thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            thread.wait_for(self._close_here())
            thread.end()

    async def _close_here(self) -> None:
        opening = self._opening.pop(asyncio.get_running_loop(), None)
        if opening is not None:
            try:
                transport = await opening
            except Exception:  # it was told to whoever wanted to connect
                return
            await transport.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
