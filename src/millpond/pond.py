"""Millpond, the thin front: bodies become messages, and a URL becomes a transport when it is first needed.

A transport belongs to the event loop that opened it, so a pond keeps one for each loop it is used in.
Synchronous callers need none: within their own transaction nothing is connected at all, and without one a
private thread does the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from millpond import transports
from millpond.clock import ManualClock, Seconds
from millpond.codec import CONTENT_TYPE, encode
from millpond.errors import Closed, InvalidMessage, InvalidOption, MillpondError, not_supported
from millpond.message import DEFAULT_PRIORITY, Message
from millpond.subscribers import Subscribers
from millpond.telemetry import LeasesLost, Reaped, Reconnected, Telemetry, log_event
from millpond.testing import TestPond
from millpond.transport import Capability, Store, Transport
from millpond.transports.observed import Observed
from millpond.transports.url import Url
from millpond.worker import Worker

T = TypeVar("T")
HOOK = TypeVar("HOOK", bound=Callable[[], Any])


class Millpond(Subscribers):
    """A queue in the database you already run: publish to it, declare subscribers, run them.

    Nothing is connected before the first call; a wrong URL or option is told at once. The options are those
    of `millpond.connect`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__()
        transports.check(url, **options)
        self.telemetry = Telemetry()
        self.telemetry.subscribe(log_event, LeasesLost, Reaped, Reconnected)
        """Subscribe to hear what happens: published, claimed, settled, lost, reaped, reconnected."""
        self._hooks: dict[str, list[Callable[[], Any]]] = {"start": [], "stop": []}
        self._worker: Worker | None = None
        self._ended = asyncio.Event()
        self._url = Url(url)
        self._options = options
        self._opening: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[Transport]] = WeakKeyDictionary()
        self._thread: _LoopThread | None = None
        self._guard = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._left_by_fork: list[Any] = []

    def __repr__(self) -> str:
        return f"<Millpond {self._url}>"

    @property
    def url(self) -> Url:
        """Where the messages are; its text shows no password."""
        return self._url

    async def publish(
        self,
        queue: str,
        body: Any,
        *,
        id: UUID | None = None,
        key: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        delay: Seconds | None = None,
        due_at: datetime | None = None,
        expires: Seconds | datetime | None = None,
        headers: Mapping[str, Any] | None = None,
        within: Any = None,
    ) -> UUID:
        """Publish one body (JSON values, text, bytes, a dataclass, a msgspec or pydantic model); returns its id.

        `within` is a connection or session of yours: the message is there when your transaction commits.
        """
        message = _message(queue, body, id, key, priority, delay, due_at, expires, headers)
        return (await self._publish([message], within))[0]

    async def publish_many(
        self,
        queue: str,
        bodies: Iterable[Any],
        *,
        ids: Sequence[UUID] | None = None,
        key: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        delay: Seconds | None = None,
        due_at: datetime | None = None,
        expires: Seconds | datetime | None = None,
        headers: Mapping[str, Any] | None = None,
        within: Any = None,
    ) -> list[UUID]:
        """Publish many bodies, all or none, in the transport's fastest way; returns their ids in order."""
        bodies = list(bodies)
        if ids is not None and len(ids) != len(bodies):
            raise InvalidMessage(f"there are {len(bodies)} bodies and {len(ids)} ids; give one id for each, or none")
        each = ids if ids is not None else [None] * len(bodies)
        messages = [
            _message(queue, body, id_, key, priority, delay, due_at, expires, headers)
            for body, id_ in zip(bodies, each, strict=True)
        ]
        return await self._publish(messages, within)

    def publish_sync(
        self,
        queue: str,
        body: Any,
        *,
        id: UUID | None = None,
        key: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        delay: Seconds | None = None,
        due_at: datetime | None = None,
        expires: Seconds | datetime | None = None,
        headers: Mapping[str, Any] | None = None,
        within: Any = None,
    ) -> UUID:
        """`publish` for synchronous code: `within` your session or connection, or on a private thread."""
        message = _message(queue, body, id, key, priority, delay, due_at, expires, headers)
        if within is not None:
            self._check_open()
            return self._detached.publish_sync([message], within=within)[0].id
        return self._wait_for(lambda: self._publish([message], None))[0]

    # --- work ---------------------------------------------------------------------------------------

    def on_start(self, hook: HOOK) -> HOOK:
        """Call this, sync or async, before the first claim."""
        self._hooks["start"].append(hook)
        return hook

    def on_stop(self, hook: HOOK) -> HOOK:
        """Call this, sync or async, after the last outcome was written."""
        self._hooks["stop"].append(hook)
        return hook

    async def run(
        self,
        *,
        queues: Sequence[str] | None = None,
        graceful_timeout: Seconds = 15.0,
        flush_size: int = 500,
        flush_interval: Seconds = 0.005,
        name: str | None = None,
        until_idle: bool = False,
        signals: bool = True,
    ) -> None:
        """Work until told to stop: by `stop()`, or by SIGTERM or SIGINT (a second one interrupts handlers).

        Running handlers have `graceful_timeout` to finish; what was not started goes back. Outcomes are written
        `flush_size` at a time, or after `flush_interval`, or at once when nothing else is going on. With
        `until_idle` the worker stops by itself when nothing is due.
        """
        if self._worker is not None:
            raise MillpondError("this pond runs already; one run serves all its subscribers")
        self._worker = worker = Worker(
            self.of_queues(queues),
            graceful_timeout=graceful_timeout,
            flush_size=flush_size,
            flush_interval=flush_interval,
            name=name,
            until_idle=until_idle,
            telemetry=self.telemetry,
        )
        self._ended.clear()
        try:
            with _told_by_signals(worker.stop if signals else None):
                transport = await self._connected_unless(worker.stopping)
                if transport is None:
                    return
                await self._call("start")
                try:
                    await worker.run(transport, self._beside(transport))
                finally:
                    await self._call("stop")
        finally:
            self._worker = None
            self._ended.set()

    def stop(self) -> None:
        """Let `run` come to its end: no new claims, running handlers finish. From the same event loop.

        A second time: interrupt the handlers that still run. Without a run it does nothing.
        """
        if self._worker is not None:
            self._worker.stop()

    @property
    def worker(self) -> Worker | None:
        """The worker of a pond that runs."""
        return self._worker

    @asynccontextmanager
    async def testing(self, url: str = "memory://") -> AsyncIterator[TestPond]:
        """This pond on memory, with a clock that stands still: publish, `run`, look what became of it.

        Handlers that decide within transactions of theirs need a database: give the URL of an empty one.
        """
        clock = ManualClock()
        loop = asyncio.get_running_loop()
        options = {"migrate": True} if transports.is_database(url) else {}
        transport = await transports.connect(url, clock=clock, telemetry=self.telemetry, **options)
        was = self._opening.get(loop)
        opened = loop.create_future()
        opened.set_result(transport)
        self._opening[loop] = opened
        try:
            yield TestPond(self, transport, clock)
        finally:
            if was is None:
                del self._opening[loop]
            else:
                self._opening[loop] = was
            await transport.close()

    async def _call(self, moment: str) -> None:
        for hook in self._hooks[moment]:
            result = hook()
            if inspect.isawaitable(result):
                await result

    def _beside(self, transport: Transport) -> Callable[[], Awaitable[Transport]] | None:
        """How to open a second transport to the same messages, for the heartbeat's own thread. None where there
        cannot be one: in memory, on the caller's own pool, which belongs to this loop, and where a receipt belongs
        to the connection that claimed."""
        needed = Capability.SHARED | Capability.FREE_RECEIPTS
        if needed not in transport.capabilities or self._options.get("pool") is not None:
            return None
        options = {**self._options, "pool_size": 1, "migrate": False}
        return lambda: transports.connect(self._url.raw, **options)

    async def _connected_unless(self, stopped: asyncio.Event) -> Transport | None:
        """The transport, or None if somebody says stop before there is a connection."""
        connecting, stopping = asyncio.ensure_future(self._connected()), asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
            return connecting.result() if connecting.done() else None
        finally:
            connecting.cancel()
            stopping.cancel()

    # --- connections --------------------------------------------------------------------------------

    @property
    def transport(self) -> Awaitable[Transport]:
        """The transport of this event loop, connected when it is first needed: `await pond.transport`."""
        return self._connected()

    async def close(self) -> None:
        """Stop a worker that runs here, give back connections; every later call raises `Closed`."""
        if self._worker is not None:
            self._worker.stop()
            await self._ended.wait()
        self._closed = True
        await asyncio.to_thread(self._close_thread)
        await self._close_here()

    def close_sync(self) -> None:
        """`close` for programs without an event loop."""
        self._closed = True
        self._close_thread()

    async def __aenter__(self) -> Self:
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- inside -------------------------------------------------------------------------------------

    async def _publish(self, messages: Sequence[Message], within: Any) -> list[UUID]:
        transport = await self._connected()
        return [published.id for published in await transport.publish(messages, within=within)]

    async def _connected(self) -> Transport:
        self._check_open()
        loop = asyncio.get_running_loop()
        opening = self._opening.get(loop)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opening[loop] = loop.create_task(
                transports.connect(self._url.raw, telemetry=self.telemetry, **self._options)
            )
        # Shielded: others may be waiting for the same connection when one of them is cancelled.
        return await asyncio.shield(opening)

    @cached_property
    def _detached(self) -> Store:
        store: Any = Observed(transports.detached(self._url.raw, **self._options), self.telemetry)
        return cast(Store, store)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the pond at {self._url} was closed; make a new one")
        if self._pid != os.getpid():
            # After a fork neither the parent's connections nor its threads are ours. They are kept, since
            # closing a connection here would speak to the parent's server, or let go of its locks.
            self._left_by_fork.append((dict(self._opening), self._thread))
            self._opening, self._thread, self._guard = WeakKeyDictionary(), None, threading.Lock()
            self._pid = os.getpid()

    def _wait_for(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
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
                self._thread = _LoopThread()
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
        if Capability.SHARED not in (await self._connected()).capabilities:
            raise not_supported(
                "publish_sync outside a thread of a connected pond (await pond.publish instead)", Capability.SHARED
            )

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


class _LoopThread(threading.Thread):
    """An event loop in a thread of its own; it never keeps a program from ending."""

    def __init__(self) -> None:
        super().__init__(name="millpond-pond", daemon=True)
        self._loop = asyncio.new_event_loop()
        self.start()

    def run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()


@contextlib.contextmanager
def _told_by_signals(stop: Callable[[], None] | None) -> Iterator[None]:
    """SIGTERM and SIGINT mean stop, while this lasts and where the program's main thread is."""
    if stop is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: not set by Python, and not ours to set again
                signal.signal(number, handler)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _message(
    queue: str,
    body: Any,
    id: UUID | None,
    key: str | None,
    priority: int,
    delay: Seconds | None,
    due_at: datetime | None,
    expires: Seconds | datetime | None,
    headers: Mapping[str, Any] | None,
) -> Message:
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers must be a mapping of names to JSON values, not {type(headers).__name__}")
    payload, content_type = encode(body)
    headers = headers or {}
    if content_type is not None and CONTENT_TYPE not in headers:
        headers = {CONTENT_TYPE: content_type, **headers}
    return Message(
        queue=queue,
        payload=payload,
        id=id,
        key=key,
        priority=priority,
        delay=delay,
        due_at=due_at,
        expires=expires,
        headers=headers,
    )
