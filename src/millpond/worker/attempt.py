"""Attempts: handlers run, at most `max_workers` at once, and each comes to an outcome.

Each of the runners takes one message after the other, so that a handler that needs no waiting costs no task
switch. A handler runs in a context of its own; what it sets there does not reach the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any

from millpond.clock import monotonic
from millpond.errors import BodyNotDecodable
from millpond.message import Claim, Receipt
from millpond.outcome import (
    Ack,
    AckPolicy,
    GiveBack,
    NackMessage,
    Outcome,
    Raised,
    Reject,
    RejectMessage,
    Result,
    Returned,
    decide,
    describe,
)
from millpond.transport import Transport
from millpond.worker.delivery import Delivery, current
from millpond.worker.handler import Handler
from millpond.worker.settle import Settling
from millpond.worker.subscription import Subscription

log = logging.getLogger("millpond.worker")

_TURN = 0.002
"""Seconds after which a runner lets the event loop do something else."""


class RolledBack(Exception):
    """The handler acked within a transaction that was not committed."""


class Runner:
    """One of the places where a handler runs."""

    __slots__ = ("deliveries", "lost", "started", "task", "timed_out")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.deliveries: Sequence[Delivery] = ()
        self.started = 0.0
        self.timed_out = False
        self.lost = False

    def interrupt(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Attempts:
    """The handlers of one subscription."""

    def __init__(self, subscription: Subscription, transport: Transport, settling: Settling) -> None:
        self.subscription = subscription
        self.held: dict[Any, Delivery] = {}
        """By id: everything claimed and not yet settled."""
        self.running = 0
        self.freed = asyncio.Event()
        """Set when there is room again for a claim."""
        self.rate = 0.0
        """Messages per second, of late."""
        self._handler = Handler(subscription.handler, batch=subscription.batch is not None)
        self._transport = transport
        self._settling = settling
        self._ready: deque[Delivery] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._runners = [Runner() for _ in range(subscription.max_workers)]
        self._threads: ThreadPoolExecutor | None = None
        if not self._handler.is_async:
            self._threads = ThreadPoolExecutor(subscription.max_workers, f"millpond-{subscription.name}")
        self._stopping = False
        self._done = 0
        self._measured = (monotonic(), 0)

    # --- for the claim loop -------------------------------------------------------------------------

    @property
    def unstarted(self) -> int:
        return len(self._ready)

    def take(self, claims: Sequence[Claim]) -> None:
        """Let these run as soon as there is a runner for them."""
        keep = (self.subscription.keep_acked, self.subscription.keep_rejected)
        transport, write = self._transport, self._settling.write
        for claim in claims:
            delivery = Delivery(claim, transport, write, keep)
            self.held[claim.receipt.id] = delivery
            self._ready.append(delivery)
        for _ in range(min(len(self._idle), len(claims))):
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)

    def settled(self, receipt: Receipt, stale: bool) -> bool:
        """An outcome was written, or refused; False if the message is not one of ours."""
        delivery = self.held.get(receipt.id)
        if delivery is None or delivery.claim.receipt != receipt:
            return False
        del self.held[receipt.id]
        self._done += 1
        if stale:
            delivery.lost = True
        self.freed.set()
        return True

    def measure(self) -> None:
        """Look at the clock, and at what was done since the last look."""
        now = monotonic()
        then, done = self._measured
        if now - then >= 0.05:
            rate = (self._done - done) / (now - then)
            self.rate = rate if rate > self.rate else 0.7 * self.rate + 0.3 * rate
            self._measured = (now, self._done)

    # --- running ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until stopped: all runners, and a watch over those that take too long."""
        async with asyncio.TaskGroup() as group:
            tasks = []
            for runner in self._runners:
                runner.task = group.create_task(self._run(runner))
                tasks.append(runner.task)
            watch = group.create_task(self._watch()) if self.subscription.timeout_s else None
            await asyncio.wait(tasks)
            if watch is not None:
                watch.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Start nothing more: what waits goes back as if it had never been claimed."""
        self._stopping = True
        while self._ready:
            self._settling.add(GiveBack(self._ready.popleft().claim.receipt))
        for idle in self._idle:
            if not idle.done():
                idle.set_result(None)

    def abandon(self) -> None:
        """The grace period is over: interrupt what still runs. Its deliveries count, its attempts do not."""
        for runner in self._runners:
            runner.interrupt()

    def lose(self, receipts: Sequence[Receipt]) -> None:
        """These leases are lost; their handlers are told, and interrupted if so wished."""
        for receipt in receipts:
            delivery = self.held.get(receipt.id)
            if delivery is None or delivery.claim.receipt != receipt:
                continue
            delivery.lost = True
            for runner in self._runners:
                if delivery in runner.deliveries and self.subscription.cancel_lost and len(runner.deliveries) == 1:
                    runner.lost = True
                    runner.interrupt()

    def to_extend(self) -> list[Receipt]:
        """Receipts whose lease shall be lengthened: all that is held, less what has run for too long."""
        timeout = self.subscription.timeout_s
        hung: set[int] = set()
        if timeout is not None:
            limit = monotonic() - timeout
            hung = {id(d) for r in self._runners if r.deliveries and r.started < limit for d in r.deliveries}
        return [d.claim.receipt for d in list(self.held.values()) if not d.lost and id(d) not in hung]

    async def _run(self, runner: Runner) -> None:
        turn = monotonic()
        while not self._stopping:
            if not self._ready:
                idle = asyncio.get_running_loop().create_future()
                self._idle.append(idle)
                self.freed.set()
                await idle
                turn = monotonic()
                continue
            now = runner.started = monotonic()
            if now - turn > _TURN:
                await asyncio.sleep(0)
                turn = monotonic()
                continue
            batch = self.subscription.batch
            if batch is None:
                runner.deliveries = (self._ready.popleft(),)
            else:
                runner.deliveries = tuple(self._ready.popleft() for _ in range(min(batch, len(self._ready))))
            self.running += 1
            try:
                await self._attempt(runner)
            except asyncio.CancelledError:
                if not self._interrupted(runner):
                    raise
            finally:
                self.running -= 1
                runner.deliveries = ()
                runner.timed_out = runner.lost = False

    def _interrupted(self, runner: Runner) -> bool:
        """What an interruption comes to; False when the whole worker is being torn down by others."""
        if runner.task is None:
            return False
        if runner.timed_out:
            error = TimeoutError(f"the handler ran longer than {self.subscription.timeout_s:g} s")
            self._conclude(runner, runner.deliveries, Raised(error))
        elif self._stopping:
            for delivery in runner.deliveries:
                self._settling.add(GiveBack(delivery.claim.receipt, delivered=True))
        elif runner.lost:
            for delivery in runner.deliveries:
                self.held.pop(delivery.id, None)
        else:
            return False
        runner.task.uncancel()
        return True

    async def _attempt(self, runner: Runner) -> None:
        handler, policy = self._handler, self.subscription.ack_policy
        deliveries = self._decoded(runner.deliveries)
        if not deliveries:
            return
        if policy is AckPolicy.ACK_FIRST:
            for delivery in deliveries:
                if not await self._settling.write(Ack(delivery.claim.receipt, self.subscription.keep_acked)):
                    return
        context = copy_context()
        if handler.batch:
            arguments = handler.arguments([d.body for d in deliveries], deliveries)
        else:
            context.run(current.set, deliveries[0])
            arguments = handler.arguments(deliveries[0].body, deliveries[0])
        result: Result
        try:
            if self._threads is None:
                await _InContext(handler.function(*arguments), context)
            else:
                loop = asyncio.get_running_loop()
                for delivery in deliveries:
                    delivery.bind(loop)
                await loop.run_in_executor(self._threads, lambda: context.run(handler.function, *arguments))
            result = _RETURNED
        except asyncio.CancelledError:
            if runner.task is not None and runner.task.cancelling():
                raise
            result = Raised(asyncio.CancelledError("the handler cancelled itself"))
        except Exception as e:
            result = Raised(e)
            if not isinstance(e, NackMessage | RejectMessage):
                log.exception(
                    "handler %s failed on message %s of %r (attempt %d)",
                    self.subscription.name,
                    deliveries[0].id,
                    deliveries[0].queue,
                    deliveries[0].attempt,
                )
        if policy is not AckPolicy.ACK_FIRST:
            self._conclude(runner, deliveries, result)

    def _decoded(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Those whose body is what the handler wants; each of the others fails alone."""
        good = []
        for delivery in deliveries:
            try:
                delivery.body = self._handler.decode(delivery)
            except BodyNotDecodable as e:
                reason = "undecodable body"
                self._settling.add(
                    Reject(delivery.claim.receipt, reason, describe(e), keep=self.subscription.keep_rejected)
                )
            else:
                good.append(delivery)
        return good

    def _conclude(self, runner: Runner, deliveries: Sequence[Delivery], result: Result) -> None:
        subscription = self.subscription
        elapsed = monotonic() - runner.started
        for delivery in deliveries:
            if delivery.lost:
                self.held.pop(delivery.id, None)
                self.freed.set()
                continue
            if delivery.decided is not None and not delivery.within:
                continue  # by hand, and already written
            if delivery.within:
                # Committed, the message is gone and this is refused. Still ours, it was rolled back, and the
                # retry policy decides.
                error = result.error if isinstance(result, Raised) else RolledBack("the transaction was rolled back")
                self._settling.add(self._decide(delivery.claim, Raised(error), elapsed))
                continue
            if result is _RETURNED and subscription.ack_policy is not AckPolicy.MANUAL:
                self._settling.add(Ack(delivery.claim.receipt, subscription.keep_acked))
            else:
                self._settling.add(self._decide(delivery.claim, result, elapsed))

    def _decide(self, claim: Claim, result: Result, elapsed: float) -> Outcome:
        return decide(
            claim,
            result,
            policy=self.subscription.ack_policy,
            retry=self.subscription.retry,
            elapsed=elapsed,
            keep_acked=self.subscription.keep_acked,
            keep_rejected=self.subscription.keep_rejected,
        )

    async def _watch(self) -> None:
        timeout = self.subscription.timeout_s
        assert timeout is not None
        while True:
            await asyncio.sleep(min(1.0, max(timeout / 10, 0.01)))
            limit = monotonic() - timeout
            for runner in self._runners:
                if runner.deliveries and runner.started < limit and not runner.timed_out:
                    runner.timed_out = True
                    runner.interrupt()


_RETURNED = Returned()


class _InContext:
    """A coroutine that runs in a context of its own, without a task of its own."""

    __slots__ = ("_context", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: Context) -> None:
        self._coroutine = coroutine
        self._context = context

    def __await__(self) -> Generator[Any, Any, Any]:
        run, send, throw = self._context.run, self._coroutine.send, self._coroutine.throw
        step: Callable[..., Any] = send
        value: Any = None
        while True:
            try:
                future = run(step, value)
            except StopIteration as stop:
                return stop.value
            try:
                value = yield future
                step = send
            except BaseException as e:
                value, step = e, throw
