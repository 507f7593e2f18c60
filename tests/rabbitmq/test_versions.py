"""Differences between versions of RabbitMQ. The tests run 3.10; later versions are imitated by `newer.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import aiormq
import pytest

import millpond
from millpond import Ack, ManualClock, Message, Reject
from millpond.control import Control
from millpond.errors import StoreError
from millpond.transports.rabbitmq import versions
from millpond.transports.rabbitmq.options import RabbitOptions
from millpond.transports.rabbitmq.versions import consumer_arguments, version_of
from servers import RabbitMQ
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim
from tests.rabbitmq.newer import cancel_frame, imitate_version


@pytest.mark.parametrize(
    ("product", "text", "version"),
    [
        ("RabbitMQ", "3.10.8", (3, 10)),
        ("RabbitMQ", "4.3.0-rc.1", (4, 3)),
        ("RabbitMQ", "4.0.5+1.g0123abc", (4, 0)),
        ("RabbitMQ", "newest", None),
        ("RabbitMQ", None, None),
        ("LavinMQ", "2.1.0", None),
    ],
)
def test_the_version_of_a_broker(product: str, text: str | None, version: tuple[int, int] | None) -> None:
    assert version_of({"product": product, "version": text}) == version


async def test_a_broker_that_is_too_old_is_refused(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_version(monkeypatch, 3, 9)
    with pytest.raises(StoreError, match=r"RabbitMQ 3\.9.* 3\.10 or later"):
        await millpond.connect(rabbitmq_url)


@pytest.mark.parametrize(("version", "hinted"), [((3, 10), True), ((3, 11), True), ((3, 13), False), ((4, 3), False)])
async def test_a_feature_flag_that_an_upgraded_cluster_may_lack(
    rabbitmq_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: tuple[int, int],
    hinted: bool,
) -> None:
    imitate_version(monkeypatch, *version)
    with caplog.at_level(logging.INFO, "millpond.rabbitmq"):
        await (await millpond.connect(rabbitmq_url)).close()
    assert ("enable_feature_flag stream_queue" in caplog.text) == hinted


@pytest.mark.parametrize(
    ("version", "broker_dead_letters", "warned"),
    [
        ((3, 10), True, True),
        ((3, 12), True, True),
        ((3, 10), False, False),
        ((3, 13), True, True),
        ((4, 0), True, False),
    ],
)
def test_the_danger_of_forged_deaths_is_named_once(
    caplog: pytest.LogCaptureFixture, version: tuple[int, int], broker_dead_letters: bool, warned: bool
) -> None:
    versions._warn_of_forged_deaths.cache_clear()
    for _ in range(2):
        versions.check_version(version, broker_dead_letters=broker_dead_letters)
    assert caplog.text.count("x-death") == warned


async def test_consumers_bring_their_timeout_from_4_3_on(
    rabbitmq_url: str, rabbitmq_server: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitated: 3.10 stores the argument and does not use it"""
    imitate_version(monkeypatch, 4, 3)
    transport: Any = await millpond.connect(rabbitmq_url, consumer_timeout=7200)
    waiting = asyncio.create_task(transport.wait(["q"], SOON))
    vhost = rabbitmq_url.rpartition("/")[2]
    async with asyncio.timeout(SOON):
        while not (consumers := await asyncio.to_thread(rabbitmq_server.ask, "GET", f"/consumers/{vhost}")):
            pass
    assert consumers[0]["arguments"] == {"x-consumer-timeout": 7_200_000}
    await transport.publish([Message(queue="q", payload=b"x")])
    await waiting
    await transport.close()
    assert consumer_arguments((4, 2), RabbitOptions()) == consumer_arguments(None, RabbitOptions()) == {}
    assert consumer_arguments((4, 3), RabbitOptions(queue_type="classic")) == {}


