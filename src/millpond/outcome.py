"""Outcomes of deliveries, and the pure functions that decide them and their effect."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from typing import assert_never, final

import msgspec

from millpond.clock import SECOND, Seconds, micros
from millpond.failed_attempts import fingerprint, stored_attempt, traceback_text
from millpond.message import Claim, Receipt, State, short_error
from millpond.retry import Retry

MAX_CRASHES = 3
"""Number of crashes after which a message is poison."""
LONGEST_CRASH_DELAY = 64
"""Seconds; `crash_delay` grows no further."""


@final
class Ack(msgspec.Struct, frozen=True, gc=False):
    """The message was processed. With `keep=False` it is not archived."""

    receipt: Receipt
    keep: bool = True


@final
class Nack(msgspec.Struct, frozen=True, gc=False):
    """The message is tried again after a delay. None: as the retry policy of its queue says, or at once without one."""

    receipt: Receipt
    delay: Seconds | None = None
    error: str | None = None
    traceback: str | None = None
    """Kept with the message, its end if it is long."""
    took: float | None = None
    """Seconds that the handler ran."""


@final
class Reject(msgspec.Struct, frozen=True, gc=False):
    """The message is FAILED, with the reason. `attempted=False`: no handler ran for this delivery."""

    receipt: Receipt
    reason: str = "rejected"
    error: str | None = None
    keep: bool = True
    attempted: bool = True
    traceback: str | None = None
    """Kept with the message, its end if it is long."""
    took: float | None = None
    """Seconds that the handler ran."""


@final
class GiveBack(msgspec.Struct, frozen=True, gc=False):
    """The message is PENDING again, due after `delay` or as before.

    The delivery counts if it was interrupted (`delivered`), and is a crash if the process in which the message ran
    alone has died (`crashed`).
    """

    receipt: Receipt
    delivered: bool = False
    crashed: bool = False
    delay: Seconds | None = None


Outcome = Ack | Nack | Reject | GiveBack


class Change(msgspec.Struct, frozen=True, gc=False):
    """Effect of an outcome on a message. Every transport writes exactly this."""

    state: State
    attempts: int
    """Added to the attempts."""
    deliveries: int = 0
    """Added to the deliveries."""
    delay_us: int | None = None
    """Microseconds from now until it is due. None: the due time stays."""
    reason: str | None = None
    error: str | None = None
    keep: bool = True
    crashes: int = 0
    """Added to the crashes. An attempt sets them to zero."""
    attempt: str | None = None
    """An attempt that failed, to be added to the message's history."""
    failure: int | None = None
    """Fingerprint of a FAILED message: failures with the same one are alike."""


# One value for all acks: a batch of them is grouped by identity.
_KEPT = Change(State.COMPLETED, 1)
_GONE = Change(State.COMPLETED, 1, keep=False)
_RETRYABLE = State.RETRYABLE  # finding a member of an enum by name is slow


def change(outcome: Outcome) -> Change:
    """The state machine: effect of each outcome on a claimed message."""
    # By type: isinstance takes a microsecond for a struct of another type.
    if type(outcome) is Ack:
        return _KEPT if outcome.keep else _GONE
    if type(outcome) is Nack:
        delay = 0 if outcome.delay is None else micros(outcome.delay, "delay")
        error = short_error(outcome.error)
        attempt = stored_attempt(error, outcome.traceback, outcome.took)
        return Change(_RETRYABLE, 1, 0, delay, None, error, attempt=attempt)
    if type(outcome) is Reject:
        reason, error = short_error(outcome.reason), short_error(outcome.error)
        ran = stored_attempt(error or reason, outcome.traceback, outcome.took) if outcome.attempted else None
        return Change(
            State.FAILED,
            int(outcome.attempted),
            reason=reason,
            error=error,
            keep=outcome.keep,
            attempt=ran,
            failure=fingerprint(reason, error),
        )
    if type(outcome) is GiveBack:
        counts = outcome.delivered or outcome.crashed
        after = None if outcome.delay is None else micros(outcome.delay, "delay")
        return Change(State.PENDING, 0, 0 if counts else -1, after, crashes=int(outcome.crashed))
    assert_never(outcome)


def crash_delay(crashes: int) -> int:
    """Seconds until a message is due again after its crashes: none after the first, then more after each."""
    return min(2 ** (crashes - 2), LONGEST_CRASH_DELAY) if crashes > 1 else 0


# --- from a handler's result to an outcome ----------------------------------------------------------


class AckPolicy(StrEnum):
    """Effect of an exception in a handler."""

    NACK_ON_ERROR = "nack-on-error"
    """Default: retries by the retry policy, then FAILED."""
    REJECT_ON_ERROR = "reject-on-error"
    """FAILED at once."""
    ACK = "ack"
    """Acked when the handler ends, also after an error, which is logged."""
    ACK_FIRST = "ack-first"
    """Acked before the handler runs: at most once, by choice."""
    MANUAL = "manual"
    """The handler decides. A return without a decision is FAILED, an exception is a nack."""


class NackMessage(Exception):
    """Raise it in a handler to try again later, after `delay` or by the retry policy."""

    def __init__(self, reason: str = "", *, delay: Seconds | None = None) -> None:
        if delay is not None:
            micros(delay, "NackMessage(delay)")
        self.delay = delay
        super().__init__(reason or "nacked by the handler")


