"""Connections, channels and declared queues: spread, reused, restored."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import aiormq
import pytest

import millpond
from millpond import Ack, ManualClock, Message, Nack
from millpond.errors import (
    AuthenticationFailed,
    EncryptionFailed,
    InvalidOption,
    InvalidQueue,
    InvalidTime,
    InvalidURL,
    QueueMismatch,
    StoreError,
    StoreUnavailable,
    UnknownDatabase,
    Unreachable,
    Unroutable,
)
from servers import Proxy, RabbitMQ
from servers.ports import free_port
from tests.rabbitmq.conftest import SOON, next_claim


async def test_a_pool_over_few_channels(rabbitmq_url: str) -> None:
    """10 consumers on connections of 5 channels, 100 messages, 30 % nacks: all messages arrive"""
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
    assert transport.consumer_pool.count == 2  # ten consumers
    assert transport.publisher_pool.count == 2  # seven publishers, and the channel that declares
    await transport.close()


async def test_channels_are_reused(transport: Any) -> None:
    for _ in range(50):
        await transport.publish([Message(queue="q", payload=b"")])
        await transport.claim(["q"])
    assert len(transport.publisher._channels) == 1
    assert len(transport._consumers["q"]._channels) == 1


async def test_acks_are_written_before_a_close(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"acked")])
    other: Any = await millpond.connect(transport.url.raw)
    claim = await next_claim(other)
    assert await other.settle([Ack(claim.receipt)]) == []
    await other.close()
    await transport.publish([Message(queue="q", payload=b"next")])
    assert (await next_claim(transport)).message.payload == b"next"


async def test_an_ack_of_several_does_not_include_a_message_from_get(transport: Any) -> None:
    """Its tag is lower than those of messages that were sent after it and received before it"""
    await transport.publish([Message(queue=queue, payload=b"") for queue in ("got", "q", "q")])
    channel, received = await transport.consumer_pool.channel(), list[int]()
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
    await channel.consume("q", 2, lambda _, message: received.append(message.tag))
    assert await asyncio.wait_for(getting, SOON)
    assert list(channel.unsettled) == [1, 2, 3] and received == [2, 3]
    await channel.ack(received)
    await channel.close()
    assert await transport.claim(["q"], 5) == []
    assert len(await transport.claim(["got"], 5)) == 1


async def test_prefetch_is_the_demand(transport: Any) -> None:
    """The rest of the messages stays in the queue for other consumers"""
    await transport.publish([Message(queue="q", payload=b"") for _ in range(20)])
    claims = await transport.claim(["q"], 5)
    await transport.wait(["q"], SOON)
    consumer = transport._consumers["q"]
    assert len(claims) == 5 and len(consumer.ready) <= 5
    other: Any = await millpond.connect(transport.url.raw)
    assert len(await other.claim(["q"], 20)) >= 10
    await other.close()


async def test_a_message_that_no_queue_takes_is_an_error(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher must not get a confirm"""

    async def undeclared(queue: str) -> str:
        return queue

    monkeypatch.setattr(transport.topology, "declare_work_queue", undeclared)
    with pytest.raises(Unroutable, match="q"):
        await transport.publish([Message(queue="q", payload=b"")])


async def test_a_deleted_queue_is_declared_again(transport: Any) -> None:
    """A missing queue breaks neither the channel nor later calls"""
    await transport.publish([Message(queue="q", payload=b"gone")])
    admin = await transport.publisher_pool.channel()
    await admin._underlay.queue_delete("q")
    await transport.publish([Message(queue="q", payload=b"1"), Message(queue="q", payload=b"2")])
    assert [(await next_claim(transport)).message.payload for _ in range(2)] == [b"1", b"2"]
    await admin._underlay.queue_delete("q")
    assert await transport.claim(["q"]) == []
    await transport.publish([Message(queue="q", payload=b"3")])
    assert (await next_claim(transport)).message.payload == b"3"


async def test_a_queue_is_deleted_under_a_subscription(transport: Any) -> None:
    """The broker cancels the consumer, and `wait` subscribes again"""
    await transport.publish([Message(queue="q", payload=b"1")])
    lost = await next_claim(transport)
    await transport.wait(["q"], 0.5)
    assert transport._consumers["q"]._subscriptions
    admin = await transport.publisher_pool.channel()
    await admin._underlay.queue_delete("q")
    async with asyncio.timeout(SOON):
        while transport._consumers["q"]._subscriptions:  # noqa: ASYNC110 - it comes from the broker
            await asyncio.sleep(0.01)
    await transport.publish([Message(queue="q", payload=b"2")])
    claim = await next_claim(transport)
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
    assert await transport.extend([claim.receipt], lease=60) == []  # only up to consumer_timeout
    assert await transport.workers.reap() == 0
    clock.advance(1)
    assert await transport.workers.reap() == 1
    assert await transport.extend([claim.receipt]) == [claim.receipt]
    await transport.close()


