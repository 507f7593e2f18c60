"""Acks that are lost with their connection: the broker delivers their messages again, and no handler runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace

import millpond
from millpond import Ack, Message, Millpond, Nack, Reject
from millpond.control import Control
from millpond.errors import StoreUnavailable
from millpond.transports.rabbitmq.envelope import Envelope, Metadata
from millpond.transports.rabbitmq.lost_acks import identity
from servers import Proxy, RabbitMQ
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_settled_message_that_comes_again_is_acked_and_not_claimed(
    rabbitmq_url: str, rabbitmq_server: RabbitMQ, queue_type: str
) -> None:
    with Proxy(rabbitmq_server.port) as proxy:
        transport: Any = await millpond.connect(proxy.url(rabbitmq_url), queue_type=queue_type)
        await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(5)])
        claims: list[Any] = []
        while len(claims) < 5:
            claims += await transport.claim(["q"], 5)
        proxy.black_hole()
        assert await transport.settle([Ack(claim.receipt) for claim in claims[:4]]) == []
        proxy.cut()  # the acks are lost
        proxy.resume()
        again = []
        async with asyncio.timeout(SOON):
            while not again:
                with contextlib.suppress(StoreUnavailable):  # the loss is noticed
                    again = await transport.claim(["q"], 5)
        assert [claim.message.payload for claim in again] == [b"4"] and again[0].crashes == 0
        assert await transport.settle([Ack(again[0].receipt)]) == []
        await transport.wait(["q"], 0.1)
        assert await transport.claim(["q"], 5) == []
        await transport.close()
    other: Any = await millpond.connect(rabbitmq_url, queue_type=queue_type)
    assert await other.claim(["q"], 5) == []
    await other.close()


async def test_copies_of_settled_messages_are_not_taken_for_them(rabbitmq_url: str, rabbitmq_server: RabbitMQ) -> None:
    """The copy of a nacked message is delivered twice, although the ack of the original was lost before"""
    with Proxy(rabbitmq_server.port) as proxy:
        transport: Any = await millpond.connect(rabbitmq_url)
        cut_off: Any = await millpond.connect(proxy.url(rabbitmq_url))
        await transport.publish([Message(queue="q", payload=b"x")])
        claim = await next_claim(cut_off)
        cut_off.publisher = transport.publisher  # its connection works
        proxy.black_hole()
        assert await cut_off.settle([Nack(claim.receipt)]) == []
        proxy.cut()
        proxy.resume()
        copy = await next_claim(transport)  # the copy, or the original that was not acked
        other = None
        if copy.attempts == 0:
            other, copy = copy, await next_claim(transport)
        assert copy.attempts == 1
        for channel in list(transport._consumers["q"]._channels):  # as if its process had died
            channel.abandon()
        attempts = set()
        async with asyncio.timeout(SOON):
            while 1 not in attempts:
                claims = []
                with contextlib.suppress(StoreUnavailable):  # the loss is noticed
                    claims = await cut_off.claim(["q"], 5)
                attempts |= {claim.attempts for claim in claims}
                await cut_off.settle([Ack(claim.receipt) for claim in claims])
        assert 1 in attempts and (other is None or 0 not in attempts)
        await cut_off.close()
        await transport.close()


async def test_a_rejected_message_that_comes_again_is_one_dead_letter(
    rabbitmq_url: str, rabbitmq_server: RabbitMQ
) -> None:
    with Proxy(rabbitmq_server.port) as proxy:
        direct: Any = await millpond.connect(rabbitmq_url)
        transport: Any = await millpond.connect(proxy.url(rabbitmq_url))
        await transport.publish([Message(queue="q", payload=b"x")])
        claim = await next_claim(transport)
        transport.publisher = direct.publisher
        proxy.black_hole()
        assert await transport.settle([Reject(claim.receipt)]) == []
        proxy.cut()
        proxy.resume()
        async with asyncio.timeout(SOON):
            while not transport._lost_acks._lost or any(transport._lost_acks._lost.values()):
                with contextlib.suppress(StoreUnavailable):
                    assert await transport.claim(["q"]) == []
        (letter,) = await dead_letters(Control(direct))
        assert letter.payload == b"x"
        await transport.close()
        await direct.close()


def test_messages_of_one_id_that_differ_anywhere() -> None:
    """A publisher may repeat the id and the beginning of a message. Its message is not taken for the settled one"""
    id_, body, metadata = uuid4(), b"x" * 10_000, Metadata(queue="q")
    first = Envelope(id_, body + b"a", {"n": 1}, metadata, {"message_id": "order-7", "type": "t"})
    others = [
        replace(first, payload=body + b"b"),
        replace(first, native={"n": 2}),
        replace(first, properties={"message_id": "order-7", "type": "u"}),
        first.with_meta(key="k"),
        first.with_meta(headers='{"a":[]}'),
    ]
    identities = {identity(envelope, by_suspects_queue=False) for envelope in [first, *others]}
    assert len(identities) == 6
    later = first.with_meta(created_us=1, due_us=1)
    assert identity(later, by_suspects_queue=False) == identity(first, by_suspects_queue=False)


async def test_acks_that_have_arrived_are_forgotten(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    for _ in range(3):
        claim = await next_claim(transport)
        assert await transport.settle([Ack(claim.receipt)]) == []
        (channel,) = transport._consumers["q"]._channels
        assert len(channel.unanswered) == 1
    assert await transport.claim(["q"]) == []  # the broker answers
    assert len(channel.unanswered) == 0


@pytest.mark.slow
async def test_a_handler_that_blocks_the_event_loop_fails_no_message(
    rabbitmq_url: str, rabbitmq_server: RabbitMQ
) -> None:
    """The broker misses the heartbeats and closes the connection, with the acks of all that ran"""
    pond = Millpond(rabbitmq_url + "?heartbeat=1")
    ran: Counter[str] = Counter()

    @pond.subscriber("q", max_workers=4)
    async def handle(body: str) -> None:
        ran[body] += 1
        if body == "slow":
            time.sleep(5)  # noqa: ASYNC251 - it blocks on purpose

    for body in ("a", "b", "slow"):
        await pond.publish("q", body)
    running = asyncio.create_task(pond.run())
    vhost = rabbitmq_url.rpartition("/")[2]
    async with asyncio.timeout(2 * SOON):
        while len(ran) < 3 or rabbitmq_server.ask("GET", f"/queues/{vhost}/q").get("messages") != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    pond.stop()
    await running
    await pond.close()
    assert set(ran) == {"a", "b", "slow"} and max(ran.values()) <= 2
    transport: Any = await millpond.connect(rabbitmq_url)
    assert await Control(transport).messages("q") == [] and await transport.claim(["q"]) == []
    await transport.close()
