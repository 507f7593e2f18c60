"""Outcomes: the outcome of every result under every policy, and the change that each outcome makes."""

from __future__ import annotations

from uuid import uuid4

import msgspec
import pytest

from millpond import (
    Ack,
    AckPolicy,
    Claim,
    GiveBack,
    Message,
    Nack,
    NackMessage,
    Outcome,
    Receipt,
    Reject,
    RejectMessage,
    Retry,
    State,
)
from millpond.errors import InvalidTime
from millpond.outcome import (
    Change,
    Raised,
    Result,
    Returned,
    Unstarted,
    change,
    crash_delay,
    decide,
    describe,
    refuse_to_run,
)

RECEIPT = Receipt(uuid4(), 7)
RETRY = Retry(initial=2, multiplier=2, jitter=0, attempts=3)
BOOM = ValueError("boom")
TEXT = "ValueError: boom"


def claim(
    deliveries: int = 1,
    attempts: int = 0,
    expires_us: int | None = None,
    first_us: int | None = None,
    crashes: int = 0,
) -> Claim:
    return Claim(
        Message(queue="q", payload=b""),
        RECEIPT,
        deliveries,
        attempts,
        0,
        0,
        10_000_000,
        40_000_000,
        first_us,
        expires_us,
        crashes=crashes,
    )


P = AckPolicy
NACK = Nack(RECEIPT, delay=2.0, error=TEXT)


@pytest.mark.parametrize(
    ("policy", "result", "expected"),
    [
        *((policy, Unstarted(), GiveBack(RECEIPT)) for policy in P),
        (P.NACK_ON_ERROR, Returned(), Ack(RECEIPT)),
        (P.REJECT_ON_ERROR, Returned(), Ack(RECEIPT)),
        (P.ACK_FIRST, Returned(), Ack(RECEIPT)),
        (P.MANUAL, Returned(), Reject(RECEIPT, reason="no decision by the handler")),
        (P.NACK_ON_ERROR, Raised(BOOM), NACK),
        (P.REJECT_ON_ERROR, Raised(BOOM), Reject(RECEIPT, reason="error", error=TEXT)),
        (P.MANUAL, Raised(BOOM), NACK),
        *(
            (
                policy,
                Raised(RejectMessage("why")),
                Reject(RECEIPT, reason="why"),  # the reason is not repeated as the error
            )
            for policy in (P.NACK_ON_ERROR, P.REJECT_ON_ERROR, P.MANUAL)
        ),
        *(
            (
                policy,
                Raised(NackMessage("later")),
                Nack(RECEIPT, delay=2.0, error="NackMessage: later"),
            )
            for policy in (P.NACK_ON_ERROR, P.REJECT_ON_ERROR, P.MANUAL)
        ),
        *(
            (
                policy,
                Raised(NackMessage(delay=5)),
                Nack(RECEIPT, delay=5.0, error="NackMessage: nacked by the handler"),
            )
            for policy in (P.NACK_ON_ERROR, P.REJECT_ON_ERROR, P.MANUAL)
        ),
    ],
)
def test_every_result_under_every_policy(policy: AckPolicy, result: Result, expected: Outcome) -> None:
    """NackMessage(delay=5) waits five seconds; it is not dead-lettered."""
    assert decide(claim(), result, policy=policy, retry=RETRY) == expected


@pytest.mark.parametrize("error", [BOOM, NackMessage("again"), NackMessage(delay=5)])
def test_retries_end(error: Exception) -> None:
    """The limit holds for a nack by hand too."""
    assert isinstance(decide(claim(2, 1), Raised(error), retry=RETRY), Nack)
    last = decide(claim(3, 2), Raised(error), retry=RETRY)
    assert last == Reject(RECEIPT, reason="retries used up", error=describe(error))


def test_crashes_are_no_attempts() -> None:
    assert isinstance(decide(claim(deliveries=9, attempts=1), Raised(BOOM), retry=RETRY), Nack)


def test_the_policy_sees_the_exception() -> None:
    retry = Retry(never=(ValueError,))
    assert isinstance(decide(claim(), Raised(BOOM), retry=retry), Reject)
    assert isinstance(decide(claim(), Raised(KeyError()), retry=retry), Nack)


def test_total_counts_from_the_first_attempt() -> None:
    retry = Retry.constant(1, attempts=None)
    limited = Retry(initial=1, multiplier=1, jitter=0, attempts=None, total=12)
    late = claim(5, 4, first_us=0)  # claimed ten seconds after the first attempt began
    assert isinstance(decide(late, Raised(BOOM), retry=retry, elapsed=100), Nack)
    assert isinstance(decide(late, Raised(BOOM), retry=limited, elapsed=1), Nack)
    assert isinstance(decide(late, Raised(BOOM), retry=limited, elapsed=1.1), Reject)
    assert isinstance(decide(claim(), Raised(BOOM), retry=limited, elapsed=11), Nack)