async def test_a_queue_with_other_settings(transport: Any) -> None:
    channel = await transport.publisher_pool.channel()
    await channel.declare_queue("q", {"x-queue-type": "classic"})
    with pytest.raises(QueueMismatch, match="queue_type"):
        await transport.publish([Message(queue="q", payload=b"")])
    await transport.publish([Message(queue="other", payload=b"")])


async def test_classic_queues(rabbitmq_url: str) -> None:
    transport: Any = await millpond.connect(rabbitmq_url, queue_type="classic")
    await transport.publish([Message(queue="q", payload=b"")])
    claim = await next_claim(transport)
    await transport.settle([Nack(claim.receipt, delay=0.1)])
    claim = await next_claim(transport)
    assert (claim.deliveries, claim.attempts) == (2, 1)
    assert await transport.settle([Ack(claim.receipt)]) == []
    await transport.close()


async def test_only_our_connections_are_quiet_in_the_log_of_the_driver(
    rabbitmq_server: RabbitMQ, rabbitmq_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker closes our connections and one of the application. The driver logs only the last"""
    application = await aiormq.connect(rabbitmq_url)
    transport: Any = await millpond.connect(rabbitmq_url)
    await transport.publish([Message(queue="q", payload=b"")])
    vhost = rabbitmq_url.rpartition("/")[2]
    await asyncio.to_thread(rabbitmq_server.control, "close_all_connections", "--vhost", vhost, "tested")
    async with asyncio.timeout(SOON):
        while not application.is_closed:  # noqa: ASYNC110 - it comes from the broker
            await asyncio.sleep(0.01)
    await transport.publish([Message(queue="q", payload=b"")])  # on a new connection
    closed = [record for record in caplog.records if "Unexpected connection close" in record.getMessage()]
    assert [record.name for record in closed] == ["aiormq.connection"]
    assert "was lost" in "".join(r.getMessage() for r in caplog.records if r.name == "millpond.rabbitmq")
    await transport.close()


async def test_encrypted(rabbitmq_server: RabbitMQ, rabbitmq_url: str) -> None:
    """A real TLS listener: an untrusted authority and a port without TLS are errors"""
    vhost = rabbitmq_url.rpartition("/")[2]
    url = rabbitmq_server.tls_url_of(vhost)
    transport: Any = await millpond.connect(f"{url}?cafile={rabbitmq_server.certificate}")
    await transport.publish([Message(queue="q", payload=b"hidden")])
    assert (await next_claim(transport)).message.payload == b"hidden"
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


@pytest.mark.parametrize("value", ["heartbeat=", "heartbeat=1m", "heartbeat=-5", "heartbeat=65535", "auth=plian"])
async def test_values_that_the_driver_would_ignore_are_refused(value: str) -> None:
    """It would send no heartbeats, or log in another way"""
    name = value.partition("=")[0]
    with pytest.raises(InvalidURL, match=f"{name} of the URL amqp://u:[*]+@127.0.0.1/v must be"):
        await millpond.connect(f"amqp://u:secret@127.0.0.1/v?{value}")
    with pytest.raises(InvalidURL, match=name):
        millpond.Millpond(f"amqp://u:secret@127.0.0.1/v?{value}")


async def test_errors_of_the_url(rabbitmq_server: RabbitMQ, rabbitmq_url: str) -> None:
    """A clear error after `connect_max_retries`, without the password"""
    wrong = rabbitmq_url.replace(rabbitmq_server.password, "wrong-secret")
    with pytest.raises(AuthenticationFailed) as failed:
        await millpond.connect(wrong)
    assert "wrong-secret" not in str(failed.value)
    with pytest.raises(UnknownDatabase):
        await millpond.connect(rabbitmq_server.url_of("no-such-host"))
    with pytest.raises(Unreachable, match="2 times") as unreachable:
        await millpond.connect(f"amqp://u:secret@127.0.0.1:{free_port()}/", connect_max_retries=1)
    assert "secret" not in str(unreachable.value)


async def test_a_pool_takes_no_more_than_is_wanted(rabbitmq_url: str) -> None:
    """Five channels, one handler: four of five messages stay for another worker"""
    first: Any = await millpond.connect(rabbitmq_url, subscriber_pool_size=5)
    await first.wait(["q"], 0.1)
    await first.publish([Message(queue="q", payload=b"") for _ in range(5)])
    await first.wait(["q"], SOON)
    second: Any = await millpond.connect(rabbitmq_url)
    claims: list[Any] = []
    async with asyncio.timeout(SOON):
        while len(claims) < 4:
            claims += await second.claim(["q"], 5)
    await first.close()
    await second.close()


@pytest.mark.parametrize("ignored", [True, False])
async def test_a_driver_without_our_stream_is_refused(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    """Deliveries never stop silently: an aiormq without transport_factory is an error at connect"""
    given = aiormq.Connection

    def connection(url: str, *, client_properties: Any = None, **others: Any) -> Any:
        if not ignored and others:
            raise TypeError("an unexpected argument")
        return given(url, client_properties=client_properties)

    monkeypatch.setattr(aiormq, "Connection", connection)
    with pytest.raises(StoreError, match="transport_factory"):
        await millpond.connect(rabbitmq_url)


async def test_a_message_that_the_driver_delivers_closes_its_channel(
    transport: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It returns to its queue, and a new channel receives it"""
    await transport.publish([Message(queue="q", payload=b"x")])
    await transport.wait(["q"], SOON)
    (channel,) = transport._consumers["q"]._channels
    (consumer,) = channel._underlay.consumers.values()
    await consumer("a message")
    assert channel.closed and "aiormq delivered a message itself" in caplog.text
    assert (await next_claim(transport)).message.payload == b"x"


async def test_pool_sizes_of_single_queues(rabbitmq_url: str) -> None:
    given = {"subscriber_pool_size": 2, "subscriber_pool_sizes": {"wide": 4}}
    transport: Any = await millpond.connect(rabbitmq_url, **given)
    for queue, channels in (("wide", 4), ("other", 2)):
        await transport.claim([queue], 10)
        await transport.wait([queue], 0.001)  # ends half-way
        await transport.wait([queue], 1)
        assert len(transport._consumers[queue]._channels) == channels
    await transport.close()
    for wrong in ({"wide": 0}, {"": 1}, {"wide": "4"}, 4):
        with pytest.raises((InvalidOption, InvalidQueue), match="subscriber_pool_sizes"):
            await millpond.connect(rabbitmq_url, subscriber_pool_sizes=wrong)


# --- several hosts ----------------------------------------------------------------------------------


def of_both(first: Proxy, second: Proxy, url: str) -> str:
    return first.url(url).replace(f":{first.port}/", f":{first.port},{second.host}:{second.port}/")


async def test_a_host_that_refuses_is_left_out(rabbitmq_url: str, rabbitmq_server: RabbitMQ) -> None:
    with Proxy(rabbitmq_server.port) as first, Proxy(rabbitmq_server.port) as second:
        first.refuse()
        for _ in range(4):
            transport: Any = await millpond.connect(of_both(first, second, rabbitmq_url), connect_max_retries=0)
            await transport.publish([Message(queue="q", payload=b"")])
            await transport.settle([Ack((await next_claim(transport)).receipt)])
            await transport.close()
        second.refuse()
        with pytest.raises(Unreachable, match=rf":{first.port},.*:{second.port}/") as failed:
            await millpond.connect(of_both(first, second, rabbitmq_url), connect_max_retries=0)
        assert rabbitmq_server.password not in str(failed.value)


async def test_a_lost_host_is_replaced_by_another(rabbitmq_url: str, rabbitmq_server: RabbitMQ) -> None:
    with Proxy(rabbitmq_server.port) as first, Proxy(rabbitmq_server.port) as second:
        transport: Any = await millpond.connect(of_both(first, second, rabbitmq_url))
        for lost, other in ((first, second), (second, first)):
            other.accept()
            lost.refuse()
            lost.cut()
            async with asyncio.timeout(SOON):
                while True:
                    with contextlib.suppress(StoreUnavailable):  # the loss is noticed
                        await transport.publish([Message(queue="q", payload=b"")])
                        break
                claim = await next_claim(transport)
                await transport.settle([Ack(claim.receipt)])
            assert lost.connections == 0 and other.connections == 2
        await transport.close()


async def test_a_wrong_password_is_not_tried_at_every_host(rabbitmq_url: str, rabbitmq_server: RabbitMQ) -> None:
    with Proxy(rabbitmq_server.port) as first, Proxy(rabbitmq_server.port) as second:
        wrong = of_both(first, second, rabbitmq_url).replace(rabbitmq_server.password, "wrong")
        with pytest.raises(AuthenticationFailed):
            await millpond.connect(wrong)
