"""Conclusions: what a handler's result comes to, decided once and handed to the settle loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from millpond.errors import BodyNotDecodable
from millpond.outcome import Ack, AckPolicy, GiveBack, Outcome, Raised, Reject, Result, Returned, decide, describe
from millpond.retry import Retry
from millpond.worker import report
from millpond.worker.delivery import Delivery
from millpond.worker.settle import Settling
from millpond.worker.subscription import Subscription

log = logging.getLogger("millpond.worker")

Lost = Callable[[Sequence[Delivery], bool], None]
"""Told of deliveries whose lease was lost, and whether the seam has announced that."""

RETURNED = Returned()


class RolledBack(Exception):
    """The handler decided within a transaction that was not committed."""


class Concluding:
    """Decides for one subscription. `held`: what is claimed and not yet settled; `freed` is set when that changes."""

    def __init__(
        self,
        subscription: Subscription,
        settling: Settling,
        held: set[Delivery],
        freed: asyncio.Event,
        lost: Lost,
    ) -> None:
        self._subscription = subscription
        self._settling = settling
        self._held = held
        self._freed = freed
        self._lost = lost
        self._name = subscription.name
        self._trace = subscription.batch is None  # a batch tells its error once
        self._keep_acked = subscription.keep_acked
        self._keep_rejected = subscription.keep_rejected
        self._ack_returned = subscription.ack_policy is not AckPolicy.MANUAL

    def returned(self, deliveries: Sequence[Delivery]) -> None:
        """The handler came to its end: mostly that is an ack."""
        add = self._settling.add
        for delivery in deliveries:
            if self._ack_returned and delivery.decided is None and not delivery.lost:
                delivery.concluded = True
                add(delivery, Ack(delivery.claim.receipt, self._keep_acked))
            else:
                self._conclude(delivery, RETURNED, 0.0)

    def raised(self, deliveries: Sequence[Delivery], error: BaseException, elapsed: float) -> None:
        """The handler raised, after so many seconds."""
        if not self._trace:
            report.batch_failed(self._name, len(deliveries), error)
        result = Raised(error)
        for delivery in deliveries:
            self._conclude(delivery, result, elapsed)

    def interrupted(self, deliveries: Sequence[Delivery]) -> None:
        """The handler was interrupted, by a stop or since its lease was lost: the delivery counts, the attempt not."""
        for delivery in deliveries:
            if delivery.lost:
                self._drop(delivery)
            elif delivery in self._held and (delivery.decided is None or delivery.within):
                self.give_back(delivery, delivered=True)

    def give_back(self, delivery: Delivery, *, delivered: bool = False) -> None:
        delivery.concluded = True
        self._settling.add(delivery, GiveBack(delivery.claim.receipt, delivered))

    def undecodable(self, delivery: Delivery, error: Exception) -> None:
        """Its body is not what the handler wants, and never will be."""
        report.undecodable(delivery)
        delivery.concluded = True
        text = str(error) if isinstance(error, BodyNotDecodable) else describe(error)
        reject = Reject(delivery.claim.receipt, "undecodable body", text, keep=self._keep_rejected)
        self._settling.add(delivery, reject)

    async def acked(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Ack before running: those that were still ours."""
        outcomes = [Ack(delivery.claim.receipt, self._keep_acked) for delivery in deliveries]
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            delivery.decided = outcome
        written = await asyncio.gather(*map(self._settling.write, deliveries, outcomes))
        return [delivery for delivery, ours in zip(deliveries, written, strict=True) if ours]

    def _conclude(self, delivery: Delivery, result: Result, elapsed: float) -> None:
        name, trace = self._name, self._trace
        delivery.concluded = True
        if delivery.lost:
            self._drop(delivery)
            report.failed(name, delivery, result, "its lease was lost", logging.WARNING, trace=trace)
        elif delivery.decided is not None and not delivery.within:
            report.failed(name, delivery, result, "decided before it raised", logging.ERROR, trace=trace)
        elif delivery in self._held:
            self._settle(delivery, result, elapsed)

    def _settle(self, delivery: Delivery, result: Result, elapsed: float) -> None:
        name, trace = self._name, self._trace
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
        s = self._subscription
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

    def _drop(self, delivery: Delivery) -> None:
        """Another worker has it: there is nothing to settle."""
        delivery.concluded = True
        if delivery in self._held:  # the handler was the first to hear of it, in its own transaction
            self._lost([delivery], True)
            self._held.discard(delivery)
        self._freed.set()
