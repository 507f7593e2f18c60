"""Limits of the broker: size of a message, channels, connections and memory. And connections that fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from aiormq.abc import ChannelFrame

import millpond
from millpond import Ack, GiveBack, ManualClock, Message, Nack, Reject, State
from millpond.bridge import Bridge
from millpond.control import Control
from millpond.errors import BodyTooLarge, StoreUnavailable, UnknownDatabase
from servers import Proxy, RabbitMQ
from tests.rabbitmq.alarms import alarm
from tests.rabbitmq.attacker import EXPIRATION, FORGED_DEATHS, HEADERS, UNDECODABLE, attacker, table
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim

pytestmark = [pytest.mark.server, pytest.mark.slow]  # brokers with their own limits
LARGEST = 1_000_000


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQ]:
    with RabbitMQ(settings={"max_message_size": str(LARGEST), "channel_max": "10"}) as server:
        yield server


async def test_a_body_above_the_brokers_limit_is_a_final_error(broker: RabbitMQ) -> None:
    transport: Any = await millpond.connect(broker.create_vhost(uuid4().hex), body_limit=4_000_000)
    for _ in range(2):
        with pytest.raises(BodyTooLarge, match="max_message_size"):
            await transport.publish([Message(queue="q", payload=b"x" * (LARGEST + 1))])
    await transport.publish([Message(queue="q", payload=b"ok")])
    await transport.close()


async def test_a_bridge_moves_all_but_the_message_that_is_too_large(broker: RabbitMQ) -> None:
    store: Any = await millpond.connect("memory://", body_limit=4_000_000)
    bodies = [b"%d" % n for n in range(10)]
    await store.publish([Message(queue="q", payload=body) for body in [*bodies[:5], b"x" * (LARGEST + 1), *bodies[5:]]])
    target: Any = await millpond.connect(broker.create_vhost(uuid4().hex), body_limit=4_000_000)
    assert await asyncio.wait_for(Bridge(store, target, ["q"]).drain(), SOON) == 10
    await target.close()
    await store.close()


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_message_above_a_limit_that_was_lowered_is_a_dead_letter(broker: RabbitMQ, queue_type: str) -> None:
    """As after an upgrade to RabbitMQ 4, whose default is 16 MiB: no copy of an older message can be published"""
    url = broker.create_vhost(uuid4().hex)
    transport: Any = await millpond.connect(url, queue_type=queue_type)
    large = [b"%d" % n * 1000 for n in range(4)]
    expired = Message(queue="q", payload=large[3], expires=0.001)
    await transport.publish([*(Message(queue="q", payload=body) for body in large[:3]), expired])
    await transport.publish([Message(queue="q", payload=b"good")])
    await transport.close()
    try:
        broker.control("eval", "application:set_env(rabbit, max_message_size, 500).")
        transport = await millpond.connect(url, queue_type=queue_type)
        claims: list[Any] = []
        async with asyncio.timeout(SOON):
            while len(claims) < 4:
                claims += await transport.claim(["q"], 10)
        nacked, rejected, given_back, good = (claim.receipt for claim in claims)
        outcomes = [Nack(nacked, 1.0), Reject(rejected), GiveBack(given_back), Ack(good)]
        assert await transport.settle(outcomes) == []
        async with asyncio.timeout(SOON):
            while len(rows := await Control(transport).messages("q", states=[State.FAILED])) < 4:
                pass
    finally:
        broker.control("eval", f"application:set_env(rabbit, max_message_size, {LARGEST}).")
    assert {row.payload for row in rows} == set(large)
    assert {row.reason for row in rows} == {"rejected by the broker"}
    await transport.close()


@pytest.mark.parametrize("exists", [False, True])
async def test_a_message_above_the_limit_stops_no_claim_when_its_lease_ends(broker: RabbitMQ, exists: bool) -> None:
    """A classic queue gets a copy of it, which is refused. One with other arguments may have no dead letters"""
    url, clock = broker.create_vhost(uuid4().hex), ManualClock()
    if exists:
        async with attacker(url) as other:
            await other.channel.queue_declare("q", durable=True)
    transport: Any = await millpond.connect(url, queue_type="classic")
    await transport.publish([Message(queue="q", payload=b"large" * 200), Message(queue="q", payload=b"good")])
    await transport.close()
    try:
        broker.control("eval", "application:set_env(rabbit, max_message_size, 500).")
        transport = await millpond.connect(url, queue_type="classic", clock=clock)
        claim = await next_claim(transport)
        clock.advance(31)
        assert (await next_claim(transport)).message.payload == b"good"
        if not exists:
            (letter,) = await dead_letters(Control(transport))
            assert (letter.id, letter.reason) == (claim.message.id, "rejected by the broker")
    finally:
        broker.control("eval", f"application:set_env(rabbit, max_message_size, {LARGEST}).")
    await transport.close()


async def test_channels_beyond_the_brokers_maximum_get_a_further_connection(broker: RabbitMQ) -> None:
    transport: Any = await millpond.connect(broker.create_vhost(uuid4().hex))
    queues = [f"q{n}" for n in range(13)]
    await transport.publish([Message(queue=queue, payload=b"") for queue in queues])
    claims = []
    async with asyncio.timeout(SOON):
        for queue in queues:
            while not (some := await transport.claim([queue])):
                pass
            claims += some
    assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []
    assert transport.consumer_pool.count == 2
    await transport.close()


async def test_a_forged_death_that_expires_stops_nothing(broker: RabbitMQ) -> None:
    """RabbitMQ before 4.0 would move no dead letter of the node any more, and declare no queue"""
    url = broker.create_vhost(uuid4().hex)
    transport: Any = await millpond.connect(url, broker_dead_letters=False)
    await transport.claim(["q"])
    async with attacker(url) as attack:
        for forged in FORGED_DEATHS.values():
            await attack.send(struct.pack(">HI", HEADERS | EXPIRATION, len(forged)) + forged + b"\x010")
            await attack.send(UNDECODABLE["header name in Latin-1"], b"unreadable")
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"good")])
    claim = await next_claim(transport)
    assert await transport.settle([Nack(claim.receipt, delay=0.1)]) == []
    claim = await next_claim(transport)
    assert (claim.message.payload, claim.attempts) == (b"good", 1)
    assert await transport.settle([Ack(claim.receipt)]) == []
    await transport.publish([Message(queue="another", payload=b"x")])
    assert {row.payload for row in await dead_letters(Control(transport))} == {b"unreadable"}
    await transport.close()


@pytest.mark.parametrize("forged", FORGED_DEATHS.values(), ids=FORGED_DEATHS)
async def test_a_forged_death_above_a_limit_that_was_lowered_stops_nothing(broker: RabbitMQ, forged: bytes) -> None:
    """No copy of the message can be published, and RabbitMQ before 4.0 would not survive its move"""
    transport: Any = await millpond.connect(broker.create_vhost(uuid4().hex))
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        await attack.send(table(forged + b"\x02\xe9\xe9t\x01"), b"unreadable" * 100)
        await attack.send(table(forged), b"readable" * 100)
        await attack.flush()
    try:
        broker.control("eval", "application:set_env(rabbit, max_message_size, 500).")
        claim = await next_claim(transport)
        with pytest.raises(BodyTooLarge):
            await transport.settle([Nack(claim.receipt)])
        assert await transport.extend([claim.receipt]) == [], "it is still held"
        await transport.publish([Message(queue="another", payload=b"good", delay=0.1)])
        assert (await next_claim(transport, "another")).message.payload == b"good"
    finally:
        broker.control("eval", f"application:set_env(rabbit, max_message_size, {LARGEST}).")
    await transport.close()


async def test_a_limit_of_connections_is_retryable(broker: RabbitMQ) -> None:
    vhost = uuid4().hex
    url = broker.create_vhost(vhost)
    broker.ask("PUT", f"/vhost-limits/{vhost}/max-connections", {"value": 0})
    with pytest.raises(StoreUnavailable, match="limit"):
        await millpond.connect(url, connect_max_retries=1)
    broker.ask("DELETE", f"/vhost-limits/{vhost}/max-connections")
    with pytest.raises(UnknownDatabase, match="not found"):
        await millpond.connect(broker.url_of("missing"))


async def test_a_silent_connection_is_given_up_by_a_publish(broker: RabbitMQ) -> None:
    with Proxy(broker.port) as proxy:
        url = proxy.url(broker.create_vhost(uuid4().hex))
        transport: Any = await millpond.connect(url, call_timeout=1, reconnect_timeout=10)
        await transport.publish([Message(queue="q", payload=b"")])
        proxy.black_hole()
        with pytest.raises(StoreUnavailable):
            await transport.publish([Message(queue="q", payload=b"")])
        proxy.cut()  # new connections are served
        proxy.resume()
        await asyncio.wait_for(transport.publish([Message(queue="q", payload=b"")]), SOON)
        await transport.close()


@pytest.mark.parametrize("end", ["cut", "silent"])
async def test_acks_do_not_wait_for_a_connection_that_is_lost(broker: RabbitMQ, end: str) -> None:
    """The driver's queue of frames is full, and its writer waits for a network that takes no bytes"""
    with Proxy(broker.port) as proxy:
        url = proxy.url(broker.create_vhost(uuid4().hex))
        transport: Any = await millpond.connect(url, call_timeout=60 if end == "cut" else 1)
        await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(40)])
        claims: list[Any] = []
        while len(claims) < 40:
            claims += await transport.claim(["q"], 40)
        driver = transport.consumer_pool._connections[0].amqp.driver
        proxy.black_hole()
        unread = driver.loop.create_future()
        await driver.write_queue.put(ChannelFrame(b"\0" * (64 << 20), should_close=False, drain_future=unread))
        chosen = [claim.receipt for claim in claims[1::2]]  # each of them is a frame
        settling = asyncio.create_task(transport.settle([Ack(receipt) for receipt in chosen]))
        async with asyncio.timeout(SOON):
            while not driver.write_queue.full():  # noqa: ASYNC110 - the driver has no event for it
                await asyncio.sleep(0)
        if end == "cut":
            proxy.cut()
        stale = await asyncio.wait_for(settling, SOON)
        assert set(stale) == set(chosen)
        proxy.cut()
        proxy.resume()
        bodies: set[bytes] = set()
        async with asyncio.timeout(SOON):
            while len(bodies) < 40:
                with contextlib.suppress(StoreUnavailable):  # the publisher's connection was cut as well
                    bodies |= {claim.message.payload for claim in await transport.claim(["q"], 40)}
        await transport.close()


