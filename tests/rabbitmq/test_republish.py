"""Moves in the background: one that fails holds up no other one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from millpond.errors import QueueMismatch, StoreUnavailable, Unroutable
from millpond.transports.rabbitmq.broker_errors import AccessRefused, NoAnswer, NoSuchQueue
from millpond.transports.rabbitmq.copies import copy_unreadable
from millpond.transports.rabbitmq.outgoing import OutgoingMessage
from millpond.transports.rabbitmq.republish import MOST, MOST_BYTES, Republish, Republisher
from tests.rabbitmq.conftest import SOON
from tests.waiting import until


class FakeChannel:
    def __init__(self) -> None:
        self.closed = False
        self.acked: list[int] = []

    async def ack(self, tags: Sequence[int]) -> None:
        self.acked += tags


class Broker:
    """It refuses some bodies, until they are taken out of `refused`."""

    def __init__(self) -> None:
        self.refused: dict[bytes, Exception] = {}
        self.taken: list[bytes] = []
        self.channel: Any = FakeChannel()
        self.is_blocked = False
        self.republisher = Republisher(
            self.record,
            self.send,
            can_reject=lambda queue: False,
            on_lost_ack=lambda identity: None,
            wait_until_blocked=asyncio.Event().wait,
            is_blocked=lambda: self.is_blocked,
        )

    async def record(self, messages: Sequence[OutgoingMessage]) -> None: ...

    async def send(self, messages: Sequence[OutgoingMessage]) -> list[Exception | None]:
        bodies = [message.envelope.payload for message in messages]
        self.taken += [body for body in bodies if body not in self.refused]
        return [self.refused.get(body) for body in bodies]

    def add(self, queue: str, body: bytes, tag: int = 1) -> None:
        self.republisher.add(Republish(self.channel, tag, copy_unreadable(queue, body, "", 0), len(body)))


@pytest.mark.parametrize(
    "error",
    [AccessRefused, NoSuchQueue, NoAnswer, QueueMismatch, StoreUnavailable, Unroutable],
    ids=lambda e: e.__name__,
)
async def test_a_move_that_fails_holds_up_no_other(error: type[Exception]) -> None:
    """Moves to other queues succeed, and other moves to the same queue. It is moved when the broker takes it."""
    broker = Broker()
    for n in range(25):
        broker.refused[b"bad %d" % n] = error("refused")
        broker.add("a", b"bad %d" % n, n)
    broker.add("a", b"good a", 100)
    for n in range(25):
        broker.add("b", b"good %d" % n, 200 + n)
    await until(lambda: len(broker.taken) >= 25, within=SOON)
    assert broker.taken[:25] == [b"good %d" % n for n in range(25)], "in their order"
    broker.refused = {b"bad 1": error("refused")}
    await until(lambda: len(broker.taken) == 50, within=SOON)
    assert len(broker.republisher) == 1 and b"good a" in broker.taken
    broker.refused = {}
    await until(lambda: not len(broker.republisher), within=SOON)
    assert sorted(broker.channel.acked) == [*range(25), 100, *range(200, 225)]


async def test_a_claim_waits_for_moves_that_succeed_only() -> None:
    broker = Broker()
    broker.refused[b"bad"] = AccessRefused("refused")
    broker.add("a", b"bad")
    assert not await broker.republisher.progress(["a"], SOON)
    assert not await broker.republisher.progress(["b"], SOON), "nothing is moved"
    broker.add("b", b"good")
    assert await broker.republisher.progress(["a", "b"], SOON)
    assert not await broker.republisher.progress(["a", "b"], SOON)
    broker.republisher.cancel()


async def test_a_move_ends_with_its_channel() -> None:
    broker = Broker()
    broker.refused[b"bad"] = AccessRefused("refused")
    broker.add("a", b"bad")
    broker.channel.closed = True
    await until(lambda: not len(broker.republisher), within=SOON)
    assert broker.taken == broker.channel.acked == []


async def test_room_for_further_messages_of_a_queue() -> None:
    broker = Broker()
    assert broker.republisher.room("a") is None
    for n in range(MOST):
        broker.add("a", b"%d" % n)
        assert broker.republisher.room("a") == MOST - n - 1
    assert broker.republisher.room("b") is None
    broker.add("b", b"x" * MOST_BYTES)
    assert broker.republisher.room("b") == 0
    await until(lambda: not len(broker.republisher), within=SOON)
    assert broker.republisher.room("a") is None


async def test_moves_that_stand_still_leave_room_for_others() -> None:
    """Few messages for a full queue, or during an alarm, do not stop their queue. Their memory is bounded"""
    broker = Broker()
    for n in range(2 * MOST):
        broker.add("a", b"%d" % n)
    assert broker.republisher.room("a") == 0
    broker.is_blocked = True
    assert broker.republisher.room("a") == MOST
    broker.is_blocked = False
    broker.refused = {b"%d" % n: StoreUnavailable("full") for n in range(2 * MOST)}
    await until(lambda: broker.republisher.room("a") == MOST, within=SOON)
    broker.add("a", b"x" * MOST_BYTES)
    assert broker.republisher.room("a") == 0
    broker.republisher.cancel()


async def test_a_message_that_spoils_its_batch_holds_up_no_other() -> None:
    """The broker closes the channel at its copy, and confirms none of them"""
    broker = Broker()
    send = broker.send

    async def spoil(messages: Sequence[OutgoingMessage]) -> list[Exception | None]:
        if any(message.envelope.payload == b"bad" for message in messages):
            return [StoreUnavailable("the channel was closed")] * len(messages)
        return await send(messages)

    broker.republisher._send = spoil
    for n in range(10):
        broker.add("a", b"%d" % n if n else b"bad", n)
    await until(lambda: len(broker.republisher) == 1, within=SOON)
    assert broker.taken == [b"%d" % n for n in range(1, 10)] and sorted(broker.channel.acked) == list(range(1, 10))
    broker.republisher.cancel()
