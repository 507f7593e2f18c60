"""Order: by priority, then oldest due first, then by id."""

from __future__ import annotations

import random
from uuid import UUID

import pytest

from millpond import Ack, Capability, ManualClock, Nack, Transport
from millpond.clock import as_datetime
from millpond.message import new_id
from tests.conformance.backends import requires
from tests.conformance.messages import bodies, claim_one, message, publish


@requires(Capability.ONE_ORDER)
async def test_two_thousand_messages_of_one_batch_stay_in_order(transport: Transport) -> None:
    sent = [str(n).encode() for n in range(2_000)]
    await transport.publish([message(body) for body in sent])
    got: list[bytes] = []
    while claims := await transport.claim(["q"], 77):
        got += [claim.message.payload for claim in claims]
        await transport.settle([Ack(claim.receipt) for claim in claims])
    assert got == sent


@requires(Capability.ONE_ORDER)
async def test_messages_published_one_by_one_stay_in_order(transport: Transport) -> None:
    sent = [str(n).encode() for n in range(60)]
    for body in sent:
        await publish(transport, body)
    assert [body for _ in range(12) for body in await bodies(transport, limit=5)] == sent


async def test_oldest_due_first(transport: Transport, clock: ManualClock) -> None:
    """Oldest first, not newest."""
    await publish(transport, b"late", delay=3)
    await publish(transport, b"early", delay=1)
    await publish(transport, b"middle", delay=2)
    clock.advance(5)
    await publish(transport, b"last")
    assert await bodies(transport) == [b"early", b"middle", b"late", b"last"]


@requires(Capability.ORDER)
async def test_the_id_breaks_ties(transport: Transport) -> None:
    ids = [UUID(int=n) for n in (5, 1, 2**127, 3, 2**128 - 1, 2**64)]
    await transport.publish([message(str(i).encode(), id=i) for i in ids])
    assert await bodies(transport) == [str(i).encode() for i in sorted(ids)]


@requires(Capability.PRIORITY)
async def test_lower_numbers_first(transport: Transport) -> None:
    """Only the priority counts, not the number of deliveries."""
    await transport.publish([message(str(p).encode(), priority=p) for p in (50, 100, 0, 99, 1, 51, 49)])
    assert await bodies(transport) == [b"0", b"1", b"49", b"50", b"51", b"99", b"100"]


@requires(Capability.PRIORITY)
async def test_priority_is_strict_across_claims(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"low", priority=90) for _ in range(10)])
    assert await bodies(transport, limit=3) == [b"low"] * 3
    clock.advance(10)
    await transport.publish([message(b"high", priority=10) for _ in range(2)])
    assert await bodies(transport, limit=3) == [b"high", b"high", b"low"]
    await publish(transport, b"higher", priority=0)
    assert await bodies(transport, limit=2) == [b"higher", b"low"]


@requires(Capability.PRIORITY)
async def test_a_hundred_priorities_and_many_due_times(transport: Transport, clock: ManualClock) -> None:
    dice = random.Random(7)
    sent = [(dice.randint(0, 100), dice.randint(0, 20), new_id()) for _ in range(600)]
    await transport.publish([message(i.bytes, id=i, priority=p, delay=d) for p, d, i in sent])
    clock.advance(20)
    got: list[bytes] = []
    while claims := await bodies(transport, limit=dice.randint(1, 40)):
        got += claims
    assert got == [i.bytes for _, _, i in sorted(sent)]


@requires(Capability.PRIORITY)
async def test_what_comes_back_late_takes_its_place(transport: Transport, clock: ManualClock) -> None:
    """Retries and late schedules appear below the rows that were already claimed; claims still find them in order."""
    await transport.publish([message(str(n).encode(), delay=n) for n in range(20)])
    clock.advance(20)
    first = await claim_one(transport)
    await transport.settle([Nack(first.receipt)])  # due now: after all messages that were due before
    assert await bodies(transport, limit=5) == [b"1", b"2", b"3", b"4", b"5"]
    clock.advance(1)
    await publish(transport, b"old", due_at=first.created_at)
    assert await bodies(transport, limit=2) == [b"old", b"6"]
    assert (await bodies(transport, limit=50))[-1] == b"0"


@requires(Capability.PRIORITY)
@pytest.mark.parametrize("limit", [1, 3, 1000])
async def test_interleaved_publishing_and_claiming(transport: Transport, clock: ManualClock, limit: int) -> None:
    """Each claim takes the first messages in order, independent of earlier claims."""
    dice = random.Random(limit)
    waiting: list[tuple[int, int, UUID]] = []
    for _ in range(30):
        for _ in range(dice.randint(0, 4)):
            entry = (dice.choice([0, 50, 100]), clock.now() + dice.choice([0, 0, -5_000_000, 1_500_000]), new_id())
            await transport.publish(
                [message(b"", id=entry[2], priority=entry[0], due_at=as_datetime(entry[1]))],
            )
            waiting.append(entry)
        expected = sorted(e for e in waiting if e[1] <= clock.now())[:limit]
        claims = await transport.claim(["q"], limit)
        assert [claim.receipt.id for claim in claims] == [e[2] for e in expected]
        waiting = [e for e in waiting if e not in expected]
        clock.advance(dice.choice([0, 0.5, 1]))


@requires(Capability.PRIORITY)
async def test_what_is_more_urgent_is_found_at_once_in_a_queue_that_had_one_priority(transport: Transport) -> None:
    for n in range(3):  # claims that were not full; after them no other lane is read
        await publish(transport, b"usual %d" % n)
        assert await bodies(transport) == [b"usual %d" % n]
    await transport.publish([message(b"usual"), message(b"urgent", priority=10), message(b"later", priority=90)])
    assert await bodies(transport) == [b"urgent", b"usual", b"later"]
    await transport.publish([message(b"usual"), message(b"urgent", priority=10)])
    assert await bodies(transport, limit=1) == [b"urgent"]
