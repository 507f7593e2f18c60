"""Turn results of handlers into outcomes, once per delivery, for the settle loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from millpond.clock import Seconds, seconds
from millpond.errors import BodyNotDecodable
from millpond.outcome import (
    DECISIONS,
    Ack,
    AckPolicy,
    GiveBack,
    Nack,
    NackMessage,
    Outcome,
    Raised,
    Reject,
    Result,
    Returned,
    decide,
    describe,
)
from millpond.redaction import Redact
from millpond.retry import Retry
from millpond.worker import failure_log
from millpond.worker.delivery import Delivery
from millpond.worker.subscription import Subscription

log = logging.getLogger("millpond.worker")

OnLost = Callable[[Sequence[Delivery], bool], None]
"""Called with deliveries whose lease was lost, and whether the transport has already announced it."""

OnError = Callable[[Delivery, BaseException], None]
"""Called with the first message of a failed call, and its error."""

RETURNED = Returned()


class OutcomeSink(Protocol):
    """The settle loop or, in a child process, the way to the worker."""

    def add(self, delivery: Delivery, outcome: Outcome) -> None:
        """Add an outcome; it is written soon."""

    async def write(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Add an outcome and wait until it is durable; False if its receipt was stale."""

    def flush_if_idle(self) -> None:
        """Called when a slot has nothing to do."""


class RolledBack(Exception):
    """The handler decided within a transaction that was not committed."""


