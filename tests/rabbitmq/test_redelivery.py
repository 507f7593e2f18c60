"""Redelivery and delays, timed by the broker: not before they are due, and none behind another."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from pamqp.commands import Basic

from millpond import Ack, Message, Millpond, Nack, Reject, Retry
from millpond.clock import SECOND
from millpond.control import Control
from millpond.message import new_id
from millpond.transports.rabbitmq.envelope import Envelope, Past
from millpond.transports.rabbitmq.names import BUCKETS, bucket_for
from millpond.transports.rabbitmq.publisher import Parcel
from tests.rabbitmq.conftest import SOON, arrival, dead_letters

SLACK = 10.0
"""What a busy machine may add."""


def test_delays_are_rounded_up_by_a_third_at_most() -> None:
    for ms in range(100, 90_000, 37):
        bucket, left = bucket_for(ms * 1000)
        assert left == 0 and ms <= bucket <= ms * 1.29
    assert bucket_for(1) == (100, 0)
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_the_longest_delays_take_several_waits() -> None:
    day = BUCKETS[-1] * 1000
    assert bucket_for(day) == (BUCKETS[-1], 0)
    assert bucket_for(3 * day + 1) == (BUCKETS[-1], 2 * day + 1)


async def test_a_long_wait_does_not_block_a_short_one(transport: Any) -> None:
    """ORB-D1: 8 s then 1 s published, both left after 8 s"""
    began = time.monotonic()
    await transport.publish([Message(queue="q", payload=b"long", delay=2)])
    await transport.publish([Message(queue="q", payload=b"short", delay=0.4)])
    first = await arrival(transport)
    took = time.monotonic() - began
    assert first.message.payload == b"short"
    assert took >= 0.4
    second = await arrival(transport)
    assert second.message.payload == b"long"
    assert 2 <= time.monotonic() - began < 2 + SLACK
    assert (second.deliveries, second.attempts) == (1, 0)  # ORB-D5: a delay eats no attempt


async def test_orbs_series_and_then_the_dead_letters(rabbitmq_url: str) -> None:
    """ORB-C5, ORB-C8: at once, then initial * multiplier ** n; after the last attempt kept, not dropped (ORB-D2)"""
    pond = Millpond(rabbitmq_url)
    runs: list[float] = []
    done = asyncio.Event()

    @pond.subscriber(
        "q", retry=Retry(initial=0.4, multiplier=1.5, maximum=0.6, jitter=0, attempts=5, first="immediate")
    )
    async def fail(body: str) -> None:
        runs.append(time.monotonic())
        if len(runs) == 5:
            done.set()
        raise ValueError("no luck")

    id_ = await pond.publish("q", "x")
    work = asyncio.create_task(pond.run())
    await asyncio.wait_for(done.wait(), SOON)
    control = Control(await pond.transport)
    rows = await dead_letters(control)
    pond.stop()
    await work
    gaps = [later - earlier for earlier, later in pairwise(runs)]
    for gap, least in zip(gaps, [0, 0.4, 0.6, 0.6], strict=True):
        assert least <= gap < least * 1.29 + SLACK
    (row,) = rows
    assert (row.id, row.queue, row.attempts, row.deliveries) == (id_, "q", 5, 5)
    assert row.error == "ValueError: no luck" and row.reason is not None
    await pond.close()


async def test_what_is_left_of_a_long_delay_is_waited_for(transport: Any) -> None:
    began = time.monotonic()
    envelope = Envelope(new_id(), b"later", {}, Past(queue="q", wait_us=SECOND // 2))
    await transport.publisher.send([Parcel(envelope)])
    claim = await arrival(transport)
    assert time.monotonic() - began >= 0.5
    assert (claim.message.payload, claim.deliveries) == (b"later", 1)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_way_through_a_wait_queue_survives_a_deleted_queue(transport: Any) -> None:
    """At least once at every hop: the wait queue keeps the message until its target takes it. The broker looks again
    every three minutes."""
    await transport.publish([Message(queue="q", payload=b"kept", delay=0.5)])
    channel = await transport.publishing.channel()
    await channel._underlay.queue_delete("q")
    await asyncio.sleep(1)  # the wait is over by now, and there is nowhere to go
    claim = await arrival(transport, within=400)
    assert claim.message.payload == b"kept"


@pytest.mark.parametrize("outcome", [Nack, lambda r: Nack(r, delay=0.1), Reject])
async def test_nothing_is_acked_before_its_copy_is_confirmed(transport: Any, outcome: Any) -> None:
    """ORB-D3: the copy cannot be published, so the delivery stays ours and is settled later"""
    await transport.publish([Message(queue="q", payload=b"")])
    claim = await arrival(transport)
    send = transport.publisher.send

    async def refuse(parcels: Any) -> None:
        raise ConnectionError

    transport.publisher.send = refuse
    with pytest.raises(ConnectionError):
        await transport.settle([outcome(claim.receipt)])
    transport.publisher.send = send
    assert await transport.extend([claim.receipt]) == []
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_a_message_from_elsewhere_is_handled(transport: Any) -> None:
    """A publisher that knows nothing of Millpond: its properties are the message"""
    await transport.claim(["q"])
    channel = await transport.publishing.channel()
    for message_id, headers in (("order-7", {"trace": "x"}), (None, None)):
        await channel._underlay.basic_publish(
            b"hello", routing_key="q", properties=Basic.Properties(message_id=message_id, headers=headers)
        )
    first, second = await arrival(transport), await arrival(transport)
    assert first.message.headers == {"trace": "x"} and first.message.payload == second.message.payload == b"hello"
    assert second.message.headers == {}


async def test_a_message_belongs_to_the_queue_it_is_found_in(transport: Any) -> None:
    """Moved by a shovel or by hand, it is retried where it is"""
    await transport.publish([Message(queue="q", payload=b"", key="k")])
    await transport.claim(["other"])
    channel = await transport.publishing.channel()
    got = await channel._underlay.basic_get("q", no_ack=True)
    await channel._underlay.basic_publish(b"", routing_key="other", properties=got.header.properties)
    claim = await arrival(transport, "other")
    assert (claim.message.queue, claim.message.key) == ("other", "k")
    await transport.settle([Nack(claim.receipt)])
    again = await arrival(transport, "other")
    assert (again.receipt.id, again.attempts) == (claim.receipt.id, 1)


async def test_an_undecodable_message_is_dead_lettered_alone(transport: Any) -> None:
    """TSK-D10"""
    await transport.claim(["q"])
    channel = await transport.publishing.channel()
    await channel._underlay.basic_publish(
        b"bad", routing_key="q", properties=Basic.Properties(headers={"millpond": "{no json"})
    )
    await transport.publish([Message(queue="q", payload=b"good")])
    assert (await arrival(transport)).message.payload == b"good"
    control = Control(transport)
    rows = await dead_letters(control)
    assert [(row.payload, row.reason) for row in rows] == [(b"bad", "undecodable")]
