"""Attempts: handlers run, at most `max_workers` at once, and each comes to an outcome.

Each of the runners takes one message after the other: a handler that needs no waiting costs no task and no task
switch. A handler runs in a context of its own; what it sets there does not reach the next one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Sequence
from contextvars import Context, copy_context
from typing import Any

from millpond.clock import monotonic
from millpond.message import Claim, Receipt
from millpond.outcome import AckPolicy
from millpond.transport import Transport
from millpond.worker.conclude import Concluding, Lost
from millpond.worker.context import Rest, begin
from millpond.worker.delivery import Delivery, current
from millpond.worker.handler import Handler
from millpond.worker.ready import Ready
from millpond.worker.runner import Runner
from millpond.worker.settle import Settling
from millpond.worker.subscription import Subscription, seconds
from millpond.worker.threads import Threads

log = logging.getLogger("millpond.worker")

_TURN = 0.002
"""Seconds after which a runner lets the event loop do something else."""
_WATCH_EVERY = 1.0
_HALVED = 0.1
"""Seconds in which what was done loses half its weight for the rate."""


class Attempts:
    """The handlers of one subscription, and all its messages that are claimed and not yet settled."""

    def __init__(
        self,
        subscription: Subscription,
        handler: Handler,
        transport: Transport,
        settling: Settling,
        lost: Lost,
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
        self._concluding = Concluding(subscription, settling, self.held, self.freed, lost)
        self._ready = Ready()
        self._runners = [Runner() for _ in range(subscription.max_workers)]
        self._threads = None if handler.is_async else Threads(f"millpond-{subscription.name}")
        self._stopping = False
        self._torn_down = False
        self._watched = monotonic()
        """When the event loop last came round to look for handlers that take too long."""
        self._lately = (0.0, monotonic())
        self._batch = subscription.batch
        self._gather = seconds(subscription.gather)
        self._ack_first = subscription.ack_policy is AckPolicy.ACK_FIRST
        self._at_once = handler.is_async and not self._ack_first
        """Nothing is to be awaited before a handler begins."""

    # --- for the claim loop -------------------------------------------------------------------------

    @property
    def unstarted(self) -> int:
        return len(self._ready.deliveries)

    def hold(self, claim: Claim) -> Delivery:
        """Keep a message's lease from now on, without running it yet."""
        delivery = Delivery(claim, self)
        self.held.add(delivery)
        return delivery

    def take(self, claims: Sequence[Claim]) -> None:
        """Let these run as soon as there is a runner for them."""
        deliveries = [Delivery(claim, self) for claim in claims]
        self.held.update(deliveries)
        self.start(deliveries)

    def start(self, deliveries: Sequence[Delivery]) -> None:
        self._ready.add(deliveries)
        if self._stopping:
            self._give_back()

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
        if not lost:
            return
        self._ready.drop(lost)
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
        self._ready.close()

    def abandon(self) -> None:
        """The grace period is over: interrupt what still runs. Its deliveries count, its attempts do not."""
        for runner in self._runners:
            runner.interrupt("stop")

    def _give_back(self) -> None:
        waiting = self._ready.deliveries
        while waiting:
            self._concluding.give_back(waiting.popleft())

    async def _run(self, runner: Runner) -> None:
        turn = monotonic()
        ready = self._ready.deliveries
        while not self._stopping:
            if not ready:
                self.freed.set()
                self._settling.nothing_more()
                await self._ready.some()
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
                    await self._ready.gathered(self._batch, self._gather)
                runner.deliveries = self._ready.batch(self._batch)
                if not runner.deliveries:
                    continue
            count = len(runner.deliveries)
            runner.started = now
            self.running += count
            self.taken += count
            try:
                rest = self._begin(runner)
                if rest is not None:
                    await rest
                    turn = monotonic()
            except asyncio.CancelledError:
                if runner.interrupted is None:
                    raise
                self._interrupted(runner)
            finally:
                self.running -= count
                runner.deliveries = ()
            if runner.interrupted is not None:
                await self._recover(runner)

    def _begin(self, runner: Runner) -> Awaitable[None] | None:
        """Begin to handle what a runner has; None, when that was all: most handlers never wait."""
        handler = self._handler
        try:
            for delivery in runner.deliveries:
                delivery.body = handler.decode(delivery.claim.message)
        except Exception:  # a decoder of the user's types may raise anything
            runner.deliveries = self._decodable(runner.deliveries)
            if not runner.deliveries:
                return None
        if not self._at_once:
            return self._attempt(runner)
        context = copy_context()
        arguments, first = self._arguments(runner)
        try:
            coroutine = handler.function(*arguments)
            future = context.run(begin, coroutine, first)
        except StopIteration:
            self._concluding.returned(runner.deliveries)
        except (Exception, SystemExit, asyncio.CancelledError) as e:
            self._raised(runner, e)
        else:
            self._ready.wake()
            return self._conclude(runner, Rest(coroutine, context, future))
        return None

    def _arguments(self, runner: Runner) -> tuple[Sequence[Any], Delivery | None]:
        """What the handler is called with, and the delivery that is then the current one; None for a batch."""
        handler, deliveries = self._handler, runner.deliveries
        if handler.batch:
            return handler.arguments([d.body for d in deliveries], deliveries), None
        (delivery,) = deliveries
        return (delivery.body,) if handler.only_body else handler.arguments(delivery.body, delivery), delivery

    async def _attempt(self, runner: Runner) -> None:
        """What has to wait before it begins: for its ack, or a thread."""
        if self._ack_first:
            self._ready.wake()
            runner.deliveries = await self._concluding.acked(runner.deliveries)
            if not runner.deliveries:
                return
        context = copy_context()
        arguments, first = self._arguments(runner)
        if self._threads is not None:
            await self._conclude(runner, self._in_thread(runner, self._threads, context, first, arguments))
        else:
            await self._conclude(runner, self._in_context(self._handler.function(*arguments), context, first))

    async def _conclude(self, runner: Runner, rest: Awaitable[None]) -> None:
        try:
            await rest
        except (Exception, SystemExit, asyncio.CancelledError) as e:
            if isinstance(e, asyncio.CancelledError) and (runner.interrupted is not None or self._torn_down):
                raise
            if runner.interrupted is None:
                self._raised(runner, e)
                return
        if runner.interrupted is None:
            self._concluding.returned(runner.deliveries)
        else:  # however it took that
            self._interrupted(runner)

    def _raised(self, runner: Runner, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            runner.uncancel()
            error = asyncio.CancelledError("the handler cancelled itself")
        self._concluding.raised(runner.deliveries, error, monotonic() - runner.started)

    def _interrupted(self, runner: Runner) -> None:
        """What an interruption comes to."""
        if runner.interrupted == "timeout":
            error = TimeoutError(f"the handler ran longer than {self.subscription.timeout_s:g} s")
            self._concluding.raised(runner.deliveries, error, monotonic() - runner.started)
        else:
            self._concluding.interrupted(runner.deliveries)

    async def _recover(self, runner: Runner) -> None:
        """Make a runner fit for the next message, once its thread has come to an end."""
        call, runner.call, runner.interrupted = runner.call, None, None
        runner.uncancel()
        self.freed.set()
        if call is None or call.done() or self._stopping:
            return
        log.warning("a thread of %s runs on after its handler was given up", self.subscription.name)
        self.stuck += 1
        try:
            await asyncio.wait([call])
        finally:
            self.stuck -= 1

    async def _in_context(self, coroutine: Any, context: Context, delivery: Delivery | None) -> None:
        try:
            future = context.run(begin, coroutine, delivery)
        except StopIteration:
            return
        self._ready.wake()
        await Rest(coroutine, context, future)

    async def _in_thread(
        self, runner: Runner, threads: Threads, context: Context, delivery: Delivery | None, arguments: Any
    ) -> None:
        self._ready.wake()
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
                self._concluding.undecodable(delivery, e)
            else:
                good.append(delivery)
        return good

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