async def test_a_consumer_that_4_3_cancels_after_its_timeout(transport: Any) -> None:
    """Imitated by the frame. Its receipts are stale, its message is no crash, and the worker consumes again"""
    await transport.publish([Message(queue="q", payload=b"slow")])
    await transport.wait(["q"], SOON)
    claim = await next_claim(transport)
    consumer = transport._consumers["q"]
    ((tag, channel),) = consumer._subscriptions.items()
    channel._reader.feed_data(cancel_frame(channel._underlay.number, tag))
    async with asyncio.timeout(SOON):
        while await transport.extend([claim.receipt]) == []:  # noqa: ASYNC110 - the driver has no event for it
            await asyncio.sleep(0.01)
    assert await transport.settle([Ack(claim.receipt)]) == [claim.receipt]
    again = await next_claim(transport)
    assert (again.message.payload, again.crashes, again.redelivered) == (b"slow", 0, True)
    assert await transport.settle([Ack(again.receipt)]) == []


def spy_on(monkeypatch: pytest.MonkeyPatch, name: str, used: list[str]) -> None:
    given = getattr(aiormq.Channel, name)

    async def spy(self: Any, tag: int, **how: Any) -> None:
        used.append(name)
        await given(self, tag, **how)

    monkeypatch.setattr(aiormq.Channel, name, spy)


async def test_lapsed_leases_are_rejected_and_listed_letters_are_nacked(
    rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 4.3 on a reject counts as a delivery, and a nack does not. Before that both do"""
    used: list[str] = []
    for name in ("basic_nack", "basic_reject"):
        spy_on(monkeypatch, name, used)
    clock = ManualClock()
    transport: Any = await millpond.connect(rabbitmq_url, clock=clock)
    await transport.publish([Message(queue="q", payload=b"x")])
    await next_claim(transport)
    clock.advance(31)
    assert await transport.workers.reap() == 1 and used == ["basic_reject"]
    claim = await next_claim(transport)
    assert claim.crashes == 1
    await transport.settle([Reject(claim.receipt)])
    await dead_letters(Control(transport))
    await transport.operations._put_back("q")
    assert used[1:] == ["basic_nack"]
    await transport.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[RabbitMQ]:
    """A broker whose consumers must ack within two seconds."""
    with RabbitMQ(settings={"consumer_timeout": "2000"}) as server:
        server.control("eval", "application:set_env(rabbit, channel_tick_interval, 500).")
        yield server


@pytest.mark.server
async def test_a_channel_that_the_broker_closes_after_its_timeout(impatient: RabbitMQ) -> None:
    """Up to 4.2. A worker that was mistaken about the timeout handles the message in the end"""
    transport: Any = await millpond.connect(impatient.create_vhost(uuid4().hex))
    await transport.publish([Message(queue="q", payload=b"slow")])
    for _ in range(2):
        claim = await next_claim(transport)
        assert claim.crashes == 0
        async with asyncio.timeout(SOON):
            while await transport.extend([claim.receipt]) == []:  # noqa: ASYNC110 - the broker decides
                await asyncio.sleep(0.05)
    claim = await next_claim(transport)
    assert await transport.settle([Ack(claim.receipt)]) == []
    await transport.close()


async def test_messages_that_waited_in_the_worker_go_back_in_time(rabbitmq_url: str) -> None:
    """The broker's timeout runs from the delivery. A lease that would end later is not given"""
    clock = ManualClock()
    transport: Any = await millpond.connect(rabbitmq_url, consumer_timeout=60, clock=clock)
    await transport.publish([Message(queue="q", payload=b"x")])
    await transport.wait(["q"], SOON)
    received = transport._consumers["q"].ready[0]
    clock.advance(20)
    (claim,) = await transport.claim(["q"], lease=30)
    assert await transport.extend([claim.receipt], lease=60) == []
    clock.advance(39)
    assert await transport.workers.reap() == 0
    clock.advance(1)
    assert await transport.workers.reap() == 1, "60 seconds after it was received"
    await transport.wait(["q"], SOON)
    clock.advance(50)
    claim = await next_claim(transport)  # it was sent back, and received again
    assert claim.deliveries == 2 and received.tag != claim.receipt.token % 2**40
    assert await transport.settle([Ack(claim.receipt)]) == []
    await transport.close()
