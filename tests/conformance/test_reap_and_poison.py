"""Crashes: lapsed leases come back, and a message that keeps killing its workers is stopped."""

from __future__ import annotations

import asyncio

import pytest

from millpond import Ack, Capability, Claim, GiveBack, ManualClock, Nack, State, Store
from tests.conformance.backends import requires
from tests.conformance.messages import bodies, claim_one, counts, message, publish, row


async def crash(transport: Store, clock: ManualClock, times: int, queue: str = "q") -> None:
    """Claim and die, so many times."""
    for _ in range(times):
        claims = await transport.claim([queue], 1, lease=1, max_crashes=None)
        assert len(claims) == 1
        clock.advance(1)
        assert await transport.reap() == 1


async def test_a_lapsed_lease_comes_back_by_the_next_claim(transport: Store, clock: ManualClock) -> None:
    """FS-C14, TSK-C16, TSK-C17, RDS-C1, RDS-D4: for people who claim without a worker"""
    await publish(transport)
    await claim_one(transport, lease=10)
    clock.advance(9.999999)
    assert await transport.claim(["q"]) == []
    clock.advance(0.000001)
    again = await claim_one(transport)
    assert (again.deliveries, again.attempts, again.unfinished) == (2, 0, 1)


@requires(Capability.ORDER)
async def test_reap_tells_how_many(transport: Store, clock: ManualClock) -> None:
    await transport.publish([message(b"1"), message(b"2"), message(b"3"), message(b"4")])
    await transport.claim(["q"], 2, lease=10)
    await transport.claim(["q"], 1, lease=20)
    assert await transport.reap() == 0
    clock.advance(10)
    assert await transport.reap() == 2
    assert await transport.reap() == 0
    assert await bodies(transport) == [b"1", b"2", b"4"]


async def test_thousands_of_lapsed_leases_come_back(transport: Store, clock: ManualClock) -> None:
    await transport.publish([message(b"") for _ in range(2_500)])
    await transport.claim(["q"], 2_500, lease=1)
    clock.advance(1)
    assert await transport.reap() == 2_500


@requires(Capability.ORDER)
async def test_a_reaped_message_keeps_its_place(transport: Store, clock: ManualClock) -> None:
    await publish(transport, b"old")
    clock.advance(1)
    await publish(transport, b"young")
    await claim_one(transport, lease=1)
    clock.advance(1)
    assert await transport.reap() == 1
    assert await bodies(transport) == [b"old", b"young"]


async def test_a_reaper_leaves_other_claims_and_due_times_alone(transport: Store, clock: ManualClock) -> None:
    """FS-C14, FS-D2: a scheduled retry keeps its delay, a fresh claim its owner"""
    await transport.publish([message(b"retry"), message(b"held"), message(b"lost", "other")])
    retry, held = await transport.claim(["q"], 2, lease=60)
    await transport.claim(["other"], 1, lease=5)
    await transport.settle([Nack(retry.receipt, delay=30)])
    clock.advance(5)
    assert await transport.reap() == 1
    assert await transport.claim(["q"], 10) == []
    assert await transport.extend([held.receipt]) == []
    assert await bodies(transport, ["other"]) == [b"lost"]


async def test_a_reaper_racing_fresh_claims_never_takes_one_back(transport: Store, clock: ManualClock) -> None:
    """FS-D2: a second reaper reset a row that had been claimed anew"""
    await transport.publish([message(str(n).encode()) for n in range(50)])
    for _ in range(5):
        await transport.claim(["q"], 50, lease=1, max_crashes=None)
        clock.advance(1)
        claimed, *_ = await asyncio.gather(
            transport.claim(["q"], 50, lease=60, max_crashes=None, suspects=False),
            *(transport.reap() for _ in range(4)),
        )
        assert await transport.extend([claim.receipt for claim in claimed], lease=60) == []
        assert await transport.settle([GiveBack(claim.receipt) for claim in claimed]) == []
        # Nack what is left, so that nothing becomes a suspect in the next round.
        while rest := await transport.claim(["q"], 50, max_crashes=None):
            assert await transport.settle([Nack(claim.receipt, delay=0.5) for claim in rest]) == []
        clock.advance(0.5)


# --- max_crashes and max_deliveries -----------------------------------------------------------------------


