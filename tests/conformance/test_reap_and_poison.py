"""Crashes: lapsed leases come back, and a message that keeps killing its workers is stopped."""

from __future__ import annotations

import asyncio

import pytest

from millpond import Ack, Capability, GiveBack, ManualClock, Nack, State, Transport
from tests.conformance.backends import requires
from tests.conformance.messages import bodies, claim_one, counts, crash, message, publish, row


async def test_a_lapsed_lease_comes_back_by_the_next_claim(transport: Transport, clock: ManualClock) -> None:
    """For callers who claim without a worker."""
    await publish(transport)
    await claim_one(transport, lease=10)
    clock.advance(9.999999)
    assert await transport.claim(["q"]) == []
    clock.advance(0.000001)
    again = await claim_one(transport)
    assert (again.deliveries, again.attempts) == (2, 0)


@requires(Capability.ORDER)
async def test_reap_tells_how_many(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"1"), message(b"2"), message(b"3"), message(b"4")])
    await transport.claim(["q"], 2, lease=10)
    await transport.claim(["q"], 1, lease=20)
    assert await transport.workers.reap() == 0
    clock.advance(10)
    assert await transport.workers.reap() == 2
    assert await transport.workers.reap() == 0
    assert await bodies(transport) == [b"1", b"2", b"4"]


async def test_thousands_of_lapsed_leases_come_back(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"") for _ in range(2_500)])
    await transport.claim(["q"], 2_500, lease=1)
    clock.advance(1)
    assert await transport.workers.reap() == 2_500


@requires(Capability.ORDER)
async def test_a_reaped_message_keeps_its_place(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, b"old")
    clock.advance(1)
    await publish(transport, b"young")
    await claim_one(transport, lease=1)
    clock.advance(1)
    assert await transport.workers.reap() == 1
    assert await bodies(transport) == [b"old", b"young"]


async def test_a_reaper_leaves_other_claims_and_due_times_alone(transport: Transport, clock: ManualClock) -> None:
    """A scheduled retry keeps its delay, a fresh claim its owner."""
    await transport.publish([message(b"retry"), message(b"held"), message(b"lost", "other")])
    retry, held = await transport.claim(["q"], 2, lease=60)
    await transport.claim(["other"], 1, lease=5)
    await transport.settle([Nack(retry.receipt, delay=30)])
    clock.advance(5)
    assert await transport.workers.reap() == 1
    assert await transport.claim(["q"], 10) == []
    assert await transport.extend([held.receipt]) == []
    assert await bodies(transport, ["other"]) == [b"lost"]


async def test_a_reaper_racing_fresh_claims_never_takes_one_back(transport: Transport, clock: ManualClock) -> None:
    """Two reapers run at once; neither resets a row that was claimed again."""
    await transport.publish([message(str(n).encode()) for n in range(50)])
    for _ in range(5):
        await transport.claim(["q"], 50, lease=1)
        clock.advance(1)
        claimed, *_ = await asyncio.gather(
            transport.claim(["q"], 50, lease=60, suspects=False),
            *(transport.workers.reap() for _ in range(4)),
        )
        assert await transport.extend([claim.receipt for claim in claimed], lease=60) == []
        assert await transport.settle([GiveBack(claim.receipt) for claim in claimed]) == []
        while rest := await transport.claim(["q"], 50):
            assert await transport.settle([Nack(claim.receipt, delay=0.5) for claim in rest]) == []
        clock.advance(0.5)


# --- crashes and max_deliveries ---------------------------------------------------------------------------


async def test_a_crash_counts_until_the_next_result(transport: Transport) -> None:
    await publish(transport)
    for n in range(5):
        claim = await claim_one(transport)
        assert (claim.deliveries, claim.attempts, claim.crashes, claim.suspect) == (n + 1, 0, n, n > 1)
        assert await transport.settle([GiveBack(claim.receipt, crashed=True)]) == []
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt)])
    claim = await claim_one(transport, suspects=False)
    assert (claim.deliveries, claim.attempts, claim.crashes) == (7, 1, 0)


async def test_an_orderly_stop_is_no_crash(transport: Transport) -> None:
    """However often a deploy interrupts a long job, it is no suspect; `max_deliveries` counts it."""
    await publish(transport)
    for n in range(5):
        claim = await claim_one(transport, suspects=False)
        assert (claim.deliveries, claim.attempts, claim.crashes) == (n + 1, 0, 0)
        assert await transport.settle([GiveBack(claim.receipt, delivered=True)]) == []
    assert await transport.claim(["q"], max_deliveries=5) == []


