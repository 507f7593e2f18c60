"""Extend: a longer lease for current owners."""

from __future__ import annotations

from uuid import uuid4

import pytest

from millpond import Ack, Capability, GiveBack, ManualClock, Nack, Receipt, Transport
from millpond.errors import InvalidTime
from tests.conformance.backends import requires
from tests.conformance.messages import claim_one, message, publish

pytestmark = requires(Capability.EXTEND)


async def test_extend_counts_from_now(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport, lease=10)
    clock.advance(9)
    assert await transport.extend([claim.receipt], lease=10) == []
    clock.advance(9.999999)
    assert await transport.claim(["q"]) == []
    clock.advance(0.000001)
    assert (await claim_one(transport)).deliveries == 2


async def test_extend_may_shorten(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport, lease=3600)
    assert await transport.extend([claim.receipt], lease=0) == []
    assert (await claim_one(transport)).deliveries == 2


async def test_a_lapsed_lease_that_nobody_took_is_renewed(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport, lease=10)
    clock.advance(100)
    assert await transport.extend([claim.receipt], lease=10) == []
    assert await transport.claim(["q"]) == []
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_stale_receipts_are_refused_and_the_others_extended(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(str(n).encode()) for n in range(6)])
    acked, nacked, given, lost, held, last = await transport.claim(["q"], 6, lease=10)
    await transport.settle([Ack(acked.receipt), Nack(nacked.receipt, delay=99), GiveBack(given.receipt)])
    await transport.extend([held.receipt, last.receipt], lease=60)
    clock.advance(10)
    await transport.workers.reap()
    stale = [acked.receipt, nacked.receipt, given.receipt, lost.receipt, Receipt(uuid4(), 1)]
    refused = await transport.extend([*stale, held.receipt, held.receipt, last.receipt], lease=100)
    assert set(refused) == set(stale) and len(refused) == len(stale)
    clock.advance(99)
    assert await transport.workers.reap() == 0


async def test_a_zombie_cannot_extend_the_next_owners_lease(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    zombie = await claim_one(transport, lease=10)
    clock.advance(10)
    owner = await claim_one(transport, lease=10)
    assert await transport.extend([zombie.receipt], lease=3600) == [zombie.receipt]
    clock.advance(10)
    assert await transport.workers.reap() == 1
    assert await transport.extend([owner.receipt]) == [owner.receipt]


async def test_extend_does_not_touch_counters(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport, lease=10)
    for _ in range(5):
        clock.advance(9)
        assert await transport.extend([claim.receipt], lease=10) == []
    await transport.settle([GiveBack(claim.receipt)])
    assert (await claim_one(transport)).deliveries == 1


async def test_many_at_once(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"") for _ in range(5_000)])
    claims = await transport.claim(["q"], 5_000, lease=10)
    assert await transport.extend([claim.receipt for claim in claims], lease=60) == []
    clock.advance(59)
    assert await transport.workers.reap() == 0
    clock.advance(1)
    assert await transport.workers.reap() == 5_000


async def test_nothing_to_extend_and_a_bad_lease(transport: Transport) -> None:
    assert await transport.extend([]) == []
    await publish(transport)
    claim = await claim_one(transport)
    with pytest.raises(InvalidTime):
        await transport.extend([claim.receipt], lease=-1)