class RejectMessage(Exception):
    """Raise it in a handler to make the message FAILED. The archive keeps the reason."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        self.reason = reason
        super().__init__(reason)


class SnoozeMessage(Exception):
    """Raise it in a handler to give the message back, due after `delay`. Neither attempt nor delivery is counted."""

    def __init__(self, delay: Seconds, reason: str = "") -> None:
        micros(delay, "SnoozeMessage(delay)")
        self.delay = delay
        super().__init__(reason or "snoozed by the handler")


class StepHeld(SnoozeMessage):
    """Another delivery has the step: the message goes back uncounted, due in a second."""

    def __init__(self, reason: str = "", delay: Seconds = 1.0) -> None:
        super().__init__(delay, reason or "another delivery has the step")


DECISIONS = (NackMessage, RejectMessage, SnoozeMessage)
"""Exceptions by which a handler decides. All others are errors."""


class Returned(msgspec.Struct, frozen=True):
    """The handler returned."""


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
    """Outcome for the result of a handler. `elapsed`: seconds that this attempt took."""
    receipt = claim.receipt
    match result:
        case Unstarted():
            return GiveBack(receipt)
        case Returned():
            if policy is AckPolicy.MANUAL:
                return Reject(receipt, reason="no decision by the handler", keep=keep_rejected)
            return Ack(receipt, keep=keep_acked)
        case Raised(error):
            if isinstance(error, RejectMessage):
                # The reason is the text. An error of its own is the one that it was raised from.
                cause = None if error.__cause__ is None else describe(error.__cause__)
                trace = None if error.__cause__ is None else traceback_text(error.__cause__)
                return Reject(receipt, error.reason, cause, keep_rejected, traceback=trace, took=elapsed or None)
            if isinstance(error, SnoozeMessage):
                return GiveBack(receipt, delay=error.delay)
            if policy is AckPolicy.ACK and not isinstance(error, NackMessage):
                return Ack(receipt, keep=keep_acked)
            text = describe(error)
            trace = None if isinstance(error, NackMessage) else traceback_text(error)
            if policy is AckPolicy.REJECT_ON_ERROR and not isinstance(error, NackMessage):
                return Reject(receipt, "error", text, keep_rejected, traceback=trace, took=elapsed or None)
            first = claim.claimed_us if claim.first_attempt_us is None else claim.first_attempt_us
            since_first = elapsed + (claim.claimed_us - first) / SECOND
            outcome = retry_or_reject(
                receipt, retry, claim.attempts + 1, since_first, cause=error, error=text, keep=keep_rejected, draw=draw
            )
            if type(outcome) is Nack and isinstance(error, NackMessage) and error.delay is not None:
                outcome = msgspec.structs.replace(outcome, delay=micros(error.delay, "delay") / SECOND)
            return msgspec.structs.replace(outcome, traceback=trace, took=elapsed or None)
        case _:
            assert_never(result)


def retry_or_reject(
    receipt: Receipt,
    retry: Retry,
    attempts: int,
    elapsed: float,
    *,
    cause: BaseException | None = None,
    error: str | None = None,
    keep: bool = True,
    draw: Callable[[], float] = random.random,
) -> Nack | Reject:
    """The retry policy's outcome of a failed attempt. `attempts` includes it; `elapsed`: seconds since the first."""
    wait = retry.decide(attempts, cause, elapsed, draw)
    if wait is not None:  # a rule of the user's own may return anything
        wait = micros(wait, "the value of Retry.decide") / SECOND
    if wait is None:
        return Reject(receipt, reason="retries used up", error=error, keep=keep)
    return Nack(receipt, wait, error)


def refuse_to_run(claim: Claim, *, max_deliveries: int | None) -> Reject | None:
    """Reject unreadable and expired messages, and those delivered too often. None: the message may run."""
    if claim.unreadable is not None:
        return Reject(claim.receipt, reason="undecodable headers", error=claim.unreadable, attempted=False)
    if claim.expires_us is not None and claim.expires_us <= claim.claimed_us:
        return Reject(claim.receipt, reason="expired", attempted=False)
    if max_deliveries is not None and claim.deliveries > max_deliveries:
        return Reject(
            claim.receipt,
            reason="max_deliveries",
            error=f"delivered {claim.deliveries - 1} times (limit {max_deliveries})",
            attempted=False,
        )
    return None


def split_runnable(claims: list[Claim], *, max_deliveries: int | None) -> tuple[list[Claim], list[Reject]]:
    """(claims that may run, outcomes of the others)"""
    # The usual case: first deliveries that never expire.
    if max_deliveries != 0 and not any(
        [c.deliveries > 1 or c.expires_us is not None or c.unreadable is not None for c in claims]
    ):
        return claims, []
    runnable, refused = [], []
    for claim in claims:
        reject = refuse_to_run(claim, max_deliveries=max_deliveries)
        runnable.append(claim) if reject is None else refused.append(reject)
    return runnable, refused


def describe(error: BaseException) -> str:
    """Type and text of an error; the type alone if it has no text, or its `__str__` raises."""
    name = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return name
    return f"{name}: {text}" if text else name