@pytest.mark.parametrize("kind", ["memory", pytest.param("disk", marks=[pytest.mark.slow, pytest.mark.long])])
async def test_acks_do_not_wait_for_a_publish_during_an_alarm(broker: RabbitMQ, kind: str) -> None:
    """One nack needs a publish, which the broker does not read; 20 acks need none"""
    vhost = uuid4().hex
    transport: Any = await millpond.connect(broker.create_vhost(vhost))
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(21)])
    claims: list[Any] = []
    while len(claims) < 21:
        claims += await transport.claim(["q"], 21)
    async with alarm(broker, transport, kind):
        outcomes = [Nack(claims[0].receipt), *(Ack(claim.receipt) for claim in claims[1:])]
        assert await asyncio.wait_for(transport.settle(outcomes), 10) == []
        async with asyncio.timeout(SOON):
            unacked = None  # the broker's statistics come every few seconds
            while unacked != 1:
                unacked = (await asyncio.to_thread(broker.ask, "GET", f"/queues/{vhost}/q")).get(
                    "messages_unacknowledged"
                )
    again = await next_claim(transport, within=SOON)
    assert again.message.payload == b"0" and again.attempts == 1
    await transport.settle([Ack(again.receipt)])
    await transport.close()


async def test_letters_are_listed_during_an_alarm(broker: RabbitMQ) -> None:
    """A letter that was listed before is replaced by a copy, which the broker does not read now"""
    transport: Any = await millpond.connect(broker.create_vhost(uuid4().hex))
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    for _ in range(3):
        claim = await next_claim(transport)
        assert await transport.settle([Reject(claim.receipt)]) == []
    control = Control(transport)
    before = await control.messages("q")
    async with alarm(broker, transport), asyncio.timeout(SOON):
        listed = [await control.messages("q") for _ in range(2)]
        (stats,) = await control.operations.count(["q"])
        with pytest.raises(StoreUnavailable, match="short of memory"):
            await control.retry([before[0].id])
    assert listed == [before, before] and stats.counts[State.FAILED] == len(before) == 3
    assert await control.messages("q") == before
    assert len((await control.retry([row.id for row in before])).published) == 3
    await transport.close()