class Results:
    """Outcomes of one subscription. `held`: claimed and not yet settled; `freed` is set when that changes."""

    def __init__(
        self,
        subscription: Subscription,
        settle_loop: OutcomeSink,
        held: set[Delivery],
        freed: asyncio.Event,
        on_lost: OnLost,
        redact: Redact,
        on_error: OnError | None = None,
        of: Callable[[str], Subscription] | None = None,
    ) -> None:
        self._of = of or (lambda queue: subscription)
        self._on_error = on_error
        self._subscription = subscription
        self._settle_loop = settle_loop
        self._held = held
        self._freed = freed
        self._on_lost = on_lost
        self._redact = redact
        self._name = subscription.name
        self._trace = subscription.batch is None  # a batch logs its error once
        self._keep_acked = subscription.keep_acked
        self._keep_rejected = subscription.keep_rejected
        self._ack_returned = subscription.ack_policy is not AckPolicy.MANUAL

    def settle_returned(self, deliveries: Sequence[Delivery], *, least_delay: float = 0.0) -> None:
        """The handler returned, which usually means ack. A retry comes after `least_delay` seconds or later."""
        add = self._settle_loop.add
        for delivery in deliveries:
            if self._ack_returned and delivery.decided is None and not delivery.lost:
                delivery.concluded = True
                add(delivery, Ack(delivery.claim.receipt, self._keep_acked))
            else:
                self._finish(delivery, RETURNED, 0.0, least_delay)

    def settle_raised(
        self, deliveries: Sequence[Delivery], error: BaseException, elapsed: float, *, least_delay: float = 0.0
    ) -> None:
        """The handler raised after `elapsed` seconds; it runs again after `least_delay` seconds or later."""
        if not self._trace:
            failure_log.log_batch_failure(self._name, len(deliveries), error)
        if self._on_error is not None and deliveries and not isinstance(error, DECISIONS):
            self._on_error(deliveries[0], error)
        result = Raised(error)
        for delivery in deliveries:
            self._finish(delivery, result, elapsed, least_delay)

    def settle_interrupted(self, deliveries: Sequence[Delivery]) -> None:
        """The handler was interrupted by a stop or a lost lease: the delivery counts, and is no attempt or crash."""
        for delivery in deliveries:
            if delivery.lost:
                self._drop_lost(delivery)
            elif delivery in self._held and (delivery.decided is None or delivery.decided_in_transaction):
                self.give_back(delivery, delivered=True)

    def settle_cancelled(self, deliveries: Sequence[Delivery]) -> None:
        """Those that an operator cancelled are FAILED. The others were interrupted with them, and go back."""
        self.settle_interrupted([delivery for delivery in deliveries if delivery.cancelled is None or delivery.lost])
        for delivery in deliveries:
            undecided = delivery.decided is None or delivery.decided_in_transaction
            if delivery.cancelled is not None and not delivery.lost and delivery in self._held and undecided:
                delivery.concluded = True
                reason = self._redact(delivery.cancelled)
                ran = delivery.interrupted
                self._settle_loop.add(
                    delivery, Reject(delivery.claim.receipt, reason, keep=self._keep_rejected, attempted=ran)
                )
                log.warning(
                    "message %s was cancelled while it ran", delivery.id, extra=failure_log.log_fields(delivery)
                )

    def give_back(self, delivery: Delivery, *, delivered: bool = False) -> None:
        delivery.concluded = True
        self._settle_loop.add(delivery, GiveBack(delivery.claim.receipt, delivered))

    def reject_undecodable(self, delivery: Delivery, error: BaseException) -> None:
        """Reject at once: the body will never match the handler's annotation."""
        failure_log.log_undecodable(delivery)
        delivery.concluded = True
        text = str(error) if isinstance(error, BodyNotDecodable) else describe(error)
        if self._on_error is not None:
            raised = BodyNotDecodable(f"the body does not match {self._name}: {text}")
            raised.__cause__ = error
            self._on_error(delivery, raised)
        reject = Reject(delivery.claim.receipt, "undecodable body", self._redact(text), keep=self._keep_rejected)
        self._settle_loop.add(delivery, reject)

    async def ack_first(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Ack before running; the deliveries whose receipt was not stale."""
        outcomes = [Ack(delivery.claim.receipt, self._keep_acked) for delivery in deliveries]
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            delivery.decided = outcome
        written = await asyncio.gather(*map(self._settle_loop.write, deliveries, outcomes))
        return [delivery for delivery, ours in zip(deliveries, written, strict=True) if ours]

    def _finish(self, delivery: Delivery, result: Result, elapsed: float, least_delay: float = 0.0) -> None:
        name, trace = self._name, self._trace
        delivery.concluded = True
        if delivery.lost:
            self._drop_lost(delivery)
            failure_log.log_failure(name, delivery, result, "its lease was lost", logging.WARNING, trace=trace)
        elif delivery.decided is not None and not delivery.decided_in_transaction:
            failure_log.log_failure(name, delivery, result, "decided before it raised", logging.ERROR, trace=trace)
        elif delivery in self._held:
            self._settle(delivery, result, elapsed, least_delay)

    def _settle(self, delivery: Delivery, result: Result, elapsed: float, least_delay: float) -> None:
        name, trace = self._name, self._trace
        if delivery.decided_in_transaction:
            what = "raised after a decision in its transaction"
            failure_log.log_failure(name, delivery, result, what, logging.ERROR, trace=trace)
            if not isinstance(result, Raised):
                result = Raised(RolledBack("the transaction with the handler's decision was not committed"))
            self._settle_loop.add(delivery, self._decide(delivery, result, elapsed, least_delay))
        else:
            outcome = self._decide(delivery, result, elapsed, least_delay)
            self._settle_loop.add(delivery, outcome)
            failure_log.log_outcome(name, delivery, result, outcome, trace=trace)

    def _decide(self, delivery: Delivery, result: Result, elapsed: float, least_delay: float) -> Outcome:
        s = self._subscription
        try:
            outcome = decide(
                delivery.claim,
                result,
                policy=s.ack_policy,
                retry=self._of(delivery.queue).retry,
                elapsed=elapsed,
                keep_acked=s.keep_acked,
                keep_rejected=s.keep_rejected,
            )
            outcome = self._redacted(outcome)
        except Exception:  # str() of the error failed, or Retry.never holds values that are not types
            log.exception(
                "the retry policy cannot decide on message %s", delivery.id, extra=failure_log.log_fields(delivery)
            )
            error = RuntimeError("the retry policy failed; its error is in the worker's log")
            outcome = decide(delivery.claim, Raised(error), retry=Retry(), keep_rejected=s.keep_rejected)
        if isinstance(outcome, Nack | GiveBack) and seconds(outcome.delay or 0) < least_delay:
            return msgspec.structs.replace(outcome, delay=least_delay)
        return outcome

    def nacked(self, delivery: Delivery, delay: Seconds | None, error: str | None, elapsed: float) -> Outcome:
        """The outcome of a nack by hand: that of `NackMessage`, with the error's own text."""
        outcome = decide(
            delivery.claim,
            Raised(NackMessage(delay=delay)),
            retry=self._of(delivery.queue).retry,
            elapsed=elapsed,
            keep_rejected=self._keep_rejected,
        )
        return msgspec.structs.replace(outcome, error=error)

    def _redacted(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Nack | Reject) and outcome.error is not None:
            outcome = msgspec.structs.replace(outcome, error=self._redact(outcome.error))
        if isinstance(outcome, Nack | Reject) and outcome.traceback is not None:
            outcome = msgspec.structs.replace(outcome, traceback=self._redact(outcome.traceback))
        if isinstance(outcome, Reject):
            outcome = msgspec.structs.replace(outcome, reason=self._redact(outcome.reason))
        return outcome

    def _drop_lost(self, delivery: Delivery) -> None:
        """Another worker has the message: there is nothing to settle."""
        delivery.concluded = True
        if delivery in self._held:
            # The handler's own transaction noticed it first. That proves nothing: its snapshot may be older than the
            # claim, or the change that refused the decision was rolled back. If so, the message comes back.
            self._on_lost([delivery], True)
            delivery._settler.abandon([delivery])
        self._freed.set()
