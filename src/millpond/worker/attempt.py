"""Attempts: handlers run, at most `max_workers` at once, and each comes to an outcome.

Each of the runners takes one message after the other, and another is woken only when a handler has to wait: one
that needs no waiting costs no task and no task switch. A handler runs in a context of its own; what it sets
there does not reach the next one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from typing import Any, Literal

from millpond.clock import monotonic
from millpond.errors import BodyNotDecodable
from millpond.message import Claim, Receipt
from millpond.outcome import (
    Ack,
    AckPolicy,
    GiveBack,
    Outcome,
    Raised,
    Reject,
    Result,
    Returned,
    decide,
    describe,
)
from millpond.retry import Retry
from millpond.transport import Transport
from millpond.worker import report
from millpond.worker.context import Rest, begin
from millpond.worker.delivery import Delivery, current
from millpond.worker.handler import Handler
from millpond.worker.settle import Settling
from millpond.worker.subscription import Subscription, seconds
from millpond.worker.threads import Threads

log = logging.getLogger("millpond.worker")

_TURN = 0.002
"""Seconds after which a runner lets the event loop do something else."""
_WATCH_EVERY = 1.0
_HALVED = 0.1
"""Seconds in which what was done loses half its weight for the rate."""
_RETURNED = Returned()


class RolledBack(Exception):
    """The handler decided within a transaction that was not committed."""


class Runner:
    """One of the places where a handler runs."""

    __slots__ = ("call", "deliveries", "interrupted", "started", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.deliveries: Sequence[Delivery] = ()
        self.started = 0.0
        self.interrupted: Literal["timeout", "lost", "stop"] | None = None
        self.call: asyncio.Future[Any] | None = None
        """What a thread is at, for synchronous handlers."""

    def interrupt(self, why: Literal["timeout", "lost", "stop"]) -> None:
        """Cancel the handler. One in a thread is told, and runs on."""
        if self.task is not None and self.interrupted is None:
            self.interrupted = why
            for delivery in self.deliveries:
                delivery.interrupted = True
            self.task.cancel()


class Attempts:
    """The handlers of one subscription, and all its messages that are claimed and not yet settled."""

    def __init__(
        self,
        subscription: Subscription,
        handler: Handler,
        transport: Transport,
        settling: Settling,
        lost: Callable[[Sequence[Delivery], bool], None],
    ) -> None:
        self.subscription = subscription
        self.transport = transport
        self.loop = asyncio.get_running_loop()
        self.keep_acked = subscription.keep_acked
        self.keep_rejected = subscription.keep_rejected
        self.write = settling.write
        self.held: set[Delivery] = set()
        """Everything claimed and not yet settled."""
        self.running = 0
        """Messages whose handler runs."""
        self.stuck = 0
        """Runners whose thread runs on after its time was over."""
        self.taken = 0
        """Messages handed to runners, so far."""
        self.freed = asyncio.Event()
        """Set when something was settled, or a runner has nothing to do."""
        self._handler = handler
        self._settling = settling
        self._lost = lost
        self._ready: deque[Delivery] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._arrived = asyncio.Event()
        self._runners = [Runner() for _ in range(subscription.max_workers)]
        self._threads = None if self._handler.is_async else Threads(f"millpond-{subscription.name}")
        self._stopping = False
        self._torn_down = False
        self._watched = monotonic()
        """When the event loop last came round to look for handlers that take too long."""
        self._lately = (0.0, monotonic())
        # Read once: they are asked for with every message.
        self._name = subscription.name
        self._batch = subscription.batch
        self._gather = seconds(subscription.gather)
        self._ack_first = subscription.ack_policy is AckPolicy.ACK_FIRST
        self._ack_returned = subscription.ack_policy is not AckPolicy.MANUAL

    # --- for the claim loop -------------------------------------------------------------------------

    @property
    def unstarted(self) -> int:
        return len(self._ready)

    def hold(self, claim: Claim) -> Delivery:
        """Keep a message's lease from now on, without running it yet."""
        delivery = Delivery(claim, self)
        self.held.add(delivery)
        return delivery

    def take(self, claims: Sequence[Claim]) -> None:
        """Let these run as soon as there is a runner for them."""
        self.start([self.hold(claim) for claim in claims])

    def start(self, deliveries: Sequence[Delivery]) -> None:
        self._ready.extend(deliveries)
        if self._stopping:
            self._give_back()
        elif deliveries:
            self._arrived.set()
            self._wake_one()

    def settled(self, deliveries: Sequence[Delivery], refused: set[Receipt]) -> None:
        """Outcomes were written; those with a stale receipt were refused."""
        if refused:
            late = [d for d in deliveries if d.claim.receipt in refused and d in self.held and not d.within]
            for delivery in late:
                delivery.lost = True
            if late:
                self._lost(late, True)
        self.held.difference_update(deliveries)
        self._lately = (self._faded() + len(deliveries), monotonic())
        self.freed.set()

    @property
    def rate(self) -> float:
        """Messages per second, of late."""
        return self._faded() * math.log(2) / _HALVED

    def _faded(self) -> float:
        """What was done, the less of it the longer ago it is."""
        done, at = self._lately
        return float(done * 0.5 ** ((monotonic() - at) / _HALVED))

    # --- for the heartbeat --------------------------------------------------------------------------

    def to_extend(self) -> list[Receipt]:
        """Receipts whose lease shall be lengthened: all that is held, less what has run for too long.

        Asked from the heartbeat's thread. Nothing, when a handler blocks the event loop for too long: what waits
        to be started or settled here would wait for ever.
        """
        timeout = self.subscription.timeout_s
        hung: set[Delivery] = set()
        if timeout is not None:
            limit = monotonic() - timeout
            if timeout and not self._torn_down and self._watched < limit - _WATCH_EVERY:
                return []
            for runner in self._runners:
                deliveries, started = runner.deliveries, runner.started
                if deliveries and started < limit:
                    hung.update(deliveries)
        return [d.claim.receipt for d in list(self.held) if not d.lost and d not in hung]

    def refused(self, receipts: Sequence[Receipt]) -> None:
        """No longer to be extended: settled in the meantime, or lost. Handlers of the lost ones are told."""
        stale = set(receipts)
        lost = []
        for delivery in [d for d in self.held if d.claim.receipt in stale]:
            if delivery.within:
                self.held.discard(delivery)  # its transaction was committed while the handler runs on
            elif not delivery.concluded and delivery.decided is None:  # of the others the settle loop hears itself
                delivery.lost = True
                lost.append(delivery)
                self.held.discard(delivery)
                if delivery in self._ready:
                    self._ready.remove(delivery)
        if not lost:
            return
        self._lost(lost, False)
        self.freed.set()
        if self.subscription.cancel_lost:
            for runner in self._runners:
                if runner.deliveries and all(d.lost for d in runner.deliveries):
                    runner.interrupt("lost")

    # --- running ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until stopped: all runners, and a watch over those that take too long."""
        watch = asyncio.create_task(self._watch()) if self.subscription.timeout_s else None
        tasks = []
        for runner in self._runners:
            runner.task = asyncio.create_task(self._run(runner))
            tasks.append(runner.task)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._torn_down = True
            for task in [*tasks, *([watch] if watch else [])]:
                task.cancel()
            if self._threads is not None:
                self._threads.end()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()  # a runner that broke is told, not hidden

    def stop(self) -> None:
        """Start nothing more: what waits goes back as if it had never been claimed."""
        self._stopping = True
        self._give_back()
        self._arrived.set()
        while self._idle:
            self._wake_one()

    def abandon(self) -> None:
        """The grace period is over: interrupt what still runs. Its deliveries count, its attempts do not."""
        for runner in self._runners:
            runner.interrupt("stop")

    def _give_back(self) -> None:
        while self._ready:
            self.give_back(self._ready.popleft())

    def give_back(self, delivery: Delivery, *, delivered: bool = False) -> None:
        delivery.concluded = True
        self._settling.add(delivery, GiveBack(delivery.claim.receipt, delivered))

    def _drop(self, delivery: Delivery) -> None:
        """Another worker has it: there is nothing to settle."""
        delivery.concluded = True
        if delivery in self.held:  # the handler was the first to hear of it, in its own transaction
            self._lost([delivery], True)
            self.held.discard(delivery)
        self.freed.set()

    def _wake_next(self) -> None:
        """A handler has to wait: let another one begin."""
        if self._ready:
            self._wake_one()

    def _wake_one(self) -> None:
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return

    async def _run(self, runner: Runner) -> None:
        turn = monotonic()
        ready = self._ready
        while not self._stopping:
            if not ready:
                idle = self.loop.create_future()
                self._idle.append(idle)
                self.freed.set()
                await idle
                turn = monotonic()
                continue
            now = monotonic()
            if now - turn > _TURN:
                await asyncio.sleep(0)
                turn = monotonic()
                continue
            if self._batch is None:
                runner.deliveries = (ready.popleft(),)
            else:
                if self._gather and len(ready) < self._batch:
                    await self._gathered(self._batch)
                runner.deliveries = self._next_batch(self._batch)
                if not runner.deliveries:
                    continue
            count = len(runner.deliveries)
            runner.started = now
            self.running += count
            self.taken += count
            try:
                await self._attempt(runner)
            except asyncio.CancelledError:
                if runner.interrupted is None:
                    raise
                self._interrupted(runner)
            finally:
                self.running -= count
                runner.deliveries = ()
            if runner.interrupted is not None:
                await self._recover(runner)

    def _next_batch(self, most: int) -> tuple[Delivery, ...]:
        """The next ones to run together. What failed before runs alone: poison fails its neighbours once, not until
        their retries are used up."""
        ready = self._ready
        batch: list[Delivery] = []
        while ready and len(batch) < most:
            failed_before = ready[0].claim.attempts > 0
            if failed_before and batch:
                break
            batch.append(ready.popleft())
            if failed_before:
                break
        return tuple(batch)

    async def _gathered(self, most: int) -> None:
        """Wait until a whole batch is there, or the time to gather it is over."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(self._gather):
                while len(self._ready) < most and not self._stopping:
                    await self._arrived.wait()
                    self._arrived.clear()
        except TimeoutError:
            return

    def _interrupted(self, runner: Runner) -> None:
        """What an interruption comes to."""
        if runner.interrupted == "timeout":
            error = TimeoutError(f"the handler ran longer than {self.subscription.timeout_s:g} s")
            self._conclude(runner, runner.deliveries, Raised(error))
            return
        for delivery in runner.deliveries:
            if delivery.lost:
                self._drop(delivery)
            elif delivery in self.held and (delivery.decided is None or delivery.within):
                self.give_back(delivery, delivered=True)

    async def _recover(self, runner: Runner) -> None:
        """Make a runner fit for the next message, once its thread has come to an end."""
        call, runner.call, runner.interrupted = runner.call, None, None
        _uncancel(runner)
        self.freed.set()
        if call is None or call.done() or self._stopping:
            return
        log.warning("a thread of %s runs on after its handler was given up", self.subscription.name)
        self.stuck += 1
        try:
            await asyncio.wait([call])
        finally:
            self.stuck -= 1

    async def _attempt(self, runner: Runner) -> None:
        handler = self._handler
        decode = self._handler.decode
        try:
            for delivery in runner.deliveries:
                delivery.body = decode(delivery.claim.message)
        except Exception:  # a decoder of the user's types may raise anything
            runner.deliveries = self._decodable(runner.deliveries)
            if not runner.deliveries:
                return
        if self._ack_first:
            runner.deliveries = await self._acked(runner.deliveries)
            if not runner.deliveries:
                return
        context = copy_context()
        first: Delivery | None = runner.deliveries[0]
        arguments: Sequence[Any]
        if handler.batch:
            arguments, first = handler.arguments([d.body for d in runner.deliveries], runner.deliveries), None
        else:
            arguments = (delivery.body,) if handler.only_body else handler.arguments(delivery.body, delivery)
        result: Result = _RETURNED
        try:
            if self._threads is None:
                await self._in_context(handler.function(*arguments), context, first)
            else:
                await self._in_thread(runner, self._threads, context, first, arguments)
        except asyncio.CancelledError:
            if runner.interrupted is not None or self._torn_down:
                raise
            _uncancel(runner)
            result = Raised(asyncio.CancelledError("the handler cancelled itself"))
        except (Exception, SystemExit) as e:
            result = Raised(e)
        if runner.interrupted is None:
            self._conclude(runner, runner.deliveries, result)
        else:  # however it took that
            self._interrupted(runner)

    async def _in_context(self, coroutine: Coroutine[Any, Any, Any], context: Context, delivery: Any) -> None:
        try:
            future = context.run(begin, coroutine, delivery)
        except StopIteration:
            return
        self._wake_next()
        await Rest(coroutine, context, future)

    async def _in_thread(
        self, runner: Runner, threads: Threads, context: Context, delivery: Delivery | None, arguments: Any
    ) -> None:
        self._wake_next()
        context.run(current.set, delivery)
        runner.call = threads.call(lambda: context.run(self._handler.function, *arguments))
        value = await asyncio.shield(runner.call)
        runner.call = None
        if inspect.iscoroutine(value):  # a decorator hid that the function is async
            await self._in_context(value, context, delivery)

    def _decodable(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Those whose body is what the handler wants; each of the others fails alone."""
        good = []
        for delivery in deliveries:
            try:
                delivery.body = self._handler.decode(delivery.claim.message)
            except Exception as e:
                report.undecodable(delivery)
                delivery.concluded = True
                error = str(e) if isinstance(e, BodyNotDecodable) else describe(e)
                reject = Reject(delivery.claim.receipt, "undecodable body", error, keep=self.keep_rejected)
                self._settling.add(delivery, reject)
            else:
                good.append(delivery)
        return good

    async def _acked(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Ack before running: those that were still ours."""
        for delivery in deliveries:
            delivery.decided = Ack(delivery.claim.receipt, self.keep_acked)
        self._wake_next()
        written = await asyncio.gather(*(self.write(d, d.decided) for d in deliveries if d.decided is not None))
        return [delivery for delivery, ours in zip(deliveries, written, strict=True) if ours]

    def _conclude(self, runner: Runner, deliveries: Sequence[Delivery], result: Result) -> None:
        name, trace = self._name, self._batch is None  # a batch tells its error once
        if not trace and isinstance(result, Raised):
            report.batch_failed(name, len(deliveries), result.error)
        for delivery in deliveries:
            delivery.concluded = True
            if result is _RETURNED and self._ack_returned and delivery.decided is None and not delivery.lost:
                self._settling.add(delivery, Ack(delivery.claim.receipt, self.keep_acked))
            elif delivery.lost:
                self._drop(delivery)
                report.failed(name, delivery, result, "its lease was lost", logging.WARNING, trace=trace)
            elif delivery.decided is not None and not delivery.within:
                report.failed(name, delivery, result, "decided before it raised", logging.ERROR, trace=trace)
            elif delivery in self.held:
                self._settle(delivery, result, monotonic() - runner.started)

    def _settle(self, delivery: Delivery, result: Result, elapsed: float) -> None:
        name, trace = self._name, self._batch is None
        if delivery.within:
            what = "raised after a decision in its transaction"
            report.failed(name, delivery, result, what, logging.ERROR, trace=trace)
            if not isinstance(result, Raised):
                result = Raised(RolledBack("the transaction with the handler's decision was not committed"))
            self._settling.add(delivery, self._decide(delivery, result, elapsed))
        else:
            outcome = self._decide(delivery, result, elapsed)
            self._settling.add(delivery, outcome)
            report.failed_with(name, delivery, result, outcome, trace=trace)

    def _decide(self, delivery: Delivery, result: Result, elapsed: float) -> Outcome:
        s = self.subscription
        try:
            return decide(
                delivery.claim,
                result,
                policy=s.ack_policy,
                retry=s.retry,
                elapsed=elapsed,
                keep_acked=s.keep_acked,
                keep_rejected=s.keep_rejected,
            )
        except Exception:  # an exception that cannot tell its text, or types in Retry.never that are none
            log.exception("the retry policy cannot decide on message %s", delivery.id, extra=report.fields(delivery))
            error = RuntimeError("the retry policy failed; its error is in the worker's log")
            return decide(delivery.claim, Raised(error), retry=Retry(), keep_rejected=s.keep_rejected)

    async def _watch(self) -> None:
        timeout = self.subscription.timeout_s
        assert timeout is not None
        while True:
            await asyncio.sleep(min(_WATCH_EVERY, max(timeout / 10, 0.01)))
            self._watched = monotonic()
            limit = self._watched - timeout
            for runner in self._runners:
                if runner.deliveries and runner.started < limit:
                    runner.interrupt("timeout")


def _uncancel(runner: Runner) -> None:
    while runner.task is not None and runner.task.cancelling():
        runner.task.uncancel()