@requires(Capability.ARCHIVE)
async def test_max_crashes_is_on_by_default(transport: Store, clock: ManualClock) -> None:
    id_ = await publish(transport)
    for n in range(3):
        assert (await claim_one(transport, lease=1)).unfinished == n
        clock.advance(1)
    assert await transport.claim(["q"]) == []
    failed = await row(transport, id_)
    assert (failed.state, failed.reason) == (State.FAILED, "max_crashes")
    assert (failed.deliveries, failed.attempts) == (4, 0)
    assert failed.error is not None and "3" in failed.error
    assert failed.first_attempt_us is None and failed.last_attempt_us is None


async def test_retries_never_spend_max_crashes(transport: Store, clock: ManualClock) -> None:
    await publish(transport)
    for n in range(20):
        claim = await claim_one(transport, max_crashes=1)
        assert (claim.deliveries, claim.attempts) == (n + 1, n)
        await transport.settle([Nack(claim.receipt)])


@requires(Capability.ARCHIVE)
async def test_max_deliveries_counts_all(transport: Store, clock: ManualClock) -> None:
    """FS-C5: with limit 1 the claim after a crash fails it unhandled, counters 0/2"""
    id_ = await publish(transport)
    await claim_one(transport, lease=1, max_deliveries=1)
    clock.advance(1)
    assert await transport.claim(["q"], max_deliveries=1) == []
    failed = await row(transport, id_)
    assert (failed.state, failed.reason, failed.attempts, failed.deliveries) == (State.FAILED, "max_deliveries", 0, 2)


@requires(Capability.ARCHIVE)
async def test_max_deliveries_counts_retries_too(transport: Store) -> None:
    id_ = await publish(transport)
    for _ in range(3):
        claim = await claim_one(transport, max_deliveries=3)
        await transport.settle([Nack(claim.receipt, error="no luck")])
    assert await transport.claim(["q"], max_deliveries=3) == []
    failed = await row(transport, id_)
    assert (failed.state, failed.reason, failed.attempts, failed.deliveries) == (State.FAILED, "max_deliveries", 3, 4)


async def test_no_limits_by_request(transport: Store, clock: ManualClock) -> None:
    await publish(transport)
    for n in range(10):
        claim = await claim_one(transport, lease=1, max_crashes=None)
        assert claim.deliveries == n + 1
        clock.advance(1)


async def test_behind_a_poison_the_others_are_found_by_the_same_claim(transport: Store, clock: ManualClock) -> None:
    """TSK-D10: poison must not stay at the head"""
    await publish(transport, b"poison", priority=0)
    await crash(transport, clock, 3)
    await publish(transport, b"good")
    assert await bodies(transport, limit=1) == [b"good"]
    assert await transport.claim(["q"], 10) == []


@requires(Capability.ARCHIVE)
async def test_a_whole_batch_of_poison_is_failed_at_once(transport: Store, clock: ManualClock) -> None:
    await transport.publish([message(b"") for _ in range(30)])
    claims = await transport.claim(["q"], 30)
    await transport.settle([Nack(claim.receipt) for claim in claims])
    assert await transport.claim(["q"], 10, max_deliveries=1) == []
    assert await counts(transport) == {State.FAILED: 30}


# --- suspects --------------------------------------------------------------------------------------------


async def test_a_suspect_is_claimed_alone(transport: Store, clock: ManualClock) -> None:
    """FS-D17: a poison must not spend its neighbours' deliveries"""
    await publish(transport, b"suspect")
    await crash(transport, clock, 2)
    await transport.publish([message(str(n).encode()) for n in range(3)])
    first = await bodies(transport, limit=10)
    second = await bodies(transport, limit=10)
    assert sorted([first, second]) == [[b"0", b"1", b"2"], [b"suspect"]]


async def test_one_crash_makes_no_suspect(transport: Store, clock: ManualClock) -> None:
    await transport.publish([message(str(n).encode()) for n in range(3)])
    assert len(await transport.claim(["q"], 3, lease=1)) == 3
    clock.advance(1)
    assert await bodies(transport, limit=10) == [b"0", b"1", b"2"]


async def test_suspects_come_one_by_one(transport: Store, clock: ManualClock) -> None:
    await transport.publish([message(str(n).encode()) for n in range(3)])
    for _ in range(2):
        assert len(await transport.claim(["q"], 3, lease=1)) == 3
        clock.advance(1)
    got = [await bodies(transport, limit=10) for _ in range(4)]
    assert got == [[b"0"], [b"1"], [b"2"], []]


