"""Settle: outcomes, each fenced by its receipt; a stale one is reported and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from millpond import Ack, Capability, Claim, GiveBack, ManualClock, Nack, Outcome, Receipt, Reject, State, Transport
from millpond.errors import InvalidOption, InvalidTime
from tests.conformance.backends import requires
from tests.conformance.conftest import Connect
from tests.conformance.messages import bodies, claim_one, counts, message, publish, row


async def test_ack_empties_the_queue(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    assert await transport.settle([Ack(claim.receipt)]) == []
    clock.advance(3600)
    assert await transport.claim(["q"]) == []


async def test_nack_delivers_again(transport: Transport) -> None:
    await publish(transport)
    first = await claim_one(transport)
    assert await transport.settle([Nack(first.receipt)]) == []
    second = await claim_one(transport)
    assert second.receipt.id == first.receipt.id
    assert (second.deliveries, second.attempts, second.crashes) == (2, 1, 0)
    assert second.redelivered


@pytest.mark.parametrize("delay", [5, 5.0, timedelta(seconds=5)])
async def test_nack_waits_its_delay(transport: Transport, clock: ManualClock, delay: float) -> None:
    """A nack with a delay is a nack."""
    await publish(transport)
    claim = await claim_one(transport)
    clock.advance(1)
    assert await transport.settle([Nack(claim.receipt, delay=delay)]) == []
    clock.advance(4.999999)
    assert await transport.claim(["q"]) == []
    clock.advance(0.000001)
    again = await claim_one(transport)
    assert again.due_us == claim.claimed_us + 6_000_000


async def test_reject_never_comes_again(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    assert await transport.settle([Reject(claim.receipt, reason="bad")]) == []
    clock.advance(86_400)
    assert await transport.claim(["q"]) == []


@requires(Capability.ARCHIVE)
async def test_rejects_keep_each_its_own_reason_and_error(transport: Transport) -> None:
    await transport.publish([message(b"%d" % n) for n in range(6)])
    claims = await transport.claim(["q"], limit=6)
    ids = [claim.receipt.id for claim in claims]
    assert await transport.settle([Nack(claims[5].receipt, error="earlier")]) == []
    (again,) = await transport.claim(["q"])
    stale = Receipt(uuid4(), 7)
    outcomes = [
        Reject(claims[0].receipt, reason="one", error='it\'s "1" \N{WATER WAVE}'),
        Reject(claims[1].receipt, reason="two", error=None),
        Reject(stale, reason="lost", error="lost"),
        Reject(claims[2].receipt, reason="two", error="%s :three $1"),
        Reject(claims[3].receipt, reason="expired", attempted=False),
        Ack(claims[4].receipt),
        Reject(again.receipt, reason="six"),
    ]
    assert await transport.settle(outcomes) == [stale]
    found = [await row(transport, id_) for id_ in ids]
    assert [(r.state, r.reason, r.error, r.attempts) for r in found] == [
        (State.FAILED, "one", 'it\'s "1" \N{WATER WAVE}', 1),
        (State.FAILED, "two", None, 1),
        (State.FAILED, "two", "%s :three $1", 1),
        (State.FAILED, "expired", None, 0),
        (State.COMPLETED, None, None, 1),
        (State.FAILED, "six", "earlier", 2),
    ]
    assert await transport.settle(outcomes) == [stale]  # again, as after a lost reply


async def test_give_back_spends_no_delivery(transport: Transport) -> None:
    """Unstarted messages go back; the delivery is not counted."""
    await publish(transport)
    for _ in range(5):
        claim = await claim_one(transport, max_deliveries=1)
        assert (claim.deliveries, claim.attempts) == (1, 0)
        assert await transport.settle([GiveBack(claim.receipt)]) == []


@requires(Capability.ORDER)
async def test_give_back_keeps_the_place_in_the_queue(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, b"first")
    clock.advance(1)
    await publish(transport, b"second")
    claim = await claim_one(transport)
    clock.advance(1)
    await transport.settle([GiveBack(claim.receipt)])
    assert await bodies(transport) == [b"first", b"second"]


async def test_acked_of_two_only_the_other_returns(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"1"), message(b"2")])
    one, two = await transport.claim(["q"], 2, lease=10)
    assert await transport.settle([Ack(one.receipt)]) == []
    clock.advance(10)
    again = await claim_one(transport)
    assert again.message.payload == b"2"
    # (acked already, lost meanwhile): the first is still done, the second is refused
    assert await transport.settle([Ack(one.receipt), Ack(two.receipt)]) == [two.receipt]


async def test_one_batch_of_all_outcomes(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(str(n).encode()) for n in range(8)])
    c = await transport.claim(["q"], 8)
    refused = await transport.settle(
        [
            Ack(c[0].receipt),
            Nack(c[1].receipt, delay=10, error="later"),
            Reject(c[2].receipt, reason="never"),
            GiveBack(c[3].receipt),
            Nack(c[4].receipt, delay=20),
            Ack(c[5].receipt, keep=False),
            Reject(c[6].receipt, keep=False),
            Nack(c[7].receipt),
        ]
    )
    assert refused == []
    assert await bodies(transport) == [b"3", b"7"]
    clock.advance(10)
    assert await bodies(transport) == [b"1"]
    clock.advance(10)
    assert await bodies(transport) == [b"4"]


async def test_nothing_to_settle_is_no_error(transport: Transport) -> None:
    assert await transport.settle([]) == []


# --- the fence -------------------------------------------------------------------------------------------

OUTCOMES = [
    pytest.param(lambda r: Ack(r), id="ack"),
    pytest.param(lambda r: Ack(r, keep=False), id="ack-drop"),
    pytest.param(lambda r: Nack(r, delay=60), id="nack"),
    pytest.param(lambda r: Reject(r), id="reject"),
    pytest.param(lambda r: GiveBack(r), id="give-back"),
]


@pytest.mark.parametrize("make", OUTCOMES)
async def test_a_zombie_is_refused_and_changes_nothing(transport: Transport, clock: ManualClock, make: object) -> None:
    """The late outcome of a worker that was considered dead."""
    await publish(transport)
    zombie = await claim_one(transport, lease=10)
    clock.advance(10)
    owner = await claim_one(transport, lease=10)
    assert await transport.settle([make(zombie.receipt)]) == [zombie.receipt]  # type: ignore[operator]
    assert await transport.claim(["q"]) == []
    assert await transport.extend([owner.receipt]) == []
    assert await transport.settle([Ack(owner.receipt)]) == []
    assert await transport.settle([make(zombie.receipt)]) == [zombie.receipt]  # type: ignore[operator]


@pytest.mark.parametrize("make", OUTCOMES)
async def test_a_reaped_receipt_is_stale_before_anybody_claims_again(
    transport: Transport, clock: ManualClock, make: object
) -> None:
    await publish(transport)
    zombie = await claim_one(transport, lease=10)
    clock.advance(10)
    assert await transport.workers.reap() == 1
    assert await transport.settle([make(zombie.receipt)]) == [zombie.receipt]  # type: ignore[operator]
    assert (await claim_one(transport)).deliveries == 2


@pytest.mark.parametrize("make", OUTCOMES)
async def test_a_lapsed_lease_alone_makes_no_receipt_stale(
    transport: Transport, clock: ManualClock, make: object
) -> None:
    """A receipt is stale once the message was reaped, given back or settled by another claim, not by time alone."""
    await publish(transport)
    claim = await claim_one(transport, lease=10)
    clock.advance(3600)
    assert await transport.settle([make(claim.receipt)]) == []  # type: ignore[operator]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (Ack, Ack, True),
        (Reject, Reject, True),
        (Nack, Nack, True),
        (GiveBack, GiveBack, True),
        (Ack, Reject, False),
        (Ack, Nack, False),
        (Ack, GiveBack, False),
        (Reject, Ack, False),
        (Nack, Ack, False),
        (Nack, Reject, False),
        (Nack, GiveBack, False),
        (GiveBack, Nack, False),
        (GiveBack, Ack, False),
    ],
)
async def test_the_same_settle_again_is_success_another_is_refused(
    transport: Transport, first: type[Outcome], second: type[Outcome], same: bool
) -> None:
    """Ack twice: after a lost reply of the commit the caller settles again."""
    await publish(transport)
    claim = await claim_one(transport)
    assert await transport.settle([first(claim.receipt)]) == []
    assert await transport.settle([second(claim.receipt)]) == ([] if same else [claim.receipt])
    expected = {Ack: 0, Reject: 0, Nack: 1, GiveBack: 1}[first]
    assert len(await transport.claim(["q"], 10)) == expected


async def test_a_nack_repeated_after_the_next_claim_is_refused(transport: Transport) -> None:
    await publish(transport)
    first = await claim_one(transport)
    await transport.settle([Nack(first.receipt)])
    second = await claim_one(transport)
    assert await transport.settle([Nack(first.receipt)]) == [first.receipt]
    assert await transport.settle([Ack(second.receipt)]) == []


async def test_stale_and_unknown_receipts_never_fail_their_neighbours(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"1"), message(b"2"), message(b"3")])
    stale = await claim_one(transport, lease=1)
    clock.advance(1)
    claims = await transport.claim(["q"], 10)
    unknown, wrong = Receipt(uuid4(), 7), Receipt(claims[0].receipt.id, claims[0].receipt.token ^ 1)
    refused = await transport.settle(
        [Ack(unknown), Ack(stale.receipt), Nack(wrong), *(Ack(claim.receipt) for claim in claims)]
    )
    assert set(refused) == {unknown, stale.receipt, wrong}
    assert await transport.claim(["q"], 10) == []
    clock.advance(3600)
    assert await transport.workers.reap() == 0


async def test_of_two_outcomes_with_one_receipt_the_first_counts(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    assert await transport.settle([Nack(claim.receipt), Ack(claim.receipt), Reject(claim.receipt)]) == []
    assert (await claim_one(transport)).attempts == 1


@requires(Capability.FREE_RECEIPTS)
async def test_another_handle_may_settle(transport: Transport, connect: Connect) -> None:
    other = await connect()
    await publish(transport)
    claim = await claim_one(transport)
    assert await other.settle([Nack(claim.receipt)]) == []
    assert await transport.settle([Ack(claim.receipt)]) == [claim.receipt]


async def test_a_bad_delay_is_refused_before_anything_is_written(transport: Transport) -> None:
    await transport.publish([message(b"1"), message(b"2")])
    one, two = await transport.claim(["q"], 2)
    with pytest.raises(InvalidTime):
        await transport.settle([Ack(one.receipt), Nack(two.receipt, delay=-1)])
    assert await transport.extend([one.receipt, two.receipt]) == []


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda claim: [Ack(claim.receipt), claim], "not Claim"),
        (lambda claim: [claim.receipt], r"Ack\(claim.receipt\)"),
        (lambda claim: ["ack"], "not str"),
        (lambda claim: [None], "not NoneType"),
        (lambda claim: [Ack(claim)], "claim.receipt"),
        (lambda claim: [Ack(claim.receipt), Nack(claim.receipt.id)], "not UUID"),
        (lambda claim: Ack(claim.receipt), "a list"),
    ],
)
async def test_what_is_no_outcome_is_refused_before_anything_is_written(
    transport: Transport, make: Callable[[Claim], Any], hint: str
) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    with pytest.raises(InvalidOption, match=hint):
        await transport.settle(make(claim))
    with pytest.raises(InvalidOption, match=r"claim\.receipt"):
        await transport.extend([claim])  # type: ignore[list-item]
    assert await transport.settle([Ack(claim.receipt)]) == []


# --- many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        OUTCOMES[0],
        pytest.param(lambda r: Nack(r, delay=60), id="nack", marks=pytest.mark.slow),
    ],
)
async def test_more_outcomes_than_a_statement_has_parameters(transport: Transport, make: object) -> None:
    """More than 32,767 parameters in one call must not fail."""
    one_database = Capability.TRANSACTIONS | Capability.BULK in transport.capabilities  # others: no statement, or many
    count = 33_000 if one_database else 3_000
    for _ in range(3):
        await transport.publish([message(b"") for _ in range(count // 3)])
    claims = await transport.claim(["q"], count)
    assert len(claims) == count
    assert await transport.settle([make(claim.receipt) for claim in claims]) == []  # type: ignore[operator]
    assert await transport.claim(["q"], 10) == []


async def test_each_nack_of_a_batch_keeps_its_own_delay_and_error(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(str(n).encode()) for n in range(30)])
    claims = await transport.claim(["q"], 30)
    await transport.settle([Nack(c.receipt, delay=30 - n, error=f"e{n}") for n, c in enumerate(claims)])
    clock.advance(30)
    assert await bodies(transport) == [str(n).encode() for n in reversed(range(30))]


@requires(Capability.BROWSE)
@pytest.mark.parametrize(
    "error",
    [
        "",
        "NUL \0 inside",
        "half \ud800 of a pair",
        "ü𝄞" * 10_000,
        "'; DROP TABLE message; --",
        "{braces} %s :name ?",
    ],
)
async def test_any_error_text_can_be_kept(transport: Transport, error: str) -> None:
    """An error text that cannot be stored is made storable and shortened."""
    ids = [p.id for p in await transport.publish([message(b"1"), message(b"2"), message(b"3")])]
    one, two, three = await transport.claim(["q"], 3)
    refused = await transport.settle(
        [Nack(one.receipt, error=error), Reject(two.receipt, reason=error, error=error), Ack(three.receipt)]
    )
    assert refused == []
    assert await counts(transport) == {State.RETRYABLE: 1, State.FAILED: 1, State.COMPLETED: 1}
    kept = (await row(transport, ids[0])).error
    assert kept is not None and len(kept) <= 8 * 1024
    assert kept[:5] == error.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()[:5]
    rejected = await row(transport, ids[1])
    assert rejected.reason == rejected.error == kept
