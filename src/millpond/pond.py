"""Millpond, the thin front: bodies become messages, and subscribers become a worker."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from millpond import transports
from millpond.clock import ManualClock, Seconds
from millpond.codec import CONTENT_TYPE, encode
from millpond.connections import Connections
from millpond.errors import InvalidMessage, MillpondError
from millpond.message import DEFAULT_PRIORITY, Message
from millpond.subscribers import Subscribers
from millpond.telemetry import LeasesLost, Reaped, Reconnected, Telemetry, log_event
from millpond.testing import TestPond
from millpond.transport import Transport
from millpond.transports.url import Url
from millpond.worker import Worker

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
        self._connections = Connections(self._url, options, self.telemetry)

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
            return self._connections.detached.publish_sync([message], within=within)[0].id
        return self._connections.wait_for(lambda: self._publish([message], None))[0]

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
                transport = await self._connections.here_unless(worker.stopping)
                if transport is None:
                    return
                await self._call("start")
                try:
                    await worker.run(transport, self._connections.beside(transport))
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
        options = {"migrate": True} if transports.is_database(url) else {}
        transport = await transports.connect(url, clock=clock, telemetry=self.telemetry, **options)
        try:
            with self._connections.replaced_by(transport):
                yield TestPond(self, transport, clock)
        finally:
            await transport.close()

    async def _call(self, moment: str) -> None:
        for hook in self._hooks[moment]:
            result = hook()
            if inspect.isawaitable(result):
                await result

    # --- connections --------------------------------------------------------------------------------

    @property
    def transport(self) -> Awaitable[Transport]:
        """The transport of this event loop, connected when it is first needed: `await pond.transport`."""
        return self._connections.here()

    async def close(self) -> None:
        """Stop a worker that runs here, give back connections; every later call raises `Closed`."""
        if self._worker is not None:
            self._worker.stop()
            await self._ended.wait()
        await self._connections.close()

    def close_sync(self) -> None:
        """`close` for programs without an event loop."""
        self._connections.close_sync()

    async def __aenter__(self) -> Self:
        await self._connections.here()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- inside -------------------------------------------------------------------------------------

    async def _publish(self, messages: Sequence[Message], within: Any) -> list[UUID]:
        transport = await self._connections.here()
        return [published.id for published in await transport.publish(messages, within=within)]


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
