"""Retries and delays, timed by the broker: none is early, none waits behind another."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import aiormq
import pytest
from pamqp.commands import Basic

from millpond import Ack, Message, Millpond, Nack, Reject, Retry
from millpond.clock import SECOND
from millpond.control import Control
from millpond.message import new_id
from millpond.transports.rabbitmq.envelope import Envelope, Metadata
from millpond.transports.rabbitmq.names import BUCKETS, bucket_for
from millpond.transports.rabbitmq.outgoing import OutgoingMessage
from tests.rabbitmq.attacker import attacker
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim

SLACK = 10.0
"""Seconds that a busy machine may add."""


def waits(delay_us: int) -> list[int]:
    """Milliseconds in each wait queue."""
    taken = []
    while delay_us > 0:
        bucket, delay_us = bucket_for(delay_us)
        taken.append(bucket)
    return taken


def test_delays_are_late_by_a_tenth_of_a_second_at_most() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert waits(1) == [100]
    for ms in [*range(100, 90_000, 37), *range(90_000, 3 * 86_400_000, 7_654_321)]:
        assert 0 <= sum(waits(ms * 1000)) - ms <= 100
        assert len(waits(ms * 1000)) <= 14
    assert waits(60 * SECOND) == [50_000, 10_000] and len(waits(18 * 3600 * SECOND)) == 2


def test_jitter_survives_the_waits() -> None:
    """Retries of messages that failed together stay apart: lifetimes are not so coarse that they meet again"""
    retry, draw = Retry(initial=60, multiplier=1, jitter=0.33), random.Random(7)
    wanted = sorted(retry.decide(1, None, 0.0, draw.random) or 0.0 for _ in range(1000))
    waited = [sum(waits(int(delay * SECOND))) / 1000 for delay in wanted]
    assert waited[-1] - waited[0] > 0.9 * (wanted[-1] - wanted[0]) > 10
    assert max(Counter(waited).values()) < 20 and all(0 <= b - a <= 0.101 for a, b in zip(wanted, waited, strict=True))


def test_the_longest_delays_take_several_waits() -> None:
    day = BUCKETS[-1] * 1000
    assert bucket_for(day) == (BUCKETS[-1], 0)
    assert bucket_for(3 * day + 1) == (BUCKETS[-1], 2 * day + 1)


async def test_a_long_wait_does_not_block_a_short_one(transport: Any) -> None:
    """In one queue, both would leave it after the longer delay"""
    began = time.monotonic()
    await transport.publish([Message(queue="q", payload=b"long", delay=2)])
    await transport.publish([Message(queue="q", payload=b"short", delay=0.4)])
    first = await next_claim(transport)
    took = time.monotonic() - began
    assert first.message.payload == b"short"
    assert took >= 0.4
    second = await next_claim(transport)
    assert second.message.payload == b"long"
    assert 2 <= time.monotonic() - began < 2 + SLACK
    assert (second.deliveries, second.attempts) == (1, 0)  # a delay is no attempt


async def test_the_series_of_retries_and_then_the_dead_letters(rabbitmq_url: str) -> None:
    """At once, then after initial * multiplier ** n; a dead letter after the last attempt"""
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
        assert least - 0.05 <= gap < least + SLACK
    (row,) = rows
    assert (row.id, row.queue, row.attempts, row.deliveries) == (id_, "q", 5, 5)
    assert row.error == "ValueError: no luck" and row.reason is not None
    await pond.close()


async def test_the_rest_of_a_long_delay(transport: Any) -> None:
    began = time.monotonic()
    due = transport.now() + SECOND // 2
    envelope = Envelope(new_id(), b"later", {}, Metadata(queue="q", wait_us=SECOND // 2, due_us=due))
    await transport.publisher.send([OutgoingMessage(envelope)])
    claim = await next_claim(transport)
    assert time.monotonic() - began >= 0.4
    assert (claim.message.payload, claim.deliveries) == (b"later", 1)


async def test_a_message_that_is_due_does_not_wait_for_the_rest_of_its_delay(transport: Any) -> None:
    """No consumer was there when it came out of its first wait queue"""
    due = transport.now() - SECOND
    envelope = Envelope(new_id(), b"due", {}, Metadata(queue="q", wait_us=86_400 * SECOND, due_us=due))
    await transport.publisher.send([OutgoingMessage(envelope)])
    assert (await next_claim(transport)).message.payload == b"due"


async def test_a_delay_between_two_lifetimes_is_kept(transport: Any) -> None:
    """0.9 s are between the lifetimes 0.8 s and 1 s; 3 s between 2.5 s and 3.2 s"""
    began = time.monotonic()
    await transport.publish([Message(queue="q", payload=b"x", delay=3)])
    claim = await next_claim(transport)
    assert 3 - 0.05 <= time.monotonic() - began < 3 + SLACK
    assert (claim.deliveries, claim.attempts) == (1, 0)


async def test_messages_that_no_queue_takes_stop_no_delay(transport: Any) -> None:
    """The broker keeps 32 of them in a wait queue, and then lets no other message out of it"""
    await transport.publish([Message(queue="gone", payload=b"kept", key="k", delay=3.2) for _ in range(40)])
    channel = await transport.publisher_pool.channel()
    await channel._underlay.queue_delete("gone")
    async with attacker(transport.url.raw) as attack:
        for _ in range(40):
            await attack.channel.basic_publish(
                b"hostile",
                exchange="millpond.wait",
                routing_key="nowhere",
                properties=Basic.Properties(headers={"millpond-wait": 3200}),
                wait=False,
            )
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"good", delay=3.2)])
    assert (await next_claim(transport)).message.payload == b"good"
    async with asyncio.timeout(SOON):
        while len(rows := await Control(transport).messages("millpond.undelivered", limit=1000)) < 80:
            pass
    assert Counter((row.queue, row.payload, row.reason) for row in rows) == {
        ("gone", b"kept", "expired by the broker"): 40,
        ("millpond.undelivered", b"hostile", "expired by the broker"): 40,
    }
    assert not await transport.topology.exists("gone"), "listing has not declared it again"
    retried = await Control(transport).retry([row.id for row in rows])
    assert len(retried.published) == 40, "those that name their queue"
    claim = await next_claim(transport, "gone")
    assert (claim.message.payload, claim.message.key) == (b"kept", "k")


async def test_a_delay_reaches_a_queue_that_was_deleted_and_declared_again(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"kept", delay=2)])
    channel = await transport.publisher_pool.channel()
    await channel._underlay.queue_delete("q")
    transport.topology.forget()
    assert (await next_claim(transport)).message.payload == b"kept"


@pytest.mark.parametrize("outcome", [Nack, lambda r: Nack(r, delay=0.1), Reject])
async def test_nothing_is_acked_before_its_copy_is_confirmed(transport: Any, outcome: Any) -> None:
    """If the copy cannot be published, the delivery stays held and is settled later"""
    await transport.publish([Message(queue="q", payload=b"")])
    claim = await next_claim(transport)
    send = transport.publisher.send_each

    async def refuse(messages: Any) -> None:
        raise ConnectionError

    transport.publisher.send_each = refuse
    with pytest.raises(ConnectionError):
        await transport.settle([outcome(claim.receipt)])
    transport.publisher.send_each = send
    assert await transport.extend([claim.receipt]) == []
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_a_message_of_another_publisher_is_handled(transport: Any) -> None:
    """Its AMQP properties become the message"""
    await transport.claim(["q"])
    channel = await transport.publisher_pool.channel()
    for message_id, headers in (("order-7", {"trace": "x"}), (None, None)):
        await channel._underlay.basic_publish(
            b"hello", routing_key="q", properties=Basic.Properties(message_id=message_id, headers=headers)
        )
    first, second = await next_claim(transport), await next_claim(transport)
    assert first.message.headers == {"trace": "x"} and first.message.payload == second.message.payload == b"hello"
    assert second.message.headers == {}


async def test_a_moved_message_belongs_to_its_new_queue(transport: Any) -> None:
    """After a shovel has moved it, retries stay in the new queue"""
    await transport.publish([Message(queue="q", payload=b"", key="k")])
    await transport.claim(["other"])
    shovel = await aiormq.connect(transport.url.raw)
    channel = await shovel.channel()
    got = await channel.basic_get("q", no_ack=True)
    await channel.basic_publish(b"", routing_key="other", properties=got.header.properties)
    await shovel.close()
    claim = await next_claim(transport, "other")
    assert (claim.message.queue, claim.message.key) == ("other", "k")
    await transport.settle([Nack(claim.receipt)])
    again = await next_claim(transport, "other")
    assert (again.receipt.id, again.attempts) == (claim.receipt.id, 1)


async def test_an_undecodable_message_is_dead_lettered_alone(transport: Any) -> None:
    await transport.claim(["q"])
    channel = await transport.publisher_pool.channel()
    await channel._underlay.basic_publish(
        b"bad", routing_key="q", properties=Basic.Properties(headers={"millpond": "{no json"})
    )
    await transport.publish([Message(queue="q", payload=b"good")])
    assert (await next_claim(transport)).message.payload == b"good"
    control = Control(transport)
    rows = await dead_letters(control)
    assert [(row.payload, row.reason) for row in rows] == [(b"bad", "undecodable")]
