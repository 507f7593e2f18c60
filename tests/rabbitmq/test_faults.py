"""Brokers and consumers killed, connections cut, channels closed, memory short.

No confirmed message is lost, a second run is marked as a redelivery, and all parts recover by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import millpond
from millpond import Ack, Delivery, Message, Millpond, Retry
from millpond.codec import CONTENT_TYPE, TEXT
from millpond.control import Control
from millpond.errors import StoreError
from millpond.message import State
from millpond.telemetry import BrokerBlocked, Event, Telemetry
from servers import Proxy, RabbitMQ
from tests.rabbitmq import worker as worker_app
from tests.rabbitmq.alarms import alarm
from tests.rabbitmq.attacker import UNDECODABLE, attacker
from tests.rabbitmq.conftest import dead_letters, next_claim

pytestmark = [pytest.mark.server, pytest.mark.timeout(300), pytest.mark.slow, pytest.mark.long]
SOON = 60.0
RETRY = Retry(initial=0.1, maximum=0.5, attempts=1000)


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQ]:
    """A private broker, because tests kill it."""
    with RabbitMQ() as server:
        yield server


class Load:
    """A publisher and a worker, with their confirmed messages and runs."""

    def __init__(self) -> None:
        self.confirmed: set[str] = set()
        self.unknown: set[str] = set()
        self.runs: defaultdict[str, list[int]] = defaultdict(list)
        self.enough = asyncio.Event()
        self._number = 0

    async def publish(self, url: str) -> None:
        """Publish until `enough`. A failed publish is not repeated: a duplicate must come from the transport."""
        transport = await millpond.connect(url, reconnect_timeout=5, call_timeout=5)
        while not self.enough.is_set():
            numbers = [str(self._number + n) for n in range(5)]
            self._number += 5
            messages = [Message(queue="q", payload=n.encode(), headers={CONTENT_TYPE: TEXT}) for n in numbers]
            try:
                await transport.publish(messages)
            except StoreError:
                self.unknown.update(numbers)
            else:
                self.confirmed.update(numbers)
        await transport.close()

    @contextlib.asynccontextmanager
    async def working(self, url: str) -> AsyncIterator[None]:
        pond = Millpond(url, reconnect_timeout=5, call_timeout=5)

        @pond.subscriber("q", max_workers=8, retry=RETRY, max_crashes=None)
        async def handle(number: str, delivery: Delivery) -> None:
            self.runs[number].append(delivery.claim.deliveries)
            await asyncio.sleep(0.002)
            if len(self.runs) % 7 == 0 and len(self.runs[number]) == 1:
                raise ValueError("again")

        work = asyncio.create_task(pond.run())
        try:
            yield
        finally:
            pond.stop()
            await asyncio.wait_for(work, SOON)
            await pond.close()

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(SOON):
                while not holds():  # noqa: ASYNC110 - it comes from the broker
                    await asyncio.sleep(0.02)
        except TimeoutError:
            missing = sorted(self.confirmed - set(self.runs))[:10]
            raise AssertionError(f"not {what}: {len(self.confirmed)} confirmed, missing {missing}") from None

    async def some_more(self, count: int = 50) -> None:
        goal = len(self.confirmed) + count
        await self.until(lambda: len(self.confirmed) >= goal, "published")
        await self.until(lambda: len(self.runs) >= goal // 2, "worked")

    async def all_handled(self) -> None:
        await self.until(lambda: self.confirmed <= set(self.runs), "handled")

    def judge(self) -> None:
        assert self.confirmed <= set(self.runs)  # lost: 0
        assert set(self.runs) <= self.confirmed | self.unknown
        for number, deliveries in self.runs.items():
            # Every further run is marked as a redelivery.
            assert deliveries[0] >= 1 and all(n > 1 for n in deliveries[1:]), (number, deliveries)


async def test_broker_killed(broker: RabbitMQ) -> None:
    """Kill the broker after it has stored its list of queues; see `note_queues`"""
    url = broker.create_vhost(f"broker{uuid4().hex[:6]}")
    transport: Any = await millpond.connect(url)
    delays = (0, 0.1, 0.125, 0.16, 0.2, 0.25, 0.32, 0.4, 0.5)  # declares every wait queue that RETRY can use
    await transport.publish([Message(queue="q", payload=b"", delay=delay) for delay in delays])
    for _ in delays:
        claim = await next_claim(transport)
        await transport.settle([Ack(claim.receipt)])
    await transport.close()
    await asyncio.to_thread(broker.note_queues)
    load = Load()
    publishing = asyncio.create_task(load.publish(url))
    async with load.working(url):
        await load.some_more()
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        await load.some_more()
        load.enough.set()
        await publishing
        await load.all_handled()
    load.judge()


async def test_connections_cut(broker: RabbitMQ) -> None:
    load = Load()
    url = broker.create_vhost(f"cut{uuid4().hex[:6]}")
    with Proxy(broker.port) as proxy:
        publishing = asyncio.create_task(load.publish(proxy.url(url)))
        async with load.working(proxy.url(url)):
            for kind in ("cut", "refuse", "black hole", "cut"):
                await load.some_more()
                if kind == "refuse":
                    proxy.refuse()
                elif kind == "black hole":
                    proxy.black_hole()
                    await asyncio.sleep(0.3)
                    proxy.resume()
                    continue
                proxy.cut()
                if kind == "refuse":
                    await asyncio.sleep(0.3)
                    proxy.accept()
            await load.some_more()
            load.enough.set()
            await publishing
            await load.all_handled()
    load.judge()


async def test_channel_closed_by_the_broker(broker: RabbitMQ) -> None:
    """An ack of an unknown tag closes the channel. Its receipts are stale, and a new channel replaces it"""
    transport: Any = await millpond.connect(broker.create_vhost(f"closed{uuid4().hex[:6]}"))
    await transport.publish([Message(queue="q", payload=b"1"), Message(queue="q", payload=b"2")])
    claims = await transport.claim(["q"], 2)
    channel = transport._consumers["q"]._channels[0]
    await channel._underlay.basic_ack(999)
    async with asyncio.timeout(SOON):
        while await transport.extend([claims[0].receipt]) == []:  # noqa: ASYNC110 - it comes from the broker
            await asyncio.sleep(0.01)
    stale = [claim.receipt for claim in claims]
    assert await transport.settle([Ack(receipt) for receipt in stale]) == stale
    again = [await next_claim(transport) for _ in range(2)]
    assert sorted(claim.message.payload for claim in again) == [b"1", b"2"]
    assert all(claim.redelivered for claim in again)
    assert await transport.settle([Ack(claim.receipt) for claim in again]) == []
    await transport.close()


async def test_memory_alarm(broker: RabbitMQ, caplog: pytest.LogCaptureFixture) -> None:
    """A broker short of memory stops reading published messages. Acks continue; then publishes do"""
    url = broker.create_vhost(f"memory{uuid4().hex[:6]}")
    telemetry, events = Telemetry(), list[Event]()
    telemetry.subscribe(events.append, BrokerBlocked)
    transport: Any = await millpond.connect(url, telemetry=telemetry)
    await transport.publish([Message(queue="q", payload=b"before")])
    claim = await next_claim(transport)
    await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "absolute", "1MB")
    sent = 0
    done: set[Any] = set()
    while done or not sent:  # the alarm may be late
        sent += 1
        blocked = asyncio.create_task(transport.publish([Message(queue="q", payload=b"%d" % sent)]))
        done, _ = await asyncio.wait([blocked], timeout=1)
    assert await transport.settle([Ack(claim.receipt)]) == []
    await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "absolute", "2GB")
    await asyncio.wait_for(blocked, SOON)
    assert events and all(isinstance(event, BrokerBlocked) and "memory" in event.reason for event in events)
    assert "blocks publishes: low on memory" in caplog.text and "reads publishes again" in caplog.text
    assert [(await next_claim(transport)).message.payload for _ in range(sent)] == [
        b"%d" % n for n in range(1, sent + 1)
    ]
    await transport.close()


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.long)])
async def test_consumers_killed_and_poison_stopped(broker: RabbitMQ, tmp_path: Path, count: int) -> None:
    """A message that kills two workers, and then the process in which it runs alone, is dead-lettered. All others are
    handled, however often the workers died that had them"""
    url, file = broker.create_vhost(f"killed{uuid4().hex[:6]}"), tmp_path / "runs"
    file.touch()
    transport: Any = await millpond.connect(url)
    numbers, text = [str(n) for n in range(count)], {CONTENT_TYPE: TEXT}

    async def publish(bodies: list[str]) -> None:
        await transport.publish([Message(queue="q", payload=b.encode(), headers=text) for b in bodies])

    async def work(until: Callable[[], Awaitable[Any]]) -> int:
        """Run a worker until `until()`, then kill it, unless it died before. Return its exit code."""
        command = [sys.executable, "-m", "millpond", "run", worker_app.__name__]
        environment = {**os.environ, worker_app.URL: url, worker_app.FILE: str(file)}
        worker = await asyncio.create_subprocess_exec(*command, env=environment)
        ended = asyncio.create_task(worker.wait())
        while not (await until() or ended.done()):
            await asyncio.wait([ended], timeout=0.01)
        if not ended.done():
            worker.send_signal(signal.SIGKILL)
        return await ended

    async def some_handled() -> bool:
        return len(handled(file)) > 30

    async def all_done() -> bool:
        missing = set(numbers) - handled(file)
        if len(missing) > 10:
            return False
        dead = {row.payload.decode() for row in await control.messages("q", states=[State.FAILED])}
        return bool(dead) and missing <= dead

    control = Control(transport)
    async with asyncio.timeout(2 * SOON):
        await publish(numbers[:100])
        assert await work(some_handled) == -signal.SIGKILL
        await publish(["poison", *numbers[100:]])
        ends = []
        while not ends or ends[-1] != -signal.SIGKILL:
            ends.append(await work(all_done))
        rows = await control.messages("q", states=[State.FAILED])
    assert [(row.payload, row.reason) for row in rows] == [(b"poison", "max_crashes")]
    runs: defaultdict[str, list[int]] = defaultdict(list)
    for line in file.read_text().splitlines():
        number, deliveries = line.split()
        runs[number].append(int(deliveries))
    assert all(n > 1 for deliveries in runs.values() for n in deliveries[1:])
    # One run more if its child process had run another suspect before: then it was not alone.
    assert runs["poison"][:3] == [1, 2, 3] and len(runs["poison"]) <= 4 and ends == [1, 1, -signal.SIGKILL]
    await transport.close()


def handled(file: Path) -> set[str]:
    return {line.split()[0] for line in file.read_text().splitlines() if " " in line}


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_claims_do_not_wait_for_messages_that_are_moved_during_an_alarm(
    broker: RabbitMQ, queue_type: str
) -> None:
    """An unreadable message and two delayed ones stand before each good one. Only publishes could move them"""
    transport: Any = await millpond.connect(broker.create_vhost(uuid4().hex), queue_type=queue_type)
    await transport.claim(["q"])
    later = '{"queue":"q","due_us":9000000000000000,"wait_us":60000000}'
    async with attacker(transport.url.raw) as attack:
        for _ in range(3):
            await attack.send(UNDECODABLE["message_id in Latin-1"])
            for _ in range(2):
                await attack.publish({"millpond": later}, b"later")
            await attack.publish(None, b"good")
        await attack.flush()
    async with alarm(broker, transport), asyncio.timeout(SOON / 2):
        good = 0
        while good < 3:
            claims = await transport.claim(["q"], 2, suspects=False)
            good += sum(claim.message.payload == b"good" for claim in claims)
            assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []
            if not claims:
                await transport.wait(["q"], 1)
    letters = await dead_letters(Control(transport))
    assert {row.reason for row in letters} == {"undecodable"}
    await transport.close()
