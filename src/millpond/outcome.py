"""What a delivery comes to: outcomes, and the pure functions that decide them."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from typing import assert_never, final

import msgspec

from millpond.clock import SECOND, Seconds, micros
from millpond.message import Claim, Receipt, State, short_error
from millpond.retry import Retry

MAX_CRASHES = 3
"""Unfinished deliveries after which a message is taken for poison."""
SUSPECT = 2
"""Unfinished deliveries from which on a message is claimed alone."""


@final
class Ack(msgspec.Struct, frozen=True, gc=False):
    """Processed. `keep=False` leaves no trace in the archive."""

    receipt: Receipt
    keep: bool = True


@final
class Nack(msgspec.Struct, frozen=True, gc=False):
    """Again after a delay."""

    receipt: Receipt
    delay: Seconds = 0.0
    error: str | None = None


@final
class Reject(msgspec.Struct, frozen=True, gc=False):
    """Never again, and kept with the reason. `attempted=False`: no handler ever ran for this delivery."""

    receipt: Receipt
    reason: str = "rejected"
    error: str | None = None
    keep: bool = True
    attempted: bool = True


@final
class GiveBack(msgspec.Struct, frozen=True, gc=False):
    """Back to PENDING. Never started, the delivery does not count; interrupted (`delivered`), it does."""

    receipt: Receipt
    delivered: bool = False


Outcome = Ack | Nack | Reject | GiveBack


class Change(msgspec.Struct, frozen=True, gc=False):
    """What an outcome does to a message; every transport writes exactly this."""

    state: State
    attempts: int
    """Added to the attempts."""
    deliveries: int = 0
    """Added to the deliveries."""
    delay_us: int | None = None
    """Due this much from now; None leaves the due time alone."""
    reason: str | None = None
    error: str | None = None
    keep: bool = True


# One value for all acks, so that a thousand of them are seen to be the same at a glance.
_KEPT = Change(State.COMPLETED, 1)
_GONE = Change(State.COMPLETED, 1, keep=False)
_RETRYABLE = State.RETRYABLE  # an enum takes its time to find a member by its name


def change(outcome: Outcome) -> Change:
    """The state machine: what each outcome makes of a claimed message."""
    # By the type itself: asked whether it is an instance, a struct of another type takes a microsecond to say no.
    if type(outcome) is Ack:
        return _KEPT if outcome.keep else _GONE
    if type(outcome) is Nack:
        delay, error = micros(outcome.delay, "delay"), short_error(outcome.error)
        return Change(_RETRYABLE, 1, 0, delay, None, error)
    if type(outcome) is Reject:
        return Change(
            State.FAILED,
            int(outcome.attempted),
            reason=short_error(outcome.reason),
            error=short_error(outcome.error),
            keep=outcome.keep,
        )
    if type(outcome) is GiveBack:
        return Change(State.PENDING, 0, deliveries=0 if outcome.delivered else -1)
    assert_never(outcome)


# --- from a handler's result to an outcome ----------------------------------------------------------


class AckPolicy(StrEnum):
    """What an exception in a handler means."""

    NACK_ON_ERROR = "nack-on-error"
    """Retry by the retry policy, then FAILED: the default."""
    REJECT_ON_ERROR = "reject-on-error"
    """FAILED at once."""
    ACK_FIRST = "ack-first"
    """Acked before the handler runs: at most once, by choice."""
    MANUAL = "manual"
    """The handler decides; returning without a decision is FAILED, an exception is a nack."""


class NackMessage(Exception):
    """Raise in a handler: again later, by `delay` or by the retry policy."""

    def __init__(self, reason: str = "", *, delay: Seconds | None = None) -> None:
        if delay is not None:
            micros(delay, "NackMessage(delay)")
        self.delay = delay
        super().__init__(reason or "nacked by the handler")


class RejectMessage(Exception):
    """Raise in a handler: never again; the reason is kept in the archive."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        self.reason = reason
        super().__init__(reason)


class Returned(msgspec.Struct, frozen=True):
    """The handler came to its end."""


class Raised(msgspec.Struct, frozen=True):
    """The handler raised."""

    error: BaseException


class Unstarted(msgspec.Struct, frozen=True):
    """The handler never ran."""


Result = Returned | Raised | Unstarted


def decide(
    claim: Claim,
    result: Result,
    *,
    policy: AckPolicy = AckPolicy.NACK_ON_ERROR,
    retry: Retry,
    elapsed: float = 0.0,
    keep_acked: bool = True,
    keep_rejected: bool = True,
    draw: Callable[[], float] = random.random,
) -> Outcome:
    """What a handler's result comes to. `elapsed`: seconds that this attempt took."""
    receipt = claim.receipt
    match result:
        case Unstarted():
            return GiveBack(receipt)
        case Returned():
            if policy is AckPolicy.MANUAL:
                return Reject(receipt, reason="no decision by the handler", keep=keep_rejected)
            return Ack(receipt, keep=keep_acked)
        case Raised(error):
            text = describe(error)
            if isinstance(error, RejectMessage):
                return Reject(receipt, reason=error.reason, error=text, keep=keep_rejected)
            if policy is AckPolicy.REJECT_ON_ERROR and not isinstance(error, NackMessage):
                return Reject(receipt, reason="error", error=text, keep=keep_rejected)
            first = claim.claimed_us if claim.first_attempt_us is None else claim.first_attempt_us
            since_first = elapsed + (claim.claimed_us - first) / SECOND
            wait = retry.decide(claim.attempts + 1, error, since_first, draw)
            if wait is None:
                return Reject(receipt, reason="retries used up", error=text, keep=keep_rejected)
            if isinstance(error, NackMessage) and error.delay is not None:
                wait = micros(error.delay, "delay") / SECOND
            return Nack(receipt, delay=wait, error=text)
        case _:
            assert_never(result)


def refuse_to_run(claim: Claim, *, max_crashes: int | None, max_deliveries: int | None) -> Reject | None:
    """Poison and expired messages are FAILED without running; None lets the message run."""
    if claim.expires_us is not None and claim.expires_us <= claim.claimed_us:
        return Reject(claim.receipt, reason="expired", attempted=False)
    if max_crashes is not None and claim.unfinished >= max_crashes:
        return Reject(
            claim.receipt,
            reason="max_crashes",
            error=f"{claim.unfinished} deliveries ended without a result (limit {max_crashes})",
            attempted=False,
        )
    if max_deliveries is not None and claim.deliveries > max_deliveries:
        return Reject(
            claim.receipt,
            reason="max_deliveries",
            error=f"delivered {claim.deliveries - 1} times (limit {max_deliveries})",
            attempted=False,
        )
    return None


def sorted_out(
    claims: list[Claim], *, max_crashes: int | None, max_deliveries: int | None
) -> tuple[list[Claim], list[Reject]]:
    """Which claims may run, and what becomes of the others."""
    # Most are delivered for the first time and never expire: nothing is known against them.
    if 0 not in (max_crashes, max_deliveries) and not any(
        [c.deliveries > 1 or c.expires_us is not None for c in claims]
    ):
        return claims, []
    runnable, refused = [], []
    for claim in claims:
        reject = refuse_to_run(claim, max_crashes=max_crashes, max_deliveries=max_deliveries)
        runnable.append(claim) if reject is None else refused.append(reject)
    return runnable, refused


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
