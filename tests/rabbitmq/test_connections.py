"""Connections, channels and what is declared: spread, reused, restored."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

import millpond
from millpond import Ack, ManualClock, Message, Nack
from millpond.errors import (
    AuthenticationFailed,
    EncryptionFailed,
    InvalidTime,
    InvalidURL,
    QueueMismatch,
    UnknownDatabase,
    Unreachable,
    Unroutable,
)
from servers import RabbitMQ
from servers.ports import free_port
from tests.rabbitmq.conftest import SOON, arrival


async def test_a_pool_over_few_channels(rabbitmq_url: str) -> None:
    """ORB-C4: a pool of 10 over connections of 5 channels, 100 messages, 30 % nacks: all arrive"""
    transport: Any = await millpond.connect(
        rabbitmq_url, subscriber_pool_size=10, max_connection_channels=5, publisher_channel_pool_size=7
    )
    await asyncio.gather(*(transport.publish([Message(queue="q", payload=b"%d" % n)]) for n in range(100)))
    seen: Counter[bytes] = Counter()
    async with asyncio.timeout(SOON):
        while sum(seen.values()) < 130:
            await transport.wait(["q"], 5)
            claims = await transport.claim(["q"], 20)
            seen.update(c.message.payload for c in claims)
            nacked = [int(c.message.payload) % 10 < 3 and c.attempts == 0 for c in claims]
            outcomes = [Nack(c.receipt) if nack else Ack(c.receipt) for c, nack in zip(claims, nacked, strict=True)]
            assert await transport.settle(outcomes) == []
    assert len(seen) == 100 and set(seen.values()) == {1, 2}
    assert transport.subscribing.count == 2  # ten consumers
    assert transport.publishing.count == 2  # seven publishers, and the channel that declares
    await transport.close()


async def test_channels_are_reused(transport: Any) -> None:
    """ORB-C9"""
    for _ in range(50):
        await transport.publish([Message(queue="q", payload=b"")])
        await transport.claim(["q"])
    assert len(transport.publisher._channels) == 1
    assert len(transport._sources["q"]._channels) == 1


async def test_acks_are_written_before_a_close(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"acked")])
    other: Any = await millpond.connect(transport.url.raw)
    claim = await arrival(other)
    assert await other.settle([Ack(claim.receipt)]) == []
    await other.close()
    await transport.publish([Message(queue="q", payload=b"next")])
    assert (await arrival(transport)).message.payload == b"next"


async def test_an_ack_of_many_leaves_a_message_alone_that_was_got_meanwhile(transport: Any) -> None:
    """Its tag is lower than those of messages that the broker sent after it, and were received before"""
    await transport.publish([Message(queue=queue, payload=b"") for queue in ("got", "q", "q")])
    channel, received = await transport.subscribing.channel(), list[int]()
    answered, get = asyncio.Event(), channel._underlay.basic_get

    async def slowly(queue: str) -> Any:
        message = await get(queue)
        answered.set()
        while len(received) < 2:  # noqa: ASYNC110 - they come from the broker
            await asyncio.sleep(0.01)
        return message

    channel._underlay.basic_get = slowly
    getting = asyncio.create_task(channel.get("got", lambda _, message: None))
    await asyncio.wait_for(answered.wait(), SOON)
    await channel.consume("q", 2, lambda _, message: received.append(message.delivery.delivery_tag))
    assert await asyncio.wait_for(getting, SOON)
    assert list(channel.unsettled) == [1, 2, 3] and received == [2, 3]
    await channel.ack(received)
    await channel.close()
    assert await transport.claim(["q"], 5) == []
    assert len(await transport.claim(["got"], 5)) == 1


async def test_no_more_arrives_than_there_is_use_for(transport: Any) -> None:
    """Prefetch is what was asked for: the rest is left to others"""
    await transport.publish([Message(queue="q", payload=b"") for _ in range(20)])
    claims = await transport.claim(["q"], 5)
    await transport.wait(["q"], SOON)
    source = transport._sources["q"]
    assert len(claims) == 5 and len(source.ready) <= 5
    other: Any = await millpond.connect(transport.url.raw)
    assert len(await other.claim(["q"], 20)) >= 10
    await other.close()


async def test_a_message_that_no_queue_takes_is_an_error(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORB-D6, TSK-D7: neither confirmed and gone, nor Ok"""

    async def undeclared(queue: str) -> str:
        return queue

    monkeypatch.setattr(transport.topology, "work", undeclared)
    with pytest.raises(Unroutable, match="q"):
        await transport.publish([Message(queue="q", payload=b"")])


async def test_a_deleted_queue_is_declared_again(transport: Any) -> None:
    """TSK-D8: a missing queue ends neither the channel nor later calls"""
    await transport.publish([Message(queue="q", payload=b"gone")])
    admin = await transport.publishing.channel()
    await admin._underlay.queue_delete("q")
    await transport.publish([Message(queue="q", payload=b"1"), Message(queue="q", payload=b"2")])
    assert [(await arrival(transport)).message.payload for _ in range(2)] == [b"1", b"2"]
    await admin._underlay.queue_delete("q")
    assert await transport.claim(["q"]) == []
    await transport.publish([Message(queue="q", payload=b"3")])
    assert (await arrival(transport)).message.payload == b"3"