async def test_suspects_may_be_left_where_they_are(transport: Store, clock: ManualClock) -> None:
    await publish(transport, b"suspect")
    await crash(transport, clock, 2)
    await publish(transport, b"good")
    assert await bodies(transport, limit=10, suspects=False) == [b"good"]
    assert await bodies(transport, limit=10, suspects=False) == []
    assert await bodies(transport, limit=10) == [b"suspect"]


async def test_a_suspect_of_several_queues_is_alone_too(transport: Store, clock: ManualClock) -> None:
    await publish(transport, b"suspect", "a")
    await crash(transport, clock, 2, "a")
    for queue in ("a", "b", "c"):
        await publish(transport, queue.encode(), queue)
    got = [sorted(await bodies(transport, ["a", "b", "c"], limit=9)) for _ in range(4)]
    assert [b"suspect"] in got
    assert sorted(body for claim in got for body in claim) == [b"a", b"b", b"c", b"suspect"]


async def test_a_suspect_that_succeeds_is_like_any_other(transport: Store, clock: ManualClock) -> None:
    await publish(transport)
    await crash(transport, clock, 2)
    claim = await claim_one(transport)
    assert claim.unfinished == 2
    assert await transport.settle([Ack(claim.receipt)]) == []
    assert await transport.claim(["q"]) == []


async def test_a_suspect_stays_one_through_retry_and_give_back(transport: Store, clock: ManualClock) -> None:
    await publish(transport, b"suspect")
    await crash(transport, clock, 2)
    for outcome in (Nack, GiveBack, Nack):
        claim: Claim = await claim_one(transport)
        assert claim.unfinished == 2
        await transport.settle([outcome(claim.receipt)])
        await publish(transport, b"good")
        assert await bodies(transport, suspects=False) == [b"good"]
    assert await bodies(transport) == [b"suspect"]


async def test_interrupted_deliveries_make_a_suspect_too(transport: Store) -> None:
    """FS-C15: a handler cancelled at stop: PENDING, attempts 0, and the delivery counts"""
    await publish(transport, b"slow")
    for n in range(2):
        claim = await claim_one(transport, suspects=False)
        assert (claim.deliveries, claim.attempts, claim.unfinished) == (n + 1, 0, n)
        assert await transport.settle([GiveBack(claim.receipt, delivered=True)]) == []
    assert await transport.claim(["q"], suspects=False) == []
    await publish(transport, b"good")
    assert sorted([await bodies(transport), await bodies(transport)]) == [[b"good"], [b"slow"]]


async def test_unfinished_deliveries_survive_the_retries_between(transport: Store, clock: ManualClock) -> None:
    await publish(transport)
    for expected in (0, 1, 2):
        claim = await claim_one(transport, lease=1)
        assert claim.unfinished == expected
        await transport.settle([Nack(claim.receipt)])
        claim = await claim_one(transport, lease=1)
        assert claim.unfinished == expected
        clock.advance(1)
    assert await transport.claim(["q"]) == []


# --- expires ---------------------------------------------------------------------------------------------


@requires(Capability.ARCHIVE)
@pytest.mark.parametrize("after", [10, 11])
async def test_an_expired_message_is_failed_and_not_returned(transport: Store, clock: ManualClock, after: int) -> None:
    id_ = await publish(transport, expires=10)
    clock.advance(after)
    assert await transport.claim(["q"]) == []
    failed = await row(transport, id_)
    assert (failed.state, failed.reason, failed.attempts) == (State.FAILED, "expired", 0)


async def test_before_it_expires_a_message_is_delivered(transport: Store, clock: ManualClock) -> None:
    await publish(transport, expires=10)
    clock.advance(9.999999)
    claim = await claim_one(transport)
    assert claim.expires_us == claim.created_us + 10_000_000
    clock.advance(100)  # a handler that began in time may end when it likes
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_expires_as_a_moment(transport: Store, clock: ManualClock) -> None:
    await publish(transport)
    moment = (await claim_one(transport)).claimed_at
    await publish(transport, b"gone", expires=moment)
    await publish(transport, b"here", expires=moment.replace(year=2027))
    assert await bodies(transport) == [b"here"]


async def test_a_retry_that_comes_too_late_expires(transport: Store, clock: ManualClock) -> None:
    await publish(transport, expires=10)
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt, delay=20)])
    clock.advance(20)
    assert await transport.claim(["q"]) == []