async def test_an_orderly_stop_leaves_earlier_crashes(transport: Transport) -> None:
    await publish(transport)
    await crash(transport, 2)
    claim = await claim_one(transport)
    await transport.settle([GiveBack(claim.receipt, delivered=True)])
    assert (await claim_one(transport)).crashes == 2


@requires(Capability.FREE_RECEIPTS)
async def test_the_lapse_of_a_claim_without_a_worker_is_no_crash(transport: Transport, clock: ManualClock) -> None:
    """A remote client or a program without a worker: no sign shows whether it died. (A broker counts it.)

    After the first lapse the message is due at once, and from then on the wait grows.
    """
    await publish(transport)
    for n, wait in enumerate((0, 0, 1, 2, 4, 8)):
        if wait:
            clock.advance(wait - 0.5)
            assert await transport.claim(["q"], suspects=False) == []
            clock.advance(0.5)
        claim = await claim_one(transport, lease=1, suspects=False)
        assert (claim.deliveries, claim.crashes) == (n + 1, 0)
        clock.advance(1)
        await transport.workers.reap()


async def test_a_result_ends_the_growth_of_the_wait_after_lapses(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    for _ in range(2):
        await claim_one(transport, lease=1)
        clock.advance(2)
        await transport.workers.reap()
    clock.advance(1)
    claim = await claim_one(transport)
    assert await transport.settle([Nack(claim.receipt, delay=0)]) == []
    claim = await claim_one(transport)
    assert (claim.deliveries, claim.attempts) == (4, 1)


async def test_a_crash_may_delay_the_next_delivery(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    assert await transport.settle([GiveBack(claim.receipt, crashed=True, delay=5)]) == []
    clock.advance(4)
    assert await transport.claim(["q"]) == []
    clock.advance(1)
    assert (await claim_one(transport)).crashes == 1


async def test_a_claim_fails_no_message_because_of_its_crashes(transport: Transport) -> None:
    await publish(transport)
    await crash(transport, 20)
    assert (await claim_one(transport)).crashes == 20


@requires(Capability.ARCHIVE)
async def test_max_deliveries_counts_all(transport: Transport, clock: ManualClock) -> None:
    """With limit 1 the claim after a crash fails the message unhandled, counters 0/2."""
    id_ = await publish(transport)
    await claim_one(transport, lease=1, max_deliveries=1)
    clock.advance(1)
    assert await transport.claim(["q"], max_deliveries=1) == []
    failed = await row(transport, id_)
    assert (failed.state, failed.reason, failed.attempts, failed.deliveries) == (State.FAILED, "max_deliveries", 0, 2)


@requires(Capability.ARCHIVE)
async def test_max_deliveries_counts_retries_too(transport: Transport) -> None:
    id_ = await publish(transport)
    for _ in range(3):
        claim = await claim_one(transport, max_deliveries=3)
        await transport.settle([Nack(claim.receipt, error="no luck")])
    assert await transport.claim(["q"], max_deliveries=3) == []
    failed = await row(transport, id_)
    assert (failed.state, failed.reason, failed.attempts, failed.deliveries) == (State.FAILED, "max_deliveries", 3, 4)


@requires(Capability.ARCHIVE)
async def test_a_whole_batch_past_the_limit_is_failed_at_once(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"") for _ in range(30)])
    claims = await transport.claim(["q"], 30)
    await transport.settle([Nack(claim.receipt) for claim in claims])
    assert await transport.claim(["q"], 10, max_deliveries=1) == []
    assert await counts(transport) == {State.FAILED: 30}


# --- suspects --------------------------------------------------------------------------------------------


async def test_a_suspect_is_claimed_alone(transport: Transport) -> None:
    """A poisonous message must not use up the deliveries of other messages."""
    await publish(transport, b"suspect")
    await crash(transport, 2)
    await transport.publish([message(str(n).encode()) for n in range(3)])
    first = await bodies(transport, limit=10)
    second = await bodies(transport, limit=10)
    assert sorted([first, second]) == [[b"0", b"1", b"2"], [b"suspect"]]


