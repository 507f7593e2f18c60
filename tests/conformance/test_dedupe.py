"""Dedupe: to publish an id of the caller twice is harmless, and the result shows it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest

from millpond import Ack, Capability, ManualClock, Nack, Published, Reject, Transport, id_from
from tests.conformance.backends import requires
from tests.conformance.conftest import Connect
from tests.conformance.messages import bodies, claim_one, message, publish

pytestmark = requires(Capability.DEDUPE)

ORDER = id_from("order-7")


async def test_the_second_publish_is_harmless_and_said(transport: Transport) -> None:
    assert await transport.publish([message(b"first", id=ORDER)]) == [Published(ORDER, new=True)]
    assert await transport.publish([message(b"second", id=ORDER)]) == [Published(ORDER, new=False)]
    assert await bodies(transport) == [b"first"]


async def test_an_id_is_known_in_every_queue(transport: Transport) -> None:
    await publish(transport, queue="a", id=ORDER)
    assert await transport.publish([message(queue="b", id=ORDER)]) == [Published(ORDER, new=False)]
    assert await bodies(transport, ["b"]) == []


@pytest.mark.parametrize("outcome", [Ack, Reject, lambda r: Ack(r, keep=False), lambda r: Nack(r, delay=60)])
async def test_an_id_is_known_after_it_was_claimed_and_settled(transport: Transport, outcome: object) -> None:
    """In flight, and settled: kept or not."""
    await publish(transport, id=ORDER)
    claim = await claim_one(transport)
    assert await transport.publish([message(id=ORDER)]) == [Published(ORDER, new=False)]
    await transport.settle([outcome(claim.receipt)])  # type: ignore[operator]
    assert await transport.publish([message(id=ORDER)]) == [Published(ORDER, new=False)]
    assert await transport.claim(["q"], 10) == []


async def test_twice_in_one_call_the_first_counts(transport: Transport) -> None:
    published = await transport.publish([message(b"1", id=ORDER), message(b"2"), message(b"3", id=ORDER)])
    assert [p.new for p in published] == [True, True, False]
    assert published[0].id == published[2].id == ORDER
    assert sorted(await bodies(transport)) == [b"1", b"2"]


async def test_a_batch_of_known_and_new(transport: Transport) -> None:
    ids = [id_from(str(n)) for n in range(60)]
    await transport.publish([message(b"", id=i) for i in ids[::3]])
    published = await transport.publish([message(b"", id=i) for i in ids])
    assert [p.new for p in published] == [n % 3 != 0 for n in range(60)]
    assert [p.id for p in published] == ids
    assert len(await transport.claim(["q"], 100)) == 60


async def test_a_generated_id_given_again_is_known(transport: Transport) -> None:
    """A publisher that lost the reply publishes again with the same id."""
    id_ = await publish(transport)
    assert await transport.publish([message(id=id_)]) == [Published(id_, new=False)]
    claim = await claim_one(transport)
    await transport.settle([Ack(claim.receipt)])
    assert await transport.publish([message(id=id_)]) == [Published(id_, new=False)]


async def test_the_window_ends(connect: Connect, clock: ManualClock) -> None:
    transport = await connect(dedupe_for=60)
    await publish(transport, b"1", id=ORDER)
    claim = await claim_one(transport)
    await transport.settle([Ack(claim.receipt)])
    clock.advance(59.999999)
    assert await transport.publish([message(b"2", id=ORDER)]) == [Published(ORDER, new=False)]
    clock.advance(0.000001)
    assert await transport.publish([message(b"3", id=ORDER)]) == [Published(ORDER, new=True)]
    assert await bodies(transport) == [b"3"]


async def test_a_message_that_is_still_there_outlasts_the_window(connect: Connect, clock: ManualClock) -> None:
    transport = await connect(dedupe_for=60)
    await publish(transport, id=ORDER)
    clock.advance(3600)
    assert await transport.publish([message(id=ORDER)]) == [Published(ORDER, new=False)]
    claim = await claim_one(transport)
    await transport.settle([Ack(claim.receipt)])
    assert await transport.publish([message(id=ORDER)]) == [Published(ORDER, new=False)]


async def test_the_default_window_is_a_week(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, id=ORDER)
    claim = await claim_one(transport)
    await transport.settle([Ack(claim.receipt, keep=False)])
    clock.advance(timedelta(days=7) - timedelta(microseconds=1))
    assert not (await transport.publish([message(id=ORDER)]))[0].new
    clock.advance(timedelta(microseconds=1))
    assert (await transport.publish([message(id=ORDER)]))[0].new


async def test_many_publishers_of_one_id_at_once(connect: Connect) -> None:
    transports = [await connect() for _ in range(4)]
    ids = [UUID(int=n) for n in range(1, 31)]
    # Each in another order: they must not deadlock, and only one may be first.
    orders = [ids, ids[::-1], ids[15:] + ids[:15], ids[::2] + ids[1::2]]
    results = await asyncio.gather(
        *(t.publish([message(b"", id=i) for i in order]) for t, order in zip(transports, orders, strict=True))
    )
    new = [p.id for published in results for p in published if p.new]
    assert sorted(new) == ids
    assert sorted(c.receipt.id for c in await transports[0].claim(["q"], 100)) == ids


async def test_an_id_may_be_given_as_text(transport: Transport) -> None:
    assert await transport.publish([message(id=str(ORDER))]) == [Published(ORDER, new=True)]
    assert (await claim_one(transport)).message.id == ORDER