async def test_a_process_that_starts_during_an_alarm_doubles_no_letter(broker: RabbitMQ) -> None:
    """The broker tells it about the alarm when it has published"""
    transport: Any = await millpond.connect(broker.create_vhost(uuid4().hex))
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    for _ in range(3):
        claim = await next_claim(transport)
        assert await transport.settle([Reject(claim.receipt)]) == []
    before = await Control(transport).messages("q")
    async with alarm(broker, transport), asyncio.timeout(SOON):
        second: Any = await millpond.connect(transport.url.raw)
        for _ in range(2):
            assert await Control(second).messages("q") == before
        assert (await second.operations.count(["q"]))[0].counts[State.FAILED] == 3
        closing = asyncio.create_task(second.close())
    await closing
    assert await Control(transport).messages("q") == before
    assert (await transport.operations.count(["q"]))[0].counts[State.FAILED] == 3
    await transport.close()


async def test_a_claim_needs_no_connection_that_is_blocked(broker: RabbitMQ) -> None:
    """A lost connection ends the knowledge of queues, and they are declared again"""
    transport: Any = await millpond.connect(broker.create_vhost(uuid4().hex))
    await transport.publish([Message(queue="q", payload=b"x")])
    async with alarm(broker, transport):
        transport.topology.forget()
        claim = await asyncio.wait_for(next_claim(transport), SOON)
        assert await transport.settle([Ack(claim.receipt)]) == []
    await transport.close()