async def test_one_crash_makes_no_suspect(transport: Transport) -> None:
    await transport.publish([message(str(n).encode()) for n in range(3)])
    claims = await transport.claim(["q"], 3)
    await transport.settle([GiveBack(claim.receipt, crashed=True) for claim in claims])
    assert await bodies(transport, limit=10) == [b"0", b"1", b"2"]


async def test_suspects_come_one_by_one(transport: Transport) -> None:
    await transport.publish([message(str(n).encode()) for n in range(3)])
    for _ in range(2):
        claims = await transport.claim(["q"], 3)
        await transport.settle([GiveBack(claim.receipt, crashed=True) for claim in claims])
    got = [await bodies(transport, limit=10) for _ in range(4)]
    assert got == [[b"0"], [b"1"], [b"2"], []]


async def test_suspects_may_be_left_where_they_are(transport: Transport) -> None:
    await publish(transport, b"suspect")
    await crash(transport, 2)
    await publish(transport, b"good")
    assert await bodies(transport, limit=10, suspects=False) == [b"good"]
    assert await bodies(transport, limit=10, suspects=False) == []
    assert await bodies(transport, limit=10) == [b"suspect"]


async def test_suspects_may_be_claimed_without_others(transport: Transport) -> None:
    for queue in ("a", "b"):
        await publish(transport, b"suspect", queue)
        await crash(transport, 2, queue)
        await publish(transport, b"good", queue)
    assert await bodies(transport, ["a", "b"], limit=10, suspects=False) == [b"good", b"good"]
    got = [await bodies(transport, ["a", "b"], limit=10, others=False) for _ in range(3)]
    assert got == [[b"suspect"], [b"suspect"], []]
    assert await transport.claim(["a"], suspects=False, others=False) == []


async def test_a_suspect_of_several_queues_is_alone_too(transport: Transport) -> None:
    await publish(transport, b"suspect", "a")
    await crash(transport, 2, "a")
    for queue in ("a", "b", "c"):
        await publish(transport, queue.encode(), queue)
    got = [sorted(await bodies(transport, ["a", "b", "c"], limit=9)) for _ in range(4)]
    assert [b"suspect"] in got
    assert sorted(body for claim in got for body in claim) == [b"a", b"b", b"c", b"suspect"]


async def test_a_suspect_that_succeeds_is_like_any_other(transport: Transport) -> None:
    await publish(transport)
    await crash(transport, 2)
    claim = await claim_one(transport)
    assert claim.crashes == 2
    assert await transport.settle([Ack(claim.receipt)]) == []
    assert await transport.claim(["q"]) == []


async def test_a_suspect_stays_one_until_a_result(transport: Transport) -> None:
    await publish(transport, b"suspect")
    await crash(transport, 2)
    for delivered in (False, True):
        claim = await claim_one(transport)
        assert claim.crashes == 2
        await transport.settle([GiveBack(claim.receipt, delivered)])
        await publish(transport, b"good")
        assert await bodies(transport, suspects=False) == [b"good"]
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt)])
    assert await bodies(transport, suspects=False) == [b"suspect"]


# --- expires ---------------------------------------------------------------------------------------------


@requires(Capability.ARCHIVE)
@pytest.mark.parametrize("after", [10, 11])
async def test_an_expired_message_is_failed_and_not_returned(
    transport: Transport, clock: ManualClock, after: int
) -> None:
    id_ = await publish(transport, expires=10)
    clock.advance(after)
    assert await transport.claim(["q"]) == []
    failed = await row(transport, id_)
    assert (failed.state, failed.reason, failed.attempts) == (State.FAILED, "expired", 0)


async def test_before_it_expires_a_message_is_delivered(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, expires=10)
    clock.advance(9.999999)
    claim = await claim_one(transport)
    assert claim.expires_us == claim.created_us + 10_000_000
    clock.advance(100)  # a handler that began in time may end at any time
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_expires_as_a_moment(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    moment = (await claim_one(transport)).claimed_at
    await publish(transport, b"gone", expires=moment)
    await publish(transport, b"here", expires=moment.replace(year=2027))
    assert await bodies(transport) == [b"here"]


async def test_a_retry_that_comes_too_late_expires(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, expires=10)
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt, delay=20)])
    clock.advance(20)
    assert await transport.claim(["q"]) == []
