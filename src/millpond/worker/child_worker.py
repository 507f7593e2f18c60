"""A child process of a worker: it runs the suspects that the worker sends, one at a time.

A handler has here all that it has in the worker, by the same handler pool. Only outcomes and events go through the
socket to the worker, which keeps the lease and writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from millpond.message import Claim
from millpond.outcome import Outcome
from millpond.redaction import Redact
from millpond.seam.transport import Transport
from millpond.telemetry import Event, LeasesLost, MessagesSettled
from millpond.worker import child_messages
from millpond.worker.child_messages import (
    Announce,
    Idle,
    Interrupt,
    Lost,
    ReceiptStale,
    Run,
    Settle,
    Started,
    StopWorker,
    Write,
    WriteAnswer,
)
from millpond.worker.delivery import Delivery
from millpond.worker.handler import Handler
from millpond.worker.handler_pool import HandlerPool
from millpond.worker.middleware import Middleware, with_middleware
from millpond.worker.queue_settings import Settings
from millpond.worker.subscription import Subscription


class Child:
    """The other end of a `ChildProcess`. For its handler pools it is the writer of outcomes."""

    def __init__(
        self,
        worker: socket.socket,
        subscriptions: Sequence[Subscription],
        redact: Redact,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._worker = worker
        self._subscriptions = subscriptions
        self._redact = redact
        self._settings = Settings(subscriptions)
        self._middleware = middleware
        self._loop = asyncio.get_running_loop()
        self._sending = threading.Lock()
        self._transport: Transport | None = None
        self._pools: dict[tuple[str, ...], HandlerPool] = {}
        """By the queues of a subscription."""
        self._tasks: list[asyncio.Task[None]] = []
        self._claim: Claim | None = None
        """The message that runs."""
        self._received = self._ended = 0
        """Number of messages that came through the socket, and of those whose handler has ended."""
        self._pool: HandlerPool | None = None
        """The pool in which it runs."""
        self._writing: deque[tuple[Delivery, asyncio.Future[bool]]] = deque()
        """Deliveries whose decisions the worker writes now."""
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self, transport: Transport) -> None:
        """Run until the worker closes the socket. If it does so while a handler runs, this process ends at once."""
        self._transport = transport
        await self._settings.read(transport)
        settings = asyncio.create_task(self._settings.run(transport))
        threading.Thread(target=self._read, name="millpond-child", daemon=True).start()
        self._send(Idle())
        try:
            await self._over
        finally:
            settings.cancel()
            for pool in self._pools.values():
                pool.stop()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=1.0)

    # --- to the worker ------------------------------------------------------------------------------

    def _send(self, message: child_messages.ToWorker) -> None:
        with self._sending, contextlib.suppress(OSError):  # the worker is gone
            self._worker.sendall(child_messages.pack(message))

    def add(self, delivery: Delivery, outcome: Outcome) -> None:
        self._send(Settle(outcome, delivery.decided_in_transaction))
        delivery._settler.release([delivery], set())

    async def write(self, delivery: Delivery, outcome: Outcome) -> bool:
        answer = self._loop.create_future()
        self._writing.append((delivery, answer))
        self._send(Write(outcome))
        return bool(await answer)

    def flush_if_idle(self) -> None:
        """The handler has ended."""
        if self._claim is not None:
            self._claim = None
            self._ended += 1
            self._send(Idle())

    def announce(self, event: Event) -> None:
        """Send an event. One of a settle in a transaction lacks the queue, because the claim was made in the worker."""
        if self._claim is not None and isinstance(event, MessagesSettled | LeasesLost) and not event.queue:
            event = msgspec.structs.replace(event, queue=self._claim.message.queue)
        self._send(Announce(event))

    def stop(self) -> None:
        """Stop the worker."""
        self._send(StopWorker())

    def _lost(self, deliveries: Sequence[Delivery], announced: bool) -> None:
        for delivery in deliveries:
            self._send(Lost(delivery.claim.receipt, announced))

    # --- from the worker ----------------------------------------------------------------------------

    def _read(self) -> None:
        """Receive in a thread: it notices the worker's end also while a handler blocks the event loop."""
        with self._worker.makefile("rb") as file, contextlib.suppress(RuntimeError):  # the event loop was closed
            while (message := child_messages.read(file)) is not None:
                if isinstance(message, Run):
                    self._received += 1
                    self._send(Started())
                self._loop.call_soon_threadsafe(self._receive, message)
            if self._received > self._ended:
                os._exit(1)
            self._loop.call_soon_threadsafe(self._end)

    def _receive(self, message: child_messages.ToChild) -> None:
        match message:
            case Run(claim):
                self._claim = claim
                self._start(claim)
            case WriteAnswer(ours):
                delivery, answer = self._writing.popleft()
                delivery._settler.release([delivery], set() if ours else {delivery.claim.receipt})
                if not answer.done():
                    answer.set_result(ours)
            case ReceiptStale(receipt) if self._pool is not None:
                self._pool.drop_refused([receipt])
            case Interrupt() if self._pool is not None:
                self._pool.interrupt_running()

    def _start(self, claim: Claim) -> None:
        queue = claim.message.queue
        subscription = next((s for s in self._subscriptions if queue in s.queues), None)
        if subscription is None:  # the application has changed on disk: the worker gives the message back
            self.flush_if_idle()
            return
        pool = self._pools.get(subscription.queues)
        if pool is not None:
            pool.take([claim])
        else:
            pool = self._pools[subscription.queues] = self._new_pool(subscription)
            pool.take([claim])  # before it runs: an idle pool would report that the message has ended
            task = asyncio.create_task(pool.run())
            task.add_done_callback(self._end)
            self._tasks.append(task)
        self._pool = pool

    def _new_pool(self, s: Subscription) -> HandlerPool:
        assert self._transport is not None
        single = msgspec.structs.replace(s, max_workers=1, gather=0.0)
        handler = with_middleware(Handler(s.handler, batch=s.batch is not None), self._middleware)
        return HandlerPool(single, handler, self._transport, self, self._lost, self._redact, settings=self._settings)

    def _end(self, task: asyncio.Task[None] | None = None) -> None:
        """The worker has closed the socket, or a pool has failed."""
        error = None if task is None or task.cancelled() else task.exception()
        if not self._over.done():
            self._over.set_result(None) if error is None else self._over.set_exception(error)
