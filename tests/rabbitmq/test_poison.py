"""Messages that kill their workers are stopped by counts of the broker and of Millpond. Their neighbours are not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, GiveBack, Message, Nack, Reject
from millpond.codec import CONTENT_TYPE, TEXT
from millpond.control import Control
from millpond.message import SUSPECT
from millpond.outcome import MAX_CRASHES
from servers import Proxy, RabbitMQ
from tests.rabbitmq import worker as worker_app
from tests.rabbitmq.attacker import METADATA, UNDECODABLE, attacker
from tests.rabbitmq.conftest import SOON, next_claim
from tests.rabbitmq.newer import imitate_counters
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(params=["quorum", "classic", "quorum, imitated 4.3"])
async def transport(
    request: pytest.FixtureRequest, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """Both types of queues: quorum queues count deliveries to crashed consumers, for classic queues Millpond does."""
    queue_type, _, later = request.param.partition(", ")
    if later:
        imitate_counters(monkeypatch)
    transport = await millpond.connect(rabbitmq_url, queue_type=queue_type)
    yield transport
    await transport.close()


def crash(transport: Any) -> None:
    """Return all messages of this handle, as if its process had died."""
    for channel in list(transport._consumers["q"]._channels):
        channel.abandon()
    transport._receipts._cuts.clear()


async def claim_any(transport: Any) -> None:
    while not await transport.claim(["q"], 3):
        pass


async def test_a_message_past_its_limit_is_dead_lettered_without_a_run(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"poison")])
    for n in range(2):
        claim = await next_claim(transport)
        assert (claim.deliveries, claim.attempts) == (n + 1, 0)
        crash(transport)
    async with asyncio.timeout(SOON):
        while not (rows := await Control(transport).messages("q")):
            assert await transport.claim(["q"], max_deliveries=2) == []
    (row,) = rows
    assert (row.reason, row.deliveries, row.attempts) == ("max_deliveries", 3, 0)


async def test_crashes_count_until_a_result(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"poison")])
    for n in range(MAX_CRASHES + 1):
        assert (await next_claim(transport)).crashes == n
        crash(transport)
    claim = await next_claim(transport)
    assert claim.crashes == MAX_CRASHES + 1
    await transport.settle([GiveBack(claim.receipt, delivered=True)])
    claim = await next_claim(transport)
    assert claim.crashes == MAX_CRASHES + 1
    await transport.settle([Nack(claim.receipt)])
    claim = await next_claim(transport)
    assert (claim.crashes, claim.attempts) == (0, 1)
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_a_header_makes_no_suspect(transport: Any) -> None:
    """Any publisher can forge it. Suspects cost a process each"""
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        for crashes in (SUSPECT, MAX_CRASHES, 1_000_000):
            await attack.publish({"millpond": f'{{"queue":"q","crashes":{crashes}}}'})
        await attack.flush()
    claims: list[Any] = []
    async with asyncio.timeout(SOON):
        while len(claims) < 3:
            assert await transport.claim(["q"], others=False) == []
            claims += await transport.claim(["q"], 3, suspects=False)
    assert {claim.crashes for claim in claims} == {SUSPECT - 1}
    assert await transport.settle([GiveBack(claim.receipt, delivered=True) for claim in claims]) == []
    assert not (await next_claim(transport)).suspect


@pytest.mark.parametrize("delay", [None, 0.1, 0.9])
async def test_a_suspect_stays_one_until_a_result(transport: Any, delay: float | None) -> None:
    """It waits among the suspects, also after a delay, and after one of two parts"""
    await transport.publish([Message(queue="q", payload=b"poison")])
    for n in range(SUSPECT + 2):
        claim = await next_claim(transport)
        assert claim.crashes == n
        await transport.settle([GiveBack(claim.receipt, crashed=True, delay=delay)])
    async with asyncio.timeout(SOON):
        while not (claims := await transport.claim(["q"], others=False)):
            assert await transport.claim(["q"], 3, suspects=False) == []
    (claim,) = claims
    assert (claim.crashes, claim.deliveries) == (SUSPECT + 2, SUSPECT + 3)
    if delay:
        assert claim.claimed_us >= claim.due_us
    await transport.settle([Nack(claim.receipt)])
    assert (await next_claim(transport)).crashes == 0


async def test_stops_are_no_crashes(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"long job")])
    for n in range(MAX_CRASHES + 1):
        claim = await next_claim(transport)
        assert (claim.deliveries, claim.crashes) == (n + 1, 0)
        await transport.settle([GiveBack(claim.receipt, delivered=True)])
    assert await transport.settle([Ack((await next_claim(transport)).receipt)]) == []


async def test_crashes_beside_a_suspect_do_not_count_against_it(transport: Any) -> None:
    """A suspect among other messages is moved to the side queue. Workers that die before the move do not count"""
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    for _ in range(SUSPECT):
        for _ in range(3):
            await next_claim(transport)
        crash(transport)
    for _ in range(MAX_CRASHES):
        dying: Any = await millpond.connect(transport.url.raw, queue_type=transport.options.queue_type)
        moving = asyncio.Event()

        async def never(messages: Sequence[Any], moving: asyncio.Event = moving) -> None:
            moving.set()
            await asyncio.Event().wait()

        dying.publisher.send_each = never
        trying = [asyncio.ensure_future(moving.wait()), asyncio.ensure_future(claim_any(dying))]
        done, _ = await asyncio.wait(trying, timeout=SOON, return_when=asyncio.FIRST_COMPLETED)
        assert done, "it moves a suspect, or claims one that an earlier process has tried to move"
        crash(dying)
        for task in trying:
            task.cancel()
        await dying.close()
    for _ in range(3):
        claim = await next_claim(transport)
        assert claim.crashes == SUSPECT
        assert await transport.settle([Ack(claim.receipt)]) == []
    assert await Control(transport).messages("q") == []


async def test_cut_connections_of_a_living_worker_are_no_crashes(rabbitmq_url: str, rabbitmq_server: RabbitMQ) -> None:
    with Proxy(rabbitmq_server.port) as proxy:
        transport: Any = await millpond.connect(proxy.url(rabbitmq_url))
        await transport.publish([Message(queue="q", payload=b"slow")])
        for n in range(2 * MAX_CRASHES):
            claim = await next_claim(transport)
            assert claim.crashes == 0 and claim.redelivered == (n > 0)
            proxy.cut()
            async with asyncio.timeout(SOON):
                while await transport.extend([claim.receipt]) == []:  # noqa: ASYNC110 - a cut makes no event here
                    await asyncio.sleep(0.01)
        claim = await next_claim(transport)
        assert await transport.settle([Ack(claim.receipt)]) == []
        assert await Control(transport).messages("q") == []
        await transport.close()


async def test_a_suspect_is_judged_in_its_own_process(transport: Any, tmp_path: Path) -> None:
    """The worker settles for its child. Poison is a dead letter after its own death; innocent suspects are handled"""
    file = tmp_path / "runs"
    held = []
    for body, crashes in ((b"poison", SUSPECT), (b"1", SUSPECT), (b"2", MAX_CRASHES + 2)):
        await transport.publish([Message(queue="q", payload=body, headers={CONTENT_TYPE: TEXT})])
        for _ in range(crashes):
            claim = await next_claim(transport)
            assert await transport.settle([GiveBack(claim.receipt, crashed=True)]) == []
        held.append(await next_claim(transport))
    await transport.settle([GiveBack(claim.receipt) for claim in held])
    await transport.publish([Message(queue="q", payload=b"3", headers={CONTENT_TYPE: TEXT})])
    environment = {**os.environ, worker_app.URL: transport.url.raw, worker_app.FILE: str(file)}
    command = [sys.executable, "-m", "millpond", "run", worker_app.__name__]
    worker = await asyncio.create_subprocess_exec(*command, env=environment)
    control = Control(transport)
    await until(lambda: file.exists() and file.read_text().count("\n") == 4)
    (dead,) = await until(lambda: control.messages("q"))
    worker.terminate()
    assert await worker.wait() == 0
    assert (dead.payload, dead.reason, dead.deliveries, dead.attempts) == (b"poison", "max_crashes", SUSPECT + 1, 0)
    assert dead.error == "its process ended while it ran alone there: exit code 1; crash 3 (limit 3)"
    assert await transport.claim(["q"], 10) == [], "the others are acked"
    assert sorted(file.read_text().splitlines()) == ["1 3", "2 6", "3 1", "poison 3"]


async def copies_in_all_queues(transport: Any) -> Counter[bytes]:
    """Reject all messages, and count the dead letters by their body. Unreadable ones have no other identity."""
    idle = 0
    async with asyncio.timeout(120):
        while idle < 3:
            claims = await transport.claim(["q"], 100)
            assert await transport.settle([Reject(claim.receipt) for claim in claims]) == []
            idle = 0 if claims else idle + 1
            if not claims:
                transport._consumers["q"].suspects_known = True
                await transport.wait(["q"], 0.2)
    return Counter(row.payload for row in await Control(transport).messages("q", limit=10_000))


@pytest.mark.parametrize("deaths", [6, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
async def test_however_often_workers_die_a_message_has_at_most_two_copies(rabbitmq_url: str, deaths: int) -> None:
    """Good messages and hostile ones, killed at any point"""
    transport: Any = await millpond.connect(rabbitmq_url)
    bodies = [b"%d" % n for n in range(200)]
    await transport.publish([Message(queue="q", payload=body) for body in bodies[:100]])
    hostile = []
    async with attacker(rabbitmq_url) as attack:
        for n, properties in enumerate(UNDECODABLE.values()):
            hostile.append(b"undecodable %d" % n)
            await attack.send(properties, hostile[-1])
        for n, text in enumerate(METADATA.values()):
            hostile.append(b"metadata %d" % n)
            await attack.publish({"millpond": text}, hostile[-1])
        await attack.flush()
    await transport.publish([Message(queue="q", payload=body) for body in bodies[100:]])
    draw = random.Random(37)
    for _ in range(deaths):
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.rabbitmq.dying_worker", rabbitmq_url, stdout=asyncio.subprocess.PIPE
        )
        assert worker.stdout is not None
        with contextlib.suppress(TimeoutError):  # all may be dead letters by now
            await asyncio.wait_for(worker.stdout.readline(), 10)
        await asyncio.sleep(draw.random() / 10)  # dies at any point
        worker.kill()
        await worker.wait()
    counts = await copies_in_all_queues(transport)
    assert set(counts) == {*bodies, *hostile} and max(counts.values()) <= 2
    await transport.close()


async def test_workers_that_die_while_they_move_suspects_leave_one_copy(rabbitmq_url: str) -> None:
    """Each dies between the publish and the ack. The broker's count shows the next one that a copy may exist"""
    transport: Any = await millpond.connect(rabbitmq_url)
    bodies = [b"%d" % n for n in range(3)]
    await transport.publish([Message(queue="q", payload=body) for body in bodies])
    for _ in range(SUSPECT):
        for _ in bodies:
            await next_claim(transport)
        crash(transport)
    ends = []
    for _ in range(4):
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.rabbitmq.dying_worker", rabbitmq_url, "moving"
        )
        ends.append(await worker.wait())
    assert ends == [1] + [2] * 3  # after the first death all of them are claimed where they are
    counts = await copies_in_all_queues(transport)
    assert set(counts) == set(bodies) and max(counts.values()) <= 2 and counts.total() == 4
    await transport.close()