async def test_a_queue_is_deleted_under_a_subscription(transport: Any) -> None:
    """The broker takes the consumer away; whoever waits gets one again"""
    await transport.publish([Message(queue="q", payload=b"1")])
    lost = await arrival(transport)
    await transport.wait(["q"], 0.01)
    assert transport._sources["q"]._consumers
    admin = await transport.publishing.channel()
    await admin._underlay.queue_delete("q")
    async with asyncio.timeout(SOON):
        while transport._sources["q"]._consumers:  # noqa: ASYNC110 - it comes from the broker
            await asyncio.sleep(0.01)
    await transport.publish([Message(queue="q", payload=b"2")])
    claim = await arrival(transport)
    assert claim.message.payload == b"2"
    outcomes = [Ack(lost.receipt), Ack(claim.receipt)]
    assert await transport.settle(outcomes) == [lost.receipt]  # gone with its queue


async def test_no_lease_is_longer_than_the_broker_allows(rabbitmq_url: str) -> None:
    clock = ManualClock()
    transport: Any = await millpond.connect(rabbitmq_url, consumer_timeout=60, clock=clock)
    await transport.publish([Message(queue="q", payload=b"")])
    with pytest.raises(InvalidTime, match="consumer_timeout"):
        await transport.claim(["q"], lease=61)
    (claim,) = await transport.claim(["q"], lease=60)
    clock.advance(59)
    assert await transport.extend([claim.receipt], lease=60) == []  # up to what is left
    assert await transport.reap() == 0
    clock.advance(1)
    assert await transport.reap() == 1
    assert await transport.extend([claim.receipt]) == [claim.receipt]
    await transport.close()


async def test_a_queue_with_other_settings(transport: Any) -> None:
    channel = await transport.publishing.channel()
    await channel.declare_queue("q", {"x-queue-type": "classic"})
    with pytest.raises(QueueMismatch, match="queue_type"):
        await transport.publish([Message(queue="q", payload=b"")])
    await transport.publish([Message(queue="other", payload=b"")])


async def test_classic_queues(rabbitmq_url: str) -> None:
    transport: Any = await millpond.connect(rabbitmq_url, queue_type="classic")
    await transport.publish([Message(queue="q", payload=b"")])
    claim = await arrival(transport)
    await transport.settle([Nack(claim.receipt, delay=0.1)])
    claim = await arrival(transport)
    assert (claim.deliveries, claim.attempts) == (2, 1)
    assert await transport.settle([Ack(claim.receipt)]) == []
    await transport.close()


async def test_encrypted(rabbitmq_server: RabbitMQ, rabbitmq_url: str) -> None:
    """Against a real TLS listener: an authority that is not trusted is refused, and so is a port without TLS"""
    vhost = rabbitmq_url.rpartition("/")[2]
    url = rabbitmq_server.tls_url_of(vhost)
    transport: Any = await millpond.connect(f"{url}?cafile={rabbitmq_server.certificate}")
    await transport.publish([Message(queue="q", payload=b"hidden")])
    assert (await arrival(transport)).message.payload == b"hidden"
    assert all(listed["ssl"] for listed in rabbitmq_server.ask("GET", f"/vhosts/{vhost}/connections"))
    await transport.close()
    with pytest.raises(EncryptionFailed, match="cafile") as failed:
        await millpond.connect(url)
    assert rabbitmq_server.password not in str(failed.value)
    with pytest.raises((EncryptionFailed, Unreachable)):
        await millpond.connect(rabbitmq_url.replace("amqp:", "amqps:"), connect_max_retries=0)


async def test_parameters_of_the_url(rabbitmq_url: str) -> None:
    with pytest.raises(InvalidURL, match="cafile"):
        await millpond.connect(f"{rabbitmq_url}?cafil=/x")
    with pytest.raises(InvalidURL, match="does not exist"):
        await millpond.connect(f"{rabbitmq_url}?cafile=/no/such/file")


async def test_what_is_wrong_with_the_url(rabbitmq_server: RabbitMQ, rabbitmq_url: str) -> None:
    """ORB-C3, ORB-C7, ORB-D9: a clear error after the set retries, and no password in it"""
    wrong = rabbitmq_url.replace(rabbitmq_server.password, "wrong-secret")
    with pytest.raises(AuthenticationFailed) as failed:
        await millpond.connect(wrong)
    assert "wrong-secret" not in str(failed.value)
    with pytest.raises(UnknownDatabase):
        await millpond.connect(rabbitmq_server.url_of("no-such-host"))
    with pytest.raises(Unreachable, match="2 times") as unreachable:
        await millpond.connect(f"amqp://u:secret@127.0.0.1:{free_port()}/", connect_max_retries=1)
    assert "secret" not in str(unreachable.value)
