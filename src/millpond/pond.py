"""Millpond, the entry point: turns bodies into messages and runs subscribers as a worker."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from millpond import transports
from millpond.clock import ManualClock, Seconds
from millpond.connections import LoopConnections
from millpond.errors import InvalidOption, MillpondError, MissingDriver, NotUnique
from millpond.ids import PublishedId, published_id
from millpond.loop import running_loop, until_stopped
from millpond.message import Message, Published
from millpond.publishing import (
    PublishManyOptions,
    PublishMiddleware,
    PublishOptions,
    around,
    check_publish_middleware,
    many_messages,
    one_message,
)
from millpond.redaction import Redact, redaction
from millpond.seam.transport import Transport
from millpond.seam.workers import DEAD_AFTER
from millpond.subscriber import Publishes
from millpond.subscribers import Subscribers
from millpond.telemetry import LeasesLost, Reaped, Reconnected, Telemetry, log_event
from millpond.transports.url import Url
from millpond.worker import Middleware, check_middleware, in_handler

if TYPE_CHECKING:
    from millpond.control_sync import ControlSync
    from millpond.testing import SyncTestPond, TestPond
    from millpond.transports.connect_options import ConnectOptions
    from millpond.worker.child_worker import Child
    from millpond.worker.worker import Worker

HOOK = TypeVar("HOOK", bound=Callable[[], Any])
M = TypeVar("M", bound=Middleware)
P = TypeVar("P", bound=PublishMiddleware)


class Millpond(Subscribers):
    """A queue in the database you already run: publish to it, declare subscribers, run them.

    It connects at the first call; a wrong URL or option raises at once. The options are those of
    `millpond.connect`. A list of URLs is a pond of several shards.
    """

    def __init__(self, url: str | Sequence[str] = "", **options: Unpack[ConnectOptions]) -> None:
        super().__init__()
        transports.check(url, **options)
        address = transports.address(url)
        first, *more = [Url(one) for one in transports.each_url(address)]
        self.telemetry = Telemetry()
        """Events to subscribe to: published, claimed, settled, lost, reaped, reconnected, broker blocked, streamed."""
        self.telemetry.subscribe(log_event, LeasesLost, Reaped, Reconnected)
        self._hooks: dict[str, list[Callable[[], Any]]] = {"start": [], "stop": []}
        self._redact: Redact | None = None
        self.handler_middleware: list[Middleware] = []
        self._publish_middleware: list[PublishMiddleware] = []
        self._worker: Worker | None = None
        self._child: Child | None = None
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the worker."""
        self._disconnect = False
        """Whether the worker closes the connections of its loop at its end: they cannot be closed from another one."""
        self._url = first
        others = [*more] + [Url(value) for value in options.values() if isinstance(value, str) and "://" in value]
        self._secrets = tuple({secret for one in (self._url, *others) for secret in one.secrets})
        self._connections: LoopConnections = LoopConnections(self._url, options, self.telemetry, address)

    def _publisher(self) -> Publishes:
        return self

    def __repr__(self) -> str:
        return f"<Millpond {self._url}>"

    @property
    def url(self) -> Url:
        """The URL of the messages, of several shards the first; its text shows no password."""
        return self._url

    @property
    def secrets(self) -> tuple[str, ...]:
        """Passwords of the pond's URLs, also of its archive, in all the forms in which a text may repeat them."""
        return self._secrets

    async def publish(self, queue: str, body: Any, **options: Unpack[PublishOptions]) -> PublishedId:
        """Publish one body (JSON values, text, bytes, a dataclass, a msgspec or pydantic model); returns its id.

        `PublishOptions` has the options. With an `id` that was published before, this body is dropped, and `new` of the
        returned id is False. `within` is your connection or session: the message is published when your transaction
        commits.

        With `unique` there is at most one message of the queue with this value: while it is `waiting`, `unfinished`, or
        for a time since it was published (`while_`). If there is one, `on_conflict` decides: keep it, replace its body
        and due time, postpone it, or raise `NotUnique`. `result` of the returned id has the effect.
        """
        return (await self._publish(*one_message(queue, body, options)))[0]

    async def publish_many(
        self, queue: str, bodies: Iterable[Any], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]:
        """Publish many bodies by the fastest way of the transport; returns their ids in order.

        The options are for all of them; `Publish(body, key=…, delay=…)` gives one its own. A database stores all or
        none of them. A broker may have stored a part when an error is raised.
        """
        return await self._publish(*many_messages(queue, bodies, options))

    def publish_sync(self, queue: str, body: Any, **options: Unpack[PublishOptions]) -> PublishedId:
        """`publish` for synchronous code: `within` your session or connection, or on a private thread."""
        return self._publish_sync(*one_message(queue, body, options))[0]

    def publish_many_sync(
        self, queue: str, bodies: Iterable[Any], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]:
        """`publish_many` for synchronous code."""
        return self._publish_sync(*many_messages(queue, bodies, options))

    @property
    def control_sync(self) -> ControlSync:
        """Operator verbs for synchronous code: counts, lists, retries, pauses."""
        from millpond.control_sync import ControlSync  # only for operators

        return ControlSync(lambda: self._connections)

    def asgi(
        self,
        *,
        resolver: Callable[[Any], Awaitable[Any]] | None = None,
        mask: Sequence[str] = (),
        open_to_all: bool = False,
    ) -> Any:
        """The HTTP interface and the dashboard as an ASGI application: `app.mount("/queue", pond.asgi())`.

        Callers need a token (`millpond tokens add`), or get their rights from `resolver`: an async function of the
        request that returns a `millpond.server.grants.Grant`, or None to refuse. Without both every caller is refused,
        unless the program says `open_to_all=True` because it has checked them before. `mask` hides bodies of queues
        from roles, as `read:payments.*` does.
        """
        try:
            server = importlib.import_module("millpond.server.mounted")
        except ModuleNotFoundError as e:
            if (e.name or "").startswith("millpond"):
                raise
            raise MissingDriver(
                f'asgi() needs the package {e.name}; install it with: pip install "millpond[server]"'
            ) from e
        return server.mounted(
            lambda: self._connections.transport(), resolver=resolver, mask=list(mask), open_to_all=open_to_all
        )

    # --- work ---------------------------------------------------------------------------------------

    def on_start(self, hook: HOOK) -> HOOK:
        """Register a function, sync or async, to be called before the first claim."""
        self._hooks["start"].append(hook)
        return hook

    def on_stop(self, hook: HOOK) -> HOOK:
        """Register a function, sync or async, to be called after the last outcome was written."""
        self._hooks["stop"].append(hook)
        return hook

    def middleware(self, function: M) -> M:
        """Register a generator function that runs around each message; the first one registered is the outermost.

        Its argument is a `Handling`. It runs up to its one `yield` before the handler, and on after it: the `yield`
        returns the exception of the handler, or None. An error before the `yield` counts as the handler's error; a
        later one is logged. A plain generator runs in the thread of a synchronous handler, an async one in the event
        loop. A batch is surrounded once for each of its messages.
        """
        check_middleware(function)
        self.handler_middleware.append(function)
        return function

    def publish_middleware(self, function: P) -> P:
        """Register a generator function that runs around each publish of this pond.

        Its argument is a `Publication`. It yields once: the headers to add, or None. The `yield` returns the error of
        the publish, or None.
        """
        check_publish_middleware(function)
        self._publish_middleware.append(function)
        return function

    def redact(self, function: Redact) -> Redact:
        """Register a function that gets each error text and reason before it is stored, and each log line of `run`.

        It returns the text without secrets and personal data. Passwords of URLs are removed before. If the function
        fails, the text is removed.
        """
        if not callable(function):
            raise InvalidOption(f"redact needs a function of a text, not {type(function).__name__}")
        self._redact = function
        return function

    def redacted(self, text: str) -> str:
        """The text as it would be stored."""
        return redaction(self._secrets, self._redact)(text)

    async def run(
        self,
        *,
        queues: Sequence[str] | None = None,
        graceful_timeout: Seconds = 15.0,
        flush_size: int = 500,
        flush_interval: Seconds = 0.005,
        name: str | None = None,
        until_idle: bool = False,
        end_when_stuck: bool = False,
        child_command: Sequence[str] | None = None,
        dead_after: Seconds = DEAD_AFTER,
        cancel_cut_off: bool = False,
        signals: bool = True,
    ) -> None:
        """Run the subscribers until `stop()`, SIGTERM or SIGINT (a second one interrupts handlers).

        Running handlers have `graceful_timeout` to finish; messages that were not started are given back. Outcomes
        are written `flush_size` at a time, or after `flush_interval`, or at once if the worker is idle. With
        `until_idle` the worker stops by itself when no message is due. With `end_when_stuck` it raises `WorkerStuck`
        when all handlers of a subscriber hang: only a new process frees their threads. `child_command` starts a child
        process for suspects; without one they run among other messages.

        A worker of a database whose beats do not arrive for `dead_after` may lose its messages to other workers. With
        `cancel_cut_off` it cancels its async handlers then.
        """
        if self._worker is not None:
            raise MillpondError("this pond runs already; one run serves all its subscribers")
        from millpond.signals import stop_on_signals  # programs that only publish need neither
        from millpond.worker.worker import Worker

        self._worker = worker = Worker(
            self.of_queues(queues),
            graceful_timeout=graceful_timeout,
            flush_size=flush_size,
            flush_interval=flush_interval,
            name=name,
            until_idle=until_idle,
            end_when_stuck=end_when_stuck,
            child_command=child_command,
            dead_after=dead_after,
            cancel_cut_off=cancel_cut_off,
            telemetry=self.telemetry,
            redact=redaction(self._secrets, self._redact),
            middleware=self.handler_middleware,
            periodics=self.periodics,
        )
        self._loop, self._ended, self._disconnect = asyncio.get_running_loop(), Future(), False
        try:
            with stop_on_signals(worker.stop, worker.announce_stop) if signals else nullcontext():
                transport = await until_stopped(worker.stopping, self._connections.transport())
                if transport is None:
                    return
                await self._call_hooks("start")
                try:
                    await worker.run(transport, self._connections.heartbeat_connect(transport))
                finally:
                    await self._call_hooks("stop")
        finally:
            self._worker = None
            try:
                if self._disconnect:
                    await self._connections.disconnect()
            finally:
                self._ended.set_result(None)

    def claim_from(self, shards: Sequence[str]) -> None:
        """Let `run` claim only from these shards, by name or exact key range: `["a", "b"]`, `["-80"]`.

        Call it before the pond connects. Publishing still reaches all shards.
        """
        self._connections.limit_to(shards)

    async def run_suspects(self, worker: socket.socket) -> None:
        """Run the suspects that a worker sends through the socket, until it is closed: a worker's child calls this."""
        from millpond.worker.child_worker import Child  # only for a worker's child

        self._child = child = Child(
            worker, self.subscriptions, redaction(self._secrets, self._redact), self.handler_middleware
        )
        self.telemetry.forward(child.announce)
        transport = await self._connections.transport()
        await self._call_hooks("start")
        try:
            await child.run(transport)
        finally:
            await self._call_hooks("stop")

    def stop(self) -> None:
        """End `run`: no new claims, running handlers finish. Any thread may call it.

        A second call interrupts the handlers that still run. Calls of handlers count once, however many they are.
        Without a run it has no effect.
        """
        worker = self._worker
        if worker is not None:
            self._in_loop(worker.begin_stop if in_handler() else worker.stop)
        elif self._child is not None:
            self._child.stop()

    def _in_loop(self, call: Callable[[], None]) -> None:
        """Call it in the event loop of the worker."""
        if self._loop is None or self._loop is running_loop():
            call()
        else:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(call)

    @property
    def worker(self) -> Worker | None:
        """The worker while the pond runs, otherwise None."""
        return self._worker

    @asynccontextmanager
    async def testing(
        self, url: str = "memory://", *, raise_errors: bool = True, **options: Unpack[ConnectOptions]
    ) -> AsyncIterator[TestPond]:
        """This pond in memory, with a clock that stands still: publish, `run`, check the messages.

        While it lasts, no call on the pond, in any thread, reaches the pond's own URL. `run` raises errors of handlers
        unless `raise_errors` is False. Handlers that publish or decide within their own transactions need a database:
        give the URL of an empty one, with options as in `millpond.connect`.
        """
        from millpond.testing import TestConnections, TestPond  # only for tests

        if self._worker is not None or isinstance(self._connections, TestConnections):
            raise MillpondError("this pond runs or is tested already; use another one, or wait for the end")
        clock = ManualClock()
        options = {"clock": clock, **options}
        if transports.is_database(url):
            options.setdefault("migrate", True)
        transports.check(url, **options)
        connections = TestConnections(Url(url), options, self.telemetry)
        own, self._connections = self._connections, connections
        try:
            yield TestPond(self, await connections.transport(), clock, raise_errors=raise_errors)
        finally:
            self._connections = own
            await connections.end()

    def testing_sync(
        self, url: str = "memory://", *, raise_errors: bool = True, **options: Unpack[ConnectOptions]
    ) -> AbstractContextManager[SyncTestPond]:
        """`testing` for synchronous tests: handlers run in their own event loop, in a thread."""
        from millpond.testing import testing_sync  # only for tests

        return testing_sync(self.testing(url, raise_errors=raise_errors, **options))

    async def _call_hooks(self, event: str) -> None:
        for hook in self._hooks[event]:
            result = hook()
            if inspect.isawaitable(result):
                await result

    # --- connections --------------------------------------------------------------------------------

    @property
    def transport(self) -> Awaitable[Transport]:
        """The transport of this event loop, connected when it is first needed: `await pond.transport`."""
        return self._connections.transport()

    async def close(self) -> None:
        """Stop the worker and close connections; every later call raises `Closed`. Running handlers finish."""
        await self._stop_and_wait()
        await self._connections.close()

    async def disconnect(self) -> None:
        """Stop the worker and close the connections of its loop and of this one; the next call connects anew.

        A pond of a module outlives the event loop of one application or test.
        """
        await self._stop_and_wait()
        await self._connections.disconnect()

    async def _stop_and_wait(self) -> None:
        worker, ended, loop = self._worker, self._ended, self._loop
        if worker is not None and loop is not None and not loop.is_closed():
            self._disconnect = loop is not asyncio.get_running_loop()
            self._in_loop(worker.begin_stop)
            await asyncio.shield(asyncio.wrap_future(ended))

    def close_sync(self) -> None:
        """`close` for programs without an event loop. It waits for a worker that runs in another thread."""
        worker, loop = self._worker, self._loop
        if worker is not None and loop is not None and loop is not running_loop() and loop.is_running():
            self._disconnect = True
            self._in_loop(worker.begin_stop)
            if not in_handler():  # the worker waits for its handlers
                self._ended.result()
        self._connections.close_sync()

    async def __aenter__(self) -> Self:
        await self._connections.transport()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- inside -------------------------------------------------------------------------------------

    async def _publish(self, messages: Sequence[Message], within: Any) -> list[PublishedId]:
        if not self._publish_middleware:
            return await self._store(messages, within)
        with around(self._publish_middleware, messages, within is not None) as publication:
            publication.ids = ids = await self._store(publication.messages, within)
        return ids

    def _publish_sync(self, messages: Sequence[Message], within: Any) -> list[PublishedId]:
        with around(self._publish_middleware, messages, within is not None) as publication:
            publication.ids = ids = self._store_sync(publication.messages, within)
        return ids

    def _store_sync(self, messages: Sequence[Message], within: Any) -> list[PublishedId]:
        if within is None:
            return self._connections.wait_for(lambda: self._store(messages, None))
        published = self._connections.transactions.publish_sync(messages, within=within)
        return _published_ids(messages, published)

    async def _store(self, messages: Sequence[Message], within: Any) -> list[PublishedId]:
        transport = await self._connections.transport()
        return _published_ids(messages, await transport.publish(messages, within=within))


def _published_ids(messages: Sequence[Message], published: Sequence[Published]) -> list[PublishedId]:
    for message, one in zip(messages, published, strict=True):
        if one.result == "refused":
            raise NotUnique(message.queue, one.id)
    return [published_id(one.id, one.new, one.result) for one in published]