def test_what_is_kept_is_the_callers_choice() -> None:
    assert decide(claim(), Returned(), retry=RETRY, keep_acked=False) == Ack(RECEIPT, keep=False)
    rejected = decide(claim(), Raised(RejectMessage()), retry=RETRY, keep_rejected=False)
    assert isinstance(rejected, Reject) and not rejected.keep
    assert isinstance(decide(claim(3, 2), Raised(BOOM), retry=RETRY, keep_rejected=False), Reject)


def test_jitter_is_drawn_for_each_message() -> None:
    retry = Retry(initial=10, multiplier=1, jitter=0.5)
    waits = {decide(claim(), Raised(BOOM), retry=retry, draw=lambda d=d: d).delay for d in (0.0, 1.0)}  # type: ignore[misc,union-attr]
    assert waits == {5.0, 15.0}


# --- changes by outcomes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Ack(RECEIPT), Change(State.COMPLETED, 1)),
        (Ack(RECEIPT, keep=False), Change(State.COMPLETED, 1, keep=False)),
        (Nack(RECEIPT), Change(State.RETRYABLE, 1, delay_us=0)),
        (Nack(RECEIPT, 1.5, "e"), Change(State.RETRYABLE, 1, delay_us=1_500_000, error="e")),
        (Reject(RECEIPT), Change(State.FAILED, 1, reason="rejected")),
        (Reject(RECEIPT, "r", "e"), Change(State.FAILED, 1, reason="r", error="e")),
        (Reject(RECEIPT, attempted=False), Change(State.FAILED, 0, reason="rejected")),
        (Reject(RECEIPT, keep=False), Change(State.FAILED, 1, reason="rejected", keep=False)),
        (GiveBack(RECEIPT), Change(State.PENDING, 0, deliveries=-1)),
        (GiveBack(RECEIPT, delivered=True), Change(State.PENDING, 0)),
    ],
)
def test_every_outcome(outcome: Outcome, expected: Change) -> None:
    assert msgspec.structs.replace(change(outcome), attempt=None, failure=None) == expected


def test_a_failed_attempt_is_part_of_the_change() -> None:
    for outcome in (Nack(RECEIPT, 0, "e", "trace", 1.5), Reject(RECEIPT, "r", "e", traceback="trace", took=1.5)):
        assert change(outcome).attempt == '{"error":"e","traceback":"trace","took":1.5}'
    assert change(Reject(RECEIPT, attempted=False)).attempt is None
    for other in (Ack(RECEIPT), GiveBack(RECEIPT)):
        assert change(other).attempt is None
    assert change(Reject(RECEIPT, "r", "row 1")).failure == change(Reject(RECEIPT, "r", "row 2")).failure
    assert change(Nack(RECEIPT, 0, "e")).failure is None


def test_an_impossible_delay_is_refused() -> None:
    for delay in (-1, float("nan"), float("inf")):
        with pytest.raises(InvalidTime):
            change(Nack(RECEIPT, delay=delay))
        with pytest.raises(InvalidTime):
            NackMessage(delay=delay)


def test_texts_are_made_storable() -> None:
    changed = change(Reject(RECEIPT, reason="a\0b", error="x" * 100_000))
    assert changed.reason == "a\N{REPLACEMENT CHARACTER}b"
    assert changed.error is not None and len(changed.error.encode()) == 8192 and changed.error.endswith("…")


# --- poison and expired -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "max_deliveries", "reason"),
    [
        (claim(), None, None),
        (claim(100, 99), None, None),
        (claim(100, 0), None, None),
        (claim(100, 0, crashes=99), None, None),
        (claim(1, 0), 1, None),
        (claim(2, 0), 1, "max_deliveries"),
        (claim(2, 1), 1, "max_deliveries"),
        (claim(expires_us=10_000_001), None, None),
        (claim(expires_us=10_000_000), None, "expired"),
        (claim(4, 0, expires_us=0), 1, "expired"),
    ],
)
def test_what_is_not_run(of: Claim, max_deliveries: int | None, reason: str | None) -> None:
    reject = refuse_to_run(of, max_deliveries=max_deliveries)
    assert (reject and reject.reason) == reason
    if reject:
        assert reject.receipt == RECEIPT and not reject.attempted and reject.keep


def test_the_wait_after_a_crash_grows_up_to_a_bound() -> None:
    assert [crash_delay(n) for n in range(11)] == [0, 0, 1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_describe() -> None:
    assert describe(BOOM) == TEXT
    assert describe(KeyError()) == "KeyError"


def test_the_error_of_a_rejection_is_its_cause() -> None:
    try:
        raise RejectMessage("no such sku") from KeyError("sku")
    except RejectMessage as e:
        rejected = e
    outcome = decide(claim(), Raised(rejected), retry=Retry())
    assert outcome == Reject(RECEIPT, reason="no such sku", error="KeyError: 'sku'")
