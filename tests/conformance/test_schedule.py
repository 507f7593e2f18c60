"""Schedule: delay, due_at and backoff set one value, the earliest time of delivery."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from millpond import Ack, Capability, ManualClock, Nack, Retry, Transport
from millpond.clock import as_datetime
from millpond.errors import InvalidTime
from tests.conformance.backends import requires
from tests.conformance.messages import bodies, claim_one, message, publish


@pytest.mark.parametrize("delay", [1, 1.0, timedelta(seconds=1)])
async def test_a_delayed_message_is_invisible_until_it_is_due(
    transport: Transport, clock: ManualClock, delay: float
) -> None:
    await publish(transport, delay=delay)
    clock.advance(0.999999)
    assert await transport.claim(["q"]) == []
    clock.advance(0.000001)
    assert (await claim_one(transport)).due_us == clock.now()


async def test_a_message_due_at_a_moment(transport: Transport, clock: ManualClock) -> None:
    due = as_datetime(clock.now()) + timedelta(days=30)
    await publish(transport, due_at=due)
    clock.advance(timedelta(days=29))
    assert await transport.claim(["q"]) == []
    clock.advance(timedelta(days=1))
    assert (await claim_one(transport)).due_at == due


@requires(Capability.ORDER)
async def test_a_moment_in_the_past_is_due_at_once_and_first(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, b"now")
    await publish(transport, b"past", due_at=datetime(2001, 9, 9, tzinfo=UTC))
    await publish(transport, b"before 1970", due_at=datetime(1969, 7, 20, tzinfo=UTC))
    assert await bodies(transport) == [b"before 1970", b"past", b"now"]


async def test_the_far_future_can_be_stored(transport: Transport) -> None:
    await publish(transport, due_at=datetime(9999, 12, 31, tzinfo=UTC))
    assert await transport.claim(["q"]) == []


async def test_messages_fall_due_in_their_order(transport: Transport, clock: ManualClock) -> None:
    """A long wait never blocks a short one."""
    await transport.publish([message(str(n).encode(), delay=n) for n in (8, 1, 3, 5, 2)])
    seen = []
    for _ in range(10):
        seen += await bodies(transport)
        clock.advance(1)
    assert seen == [b"1", b"2", b"3", b"5", b"8"]


async def test_a_wall_of_future_messages_hides_nothing(transport: Transport, clock: ManualClock) -> None:
    """Future messages of top priority stand before the due ones (tests/plans has the same with 200,000)."""
    await transport.publish([message(b"future", priority=0, delay=3600) for _ in range(5_000)])
    await transport.publish([message(str(n).encode(), priority=90) for n in range(100)])
    claims = await transport.claim(["q"], 200)
    assert [claim.message.payload for claim in claims] == [str(n).encode() for n in range(100)]
    await transport.settle([Ack(claim.receipt) for claim in claims])
    clock.advance(3600)
    assert await bodies(transport, limit=10) == [b"future"] * 10


async def test_a_retry_policy_end_to_end(transport: Transport, clock: ManualClock) -> None:
    """Delivered at once, again after each wait, then never again."""
    retry = Retry(initial=2, multiplier=1.5, maximum=60, jitter=0, attempts=5, first="immediate")
    await publish(transport)
    waits = []
    for _ in range(4):
        claim = await claim_one(transport)
        wait = retry.decide(claim.attempts + 1)
        assert wait is not None
        waits.append(wait)
        await transport.settle([Nack(claim.receipt, delay=wait)])
        if wait:
            clock.advance(wait - 0.000001)
            assert await transport.claim(["q"]) == []
            clock.advance(0.000001)
    assert waits == [0, 2, 3, 4.5]
    claim = await claim_one(transport)
    assert retry.decide(claim.attempts + 1) is None
    assert (claim.deliveries, claim.attempts) == (5, 4)
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_delay_and_due_at_contradict_each_other(transport: Transport) -> None:
    with pytest.raises(InvalidTime):
        await transport.publish([message(delay=1, due_at=datetime.now(UTC))])
