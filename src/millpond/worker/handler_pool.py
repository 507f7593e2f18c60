"""Run handlers, at most `max_workers` at once, and settle their results.

Each slot takes one message after the other: a handler costs no task, and no task switch if it never waits. A handler
runs in its own context; variables that it sets there do not reach the next one. A slot continues in a new task after a
handler that was cancelled or left a reference to its task: a late cancel of that task reaches no other message, and
neither does state that a library keeps for each task.

`_run`: the loop of a slot; takes messages and calls `_begin` for each.
`_begin`: decodes, and runs an async handler up to its first wait. Most handlers end there.
`_run_deferred`: a handler that starts after an await, in a thread or, by `_run_in_context`, in this task.
`_finish`: waits for the rest of either one and settles the result.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

from millpond.clock import Seconds, monotonic, seconds
from millpond.message import Claim, Receipt
from millpond.outcome import DECISIONS, AckPolicy, Outcome, Raised
from millpond.redaction import Redact
from millpond.seam.transport import Transport
from millpond.worker.delivery import Delivery, current, in_batch
from millpond.worker.handler import Handler
from millpond.worker.queue_settings import Settings
from millpond.worker.results import OnError, OnLost, OutcomeSink, Results
from millpond.worker.run_queue import HandlerSlot, RunQueue
from millpond.worker.stepping import RemainingSteps, first_step
from millpond.worker.subscription import Subscription
from millpond.worker.threads import Threads

log = logging.getLogger("millpond.worker")

_YIELD_AFTER = 0.002
"""Seconds after which a slot yields to the event loop."""
_WATCH_EVERY = 1.0
_TOKENS = 1000
"""Number of tokens that a pool may keep beside those of held messages."""
_HALF_LIFE = 0.1
"""Half-life in seconds of a settled message in the rate."""
_STALLED_AFTER = 3.0
"""Seconds without a start after which messages that wait to be started go back, to be handled by another worker."""
_UNWIND = 2.0
"""Seconds for a handler to end after its timeout, before it counts as stuck."""
_REPLACE_AFTER = 1.0
"""Seconds until a slot that ended with an error is replaced. If all end within this time, the worker ends."""


class HandlerPool:
    """The handlers of one subscription, and all its messages that are claimed and not yet settled."""

    def __init__(
        self,
        subscription: Subscription,
        handler: Handler,
        transport: Transport,
        settle_loop: OutcomeSink,
        on_lost: OnLost,
        redact: Redact,
        on_error: OnError | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.subscription = subscription
        self.settings = settings or Settings()
        self.transport = transport
        self.loop = asyncio.get_running_loop()
        self.keep_acked = subscription.keep_acked
        self.keep_rejected = subscription.keep_rejected
        self.redact = redact
        self.write = settle_loop.write
        self.held: set[Delivery] = set()
        """Claimed and not yet settled."""
        self.apart: dict[Delivery, Callable[[], None] | None] = {}
        """Held messages that run in child processes, with a call for a receipt that is refused meanwhile."""
        self._abandoned: deque[Delivery] = deque()
        self._tokens: set[int] = set()
        """Tokens of held messages, and of some that were settled."""
        self.running = 0
        """Messages whose handler runs."""
        self.stuck = 0
        """Slots whose thread runs on after its timeout."""
        self.stuck_since: float | None = None
        """Time since which no slot is free because all handlers hang beyond their timeout."""
        self.started_count = 0
        """Number of messages given to slots so far."""
        self.freed = asyncio.Event()
        """Set when a message was settled or a slot is idle."""
        self._handler = handler
        self._settle_loop = settle_loop
        self._on_lost = on_lost
        self._results = Results(subscription, settle_loop, self.held, self.freed, on_lost, redact, on_error, self.of)
        self._run_queue = RunQueue()
        self._slots = [HandlerSlot() for _ in range(subscription.max_workers)]
        self._living = 0
        """Number of slots whose task has not ended."""
        self._over: asyncio.Future[None] = self.loop.create_future()
        """Done when no slot is left: after a stop, or with the error of the last one."""
        self._threads = None if handler.is_async else Threads(f"millpond-{subscription.name}")
        self._stopping = False
        self._torn_down = False
        self._last_watch = monotonic()
        """The last time at which the event loop checked for handlers that exceed their timeout."""
        self._recent = (0.0, monotonic())
        self._batch = subscription.batch
        self._gather = seconds(subscription.gather)
        self._ack_first = subscription.ack_policy is AckPolicy.ACK_FIRST
        self._starts_at_once = handler.is_async and not self._ack_first
        """A handler can start without an await."""

    def of(self, queue: str) -> Subscription:
        """The subscription with the settings of this queue."""
        return self.settings.of(self.subscription, queue)

    @property
    def shortest(self) -> Subscription:
        """The subscription with the shortest lease of its queues."""
        return self.settings.shortest(self.subscription)

    def nacked(self, delivery: Delivery, delay: Seconds | None, error: str | None) -> Outcome:
        started = next((slot.started for slot in self._slots if delivery in slot.deliveries), None)
        return self._results.nacked(delivery, delay, error, 0.0 if started is None else monotonic() - started)

    # --- for the claim loop -------------------------------------------------------------------------

    @property
    def unstarted(self) -> int:
        return len(self._run_queue.deliveries)

    def hold(self, claims: Sequence[Claim]) -> list[Delivery]:
        """Keep the leases of messages that run in child processes. A receipt that is held already is refused."""
        deliveries = [Delivery(claim, self) for claim in self._not_held(claims)]
        self.held.update(deliveries)
        self.apart.update(dict.fromkeys(deliveries))
        return deliveries

    def take(self, claims: Sequence[Claim]) -> None:
        """Run these as soon as slots are free. A receipt that is held already is refused."""
        deliveries = [Delivery(claim, self) for claim in self._not_held(claims)]
        self.held.update(deliveries)
        self._run_queue.add(deliveries)
        if self._stopping:
            self._give_back_unstarted()

    def _not_held(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """The claims whose receipts are new here: no handler runs twice for one delivery."""
        tokens = {claim.receipt.token for claim in claims}
        # Compared by token and id, which is quick. Only a match is compared receipt by receipt.
        if not tokens.isdisjoint(self._tokens) or len({claim.receipt.id.int for claim in claims}) < len(claims):
            known = {delivery.claim.receipt for delivery in self.held}
            new = {claim.receipt: claim for claim in claims if claim.receipt not in known}
            if len(new) < len(claims):
                log.error("the transport returned %d receipts twice; they are ignored", len(claims) - len(new))
            claims = list(new.values())
        self._tokens |= tokens
        if len(self._tokens) > 2 * len(self.held) + _TOKENS:
            self._tokens = tokens | {delivery.claim.receipt.token for delivery in self.held}
        return claims

    def release(self, deliveries: Sequence[Delivery], refused: set[Receipt]) -> None:
        if refused:
            late = [
                d for d in deliveries if d.claim.receipt in refused and d in self.held and not d.decided_in_transaction
            ]
            for delivery in late:
                delivery.lost = True
            if late:
                self._on_lost(late, True)
        self.held.difference_update(deliveries)
        self._recent = (self._decayed_count() + len(deliveries), monotonic())
        self.freed.set()

    @property
    def rate(self) -> float:
        """Messages settled per second, recently."""
        return self._decayed_count() * math.log(2) / _HALF_LIFE

    def _decayed_count(self) -> float:
        """Number of settled messages, decayed with the half-life `_HALF_LIFE`."""
        done, at = self._recent
        return float(done * 0.5 ** ((monotonic() - at) / _HALF_LIFE))

    # --- for the heartbeat --------------------------------------------------------------------------

    def kept_and_hung(self) -> tuple[list[Delivery], list[Delivery]]:
        """Held messages whose leases are kept, and those whose handler exceeds its timeout.

        Called from the heartbeat's thread. While a handler blocks the event loop for longer than the timeout, all
        messages count as hung: those that wait here to be started or settled would otherwise be kept forever.
        """
        timeout = self.subscription.timeout_s
        held = [delivery for delivery in list(self.held) if not delivery.lost]
        if timeout is None:
            return held, []
        limit = monotonic() - timeout
        if timeout and not self._torn_down and self._last_watch < limit - _WATCH_EVERY:
            return [], held
        hung: set[Delivery] = set()
        for slot in self._slots:
            deliveries, started = slot.deliveries, slot.started
            if deliveries and started < limit:
                hung.update(deliveries)
        return [d for d in held if d not in hung], [d for d in held if d in hung]

    def abandon(self, deliveries: Sequence[Delivery]) -> None:
        """Stop holding messages that no handler will settle. They come back after a lease."""
        self.held.difference_update(deliveries)
        self._abandoned.extend(deliveries)
        self.freed.set()

    def take_abandoned(self) -> list[Delivery]:
        """Remove and return the abandoned messages. Called from the heartbeat's thread."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._abandoned.popleft())
        return taken

    def drop_refused(self, receipts: Sequence[Receipt]) -> None:
        """Stop extending these: they were settled meanwhile, or lost. Interrupt the handlers of lost ones."""
        stale = set(receipts)
        lost = []
        for delivery in [d for d in self.held if d.claim.receipt in stale]:
            if (refuse := self.apart.get(delivery)) is not None:
                refuse()  # the child knows whether its handler has decided in a transaction
            elif delivery.decided_in_transaction:
                self.held.discard(delivery)  # its transaction was committed while the handler runs on
            elif not delivery.concluded and delivery.decided is None:  # the settle loop finds the others
                delivery.lost = True
                lost.append(delivery)
                self.held.discard(delivery)
        if not lost:
            return
        self._run_queue.drop(lost)
        self._on_lost(lost, False)
        self.freed.set()
        if self.subscription.cancel_lost:
            for slot in self._slots:
                if slot.deliveries and all(d.lost for d in slot.deliveries):
                    slot.interrupt("lost")

    def cancel(self, requests: Mapping[Receipt, str]) -> None:
        """Cancel messages that run here, and those that wait to be started. Children have their own."""
        chosen = [d for d in self.held if d.claim.receipt in requests and d.cancelled is None and d not in self.apart]
        for delivery in chosen:
            delivery.cancelled = requests[delivery.claim.receipt]
        if unstarted := [delivery for delivery in chosen if delivery in self._run_queue.deliveries]:
            self._run_queue.drop(unstarted)
            self._results.settle_cancelled(unstarted)
        for slot in self._slots:
            if any(delivery in chosen for delivery in slot.deliveries):
                slot.interrupt("cancelled")

    def lose(self, delivery: Delivery, announced: bool) -> None:
        """A child reports that the lease of its message was lost."""
        if delivery in self.held:
            delivery.lost = True
            self._on_lost([delivery], announced)
            self.abandon([delivery])  # if it is ours after all, it comes back

    def take_stalled(self) -> list[Delivery]:
        """Remove the deliveries that wait to be started, if no slot has taken any for a few seconds.

        Called from the heartbeat's thread, also while a handler blocks the event loop.
        """
        queue = self._run_queue
        if not queue.deliveries:
            return []
        last = max(queue.since, max(slot.started for slot in self._slots))
        if monotonic() - last < _STALLED_AFTER + self._gather:
            return []
        stalled = queue.take_all()
        for delivery in stalled:
            delivery.concluded = True
        log.warning(
            "messages go back: %d, because no handler of %s has taken one for %.0f s",
            len(stalled),
            self.subscription.name,
            monotonic() - last,
        )
        return stalled

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Let the settle loop give these back: the heartbeat could not."""
        for delivery in deliveries:
            self._results.give_back(delivery)

    def drop_given_back(self, deliveries: Sequence[Delivery]) -> None:
        self.held.difference_update(deliveries)
        self.freed.set()

    # --- running ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all slots and the watch over timeouts, until stopped. Raises if no slot is left."""
        watch = asyncio.create_task(self._watch())
        for slot in self._slots:
            self._open(slot)
        try:
            await self._over
        finally:
            self._torn_down = True
            for slot in self._slots:
                if slot.task is not None:
                    slot.task.cancel()
            watch.cancel()
            if self._threads is not None:
                self._threads.end()

    def _open(self, slot: HandlerSlot) -> None:
        """Let a slot take messages, in a new task."""
        if self._torn_down:
            return
        slot.interrupted, slot.call = None, None
        slot.task = self.loop.create_task(self._run(slot))
        slot.task.add_done_callback(partial(self._replace, slot))
        self._living += 1

    def _replace(self, slot: HandlerSlot, task: asyncio.Task[None]) -> None:
        """Continue a slot in a new task, however its last one ended, unless the worker stops."""
        self._living -= 1
        error = None if task.cancelled() else task.exception()
        if error is not None:  # an error of the worker itself: those of handlers are settled
            log.error("a handler slot of %s failed and is replaced", self.subscription.name, exc_info=error)
            self.abandon(slot.deliveries)
            slot.deliveries = ()
            if not self._living and not self._over.done():
                self._over.set_exception(error)
            elif not self._stopping:
                self.loop.call_later(_REPLACE_AFTER, self._open, slot)
        elif not self._stopping:
            if task.cancelled():
                log.warning("a handler slot of %s was cancelled and is replaced", self.subscription.name)
            self._open(slot)
        elif not self._living and not self._over.done():
            self._over.set_result(None)

    def stop(self) -> None:
        """Start no more handlers. Messages that wait are given back as if they had never been claimed."""
        self._stopping = True
        self._give_back_unstarted()
        self._run_queue.close()
        if not self._living and not self._over.done():
            self._over.set_result(None)

    def interrupt_cut_off(self, shards: Collection[str] | None = None) -> None:
        """Interrupt async handlers, and start no message: other workers may take them. Threads run on.

        Deliveries that no other worker has taken go back when the connection returns. `shards`: only their messages.
        """

        def is_cut_off(delivery: Delivery) -> bool:
            return shards is None or delivery.claim.receipt.shard in shards

        if self._handler.is_async:
            for slot in self._slots:
                if any(map(is_cut_off, slot.deliveries)):
                    slot.interrupt("cut off")
        if any(map(is_cut_off, self._run_queue.deliveries)):
            self._give_back_unstarted()

    def interrupt_running(self) -> None:
        """Interrupt running handlers after the grace period. Their deliveries count, their attempts do not."""
        for slot in self._slots:
            slot.interrupt("stop")

    def _give_back_unstarted(self) -> None:
        for delivery in reversed(self._run_queue.take_all()):
            self._results.give_back(delivery)

    async def _run(self, slot: HandlerSlot) -> None:
        """Run one message after the other, up to the first handler that is cancelled or leaves its task referenced."""
        task = asyncio.current_task()
        assert task is not None
        resumed = monotonic()
        ready = self._run_queue.deliveries
        while not self._stopping:
            if not ready:
                self.freed.set()
                self._settle_loop.flush_if_idle()
                await self._run_queue.wait()
                resumed = monotonic()
                continue
            now = monotonic()
            if now - resumed > _YIELD_AFTER:
                await asyncio.sleep(0)
                resumed = monotonic()
                continue
            if self._batch is None:
                try:
                    slot.deliveries = (ready.popleft(),)
                except IndexError:  # the heartbeat's thread has taken it to give it back
                    continue
            else:
                if self._gather and len(ready) < self._batch:
                    await self._run_queue.gather_batch(self._batch, self._gather)
                slot.deliveries = self._run_queue.take_batch(self._batch)
                if not slot.deliveries:
                    continue
            count = len(slot.deliveries)
            slot.started = now
            self.running += count
            self.started_count += count
            references, weak_references = getrefcount(task), getweakrefcount(task)
            try:
                rest = self._begin(slot)
                if rest is not None:
                    await rest
            finally:
                self.running -= count
            slot.deliveries = ()
            if slot.interrupted is not None:
                await self._wait_for_thread(slot)
                return
            if rest is not None:
                rest, slot.call = None, None
                resumed = monotonic()
            if task.cancelling() or getrefcount(task) > references or getweakrefcount(task) > weak_references:
                return

    def _begin(self, slot: HandlerSlot) -> Awaitable[None] | None:
        """Start the handler of a slot; None if it is done already: most handlers never wait."""
        handler = self._handler
        try:
            for delivery in slot.deliveries:
                delivery.body = handler.decode(delivery.claim.message)
        except KeyboardInterrupt:
            raise
        except BaseException:  # a decoder of the user's types may raise anything
            slot.deliveries = self._decode_each(slot.deliveries)
            if not slot.deliveries:
                return None
        if not self._starts_at_once:
            return self._finish(slot, self._run_deferred(slot))
        context = copy_context()
        try:
            arguments, first = self._arguments(slot)
            coroutine = handler.function(*arguments)
            future = context.run(first_step, coroutine, first)
        except StopIteration:
            self._results.settle_returned(slot.deliveries)
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            self._settle_ended(slot, e)
        else:
            self._run_queue.wake_more()
            return self._finish(slot, RemainingSteps(coroutine, context, future))
        return None

    def _arguments(self, slot: HandlerSlot) -> tuple[Sequence[Any], Delivery | None]:
        """Arguments of the handler, and its current delivery; None for a batch."""
        handler, deliveries = self._handler, slot.deliveries
        if handler.batch:
            return handler.arguments([d.body for d in deliveries], deliveries), None
        (delivery,) = deliveries
        return (delivery.body,) if handler.takes_only_body else handler.arguments(delivery.body, delivery), delivery

    async def _run_deferred(self, slot: HandlerSlot) -> None:
        """Run a handler that starts after an await: for its ack, or for a thread."""
        if self._ack_first:
            self._run_queue.wake_more()
            slot.deliveries = await self._results.ack_first(slot.deliveries)
            if not slot.deliveries:
                return
        context = copy_context()
        arguments, first = self._arguments(slot)
        if self._threads is not None:
            await self._run_in_thread(slot, self._threads, context, first, arguments)
        else:
            await self._run_in_context(self._handler.function(*arguments), context, first)

    async def _finish(self, slot: HandlerSlot, rest: Awaitable[None]) -> None:
        """Wait for the end of a handler, and settle its result."""
        error: BaseException | None = None
        try:
            await rest
        except (KeyboardInterrupt, GeneratorExit):  # GeneratorExit: our own coroutine is closed
            raise
        except BaseException as e:
            if self._torn_down and slot.interrupted is None and isinstance(e, asyncio.CancelledError):
                raise
            error = e
        if slot.interrupted is not None and not _has_result(slot):  # in any case, however the handler reacted
            await self._settle_interrupted(slot)
            return
        if slot.interrupted is not None:
            log.error("the middleware of %s was interrupted after its handler had ended", self.subscription.name)
        self._settle_ended(slot, error)

    def _settle_ended(self, slot: HandlerSlot, error: BaseException | None) -> None:
        """`error`: of the call. With middleware the handler's own result counts."""
        result = slot.deliveries[0].result if slot.deliveries else None
        if result is not None:
            error = result.error if isinstance(result, Raised) else None
        if error is None:
            self._results.settle_returned(slot.deliveries, least_delay=_least_delay(slot))
            return
        if isinstance(error, asyncio.CancelledError):
            error = asyncio.CancelledError("the handler cancelled itself")
        self._settle_raised(slot, error)

    def _settle_raised(self, slot: HandlerSlot, error: BaseException) -> None:
        elapsed = monotonic() - slot.started
        self._results.settle_raised(slot.deliveries, error, elapsed, least_delay=_least_delay(slot))

    async def _settle_interrupted(self, slot: HandlerSlot) -> None:
        """A timeout counts as an error; after any other interruption the attempt does not count.

        A stop gives the message back when its thread has ended; if the worker ends first, the lease ends by itself. So
        do the other messages of a batch of which an operator cancelled some.
        """
        thread = _running_thread(slot)
        if slot.interrupted == "timeout":
            self._settle_raised(slot, TimeoutError(f"the handler ran longer than {self.subscription.timeout_s:g} s"))
            return
        deliveries = slot.deliveries
        if slot.interrupted == "cancelled":
            self._results.settle_cancelled([delivery for delivery in deliveries if delivery.cancelled is not None])
            deliveries = [delivery for delivery in deliveries if delivery.cancelled is None]
        if deliveries and slot.interrupted in ("stop", "cancelled") and thread is not None:
            try:
                await asyncio.wait([thread])
            except asyncio.CancelledError:
                for delivery in deliveries:
                    delivery.concluded = True  # a later decision of the thread is refused
                raise
        self._results.settle_cancelled(deliveries)  # some may have been cancelled meanwhile

    async def _wait_for_thread(self, slot: HandlerSlot) -> None:
        """Keep a slot occupied until the thread of its interrupted handler has ended."""
        call = slot.call
        self.freed.set()
        if call is None or call.done() or self._stopping:
            return
        slot.interrupted = None
        log.warning("a thread of %s runs on after its handler was given up", self.subscription.name)
        self.stuck += 1
        try:
            await asyncio.wait([call])
        finally:
            self.stuck -= 1

    async def _run_in_context(self, coroutine: Any, context: Context, delivery: Delivery | None) -> None:
        try:
            future = context.run(first_step, coroutine, delivery)
        except StopIteration:
            return
        self._run_queue.wake_more()
        await RemainingSteps(coroutine, context, future)

    async def _run_in_thread(
        self, slot: HandlerSlot, threads: Threads, context: Context, delivery: Delivery | None, arguments: Any
    ) -> None:
        self._run_queue.wake_more()
        context.run(current.set, delivery)
        context.run(in_batch.set, delivery is None)
        slot.call = threads.call(lambda: context.run(self._handler.function, *arguments))
        value = await asyncio.shield(slot.call)
        if inspect.iscoroutine(value):  # a decorator hid that the function is async
            slot.call = None
            await self._run_in_context(value, context, delivery)

    def _decode_each(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Deliveries whose body can be decoded. Each of the others is rejected alone."""
        good = []
        for delivery in deliveries:
            try:
                delivery.body = self._handler.decode(delivery.claim.message)
            except KeyboardInterrupt:
                raise
            except BaseException as e:
                self._results.reject_undecodable(delivery, e)
            else:
                good.append(delivery)
        return good

    async def _watch(self) -> None:
        """Interrupt handlers that exceed their timeout, and notice when all of them hang."""
        timeout = math.inf if self.subscription.timeout_s is None else self.subscription.timeout_s
        while True:
            await asyncio.sleep(min(_WATCH_EVERY, max(timeout / 10, 0.01)))
            self._last_watch = now = monotonic()
            hung = self.stuck
            for slot in self._slots:
                if slot.deliveries and slot.started < now - timeout:
                    slot.interrupt("timeout")
                    hung += slot.started < now - timeout - _UNWIND
            if hung < len(self._slots):
                self.stuck_since = None
            elif self.stuck_since is None:
                self.stuck_since = now
                log.error(
                    "all %d handlers of %s hang beyond their timeout: this worker handles none of its messages",
                    hung,
                    self.subscription.name,
                )


def _running_thread(slot: HandlerSlot) -> asyncio.Future[Any] | None:
    return None if slot.call is None or slot.call.done() else slot.call


def _least_delay(slot: HandlerSlot) -> float:
    """Seconds to the next attempt: a lease if a thread runs on, whose message must not run a second time meanwhile."""
    return 0.0 if _running_thread(slot) is None else max(seconds(delivery.lease) for delivery in slot.deliveries)


def _has_result(slot: HandlerSlot) -> bool:
    """Whether the handler ended before its middleware was interrupted. Its error is no decision against a cancel."""
    result = slot.deliveries[0].result if slot.deliveries else None
    if slot.interrupted == "cancelled" and isinstance(result, Raised):
        return isinstance(result.error, DECISIONS)
    return result is not None
