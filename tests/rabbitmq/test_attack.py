"""Attacks of a publisher who knows how Millpond works: forged states, ids of others, headers that cost memory."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import millpond
from millpond import Ack, Message, Nack
from millpond.bridge import Bridge
from millpond.control import Control
from millpond.message import State
from millpond.transports.rabbitmq import dead_letters as letters_of
from millpond.transports.rabbitmq import republish
from millpond.transports.rabbitmq import transport as rabbit
from millpond.transports.rabbitmq.publisher import _spread
from millpond.transports.rabbitmq.republish import Republish, Republisher
from tests.rabbitmq.attacker import METADATA, UNDECODABLE, attacker, table
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim
from tests.rabbitmq.test_hostile import claim_all


def metadata(text: str) -> bytes:
    encoded = text.encode()
    return table(b"\x08millpondS" + struct.pack(">I", len(encoded)) + encoded)


async def test_a_live_message_that_says_it_failed_is_not_archived_as_failed(rabbitmq_url: str, tmp_path: Path) -> None:
    """A row of the archive is about an outcome, not about the headers of a publisher"""
    archive = f"sqlite:///{tmp_path / 'archive.db'}"
    store: Any = await millpond.connect(archive, migrate=True)
    transport: Any = await millpond.connect(rabbitmq_url, archive=archive)
    await transport.claim(["q"])
    async with attacker(rabbitmq_url) as attack:
        late = '"due_us":253402300799999999,"wait_us":100000'
        await attack.send(metadata(f'{{"queue":"q","failed_us":1,"reason":"forged",{late}}}'))
        await attack.flush()
    claim = await next_claim(transport)
    assert await transport.settle([Nack(claim.receipt)]) == []
    claim = await next_claim(transport)
    assert await transport.settle([Ack(claim.receipt)]) == []
    rows = await store.operations.archived("q")
    assert [(row.state, row.reason) for row in rows] == [(State.COMPLETED, None)]
    await transport.close()
    await store.close()


async def test_a_forged_reason_of_the_broker_keeps_the_letters_id(transport: Any) -> None:
    assert await Control(transport).messages("q") == []
    reason = b"S" + struct.pack(">I", 3) + b"a\0b"
    death = b"\x06reason" + reason
    deaths = b"F" + struct.pack(">I", len(death)) + death
    async with attacker(transport.url.raw) as attack:
        forged = table(b"\x07x-deathA" + struct.pack(">I", len(deaths)) + deaths + b"\x01nI\0\0\0\x07")
        await attack.send(forged, queue="millpond.dead.q")
        await attack.flush()
    seen = []
    for _ in range(3):
        (letter,) = await dead_letters(Control(transport))
        seen.append((letter.id, letter.reason, letter.headers))
    assert seen[0] == seen[1] == seen[2] and seen[0][2] == {"n": 7}


@pytest.mark.parametrize("forged", [0, 1_000_000])
async def test_a_counter_that_is_sent_twice_hides_no_crash(transport: Any, forged: int) -> None:
    """The broker writes its count over the first one, and keeps the other"""
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        await attack.send(table((b"\x10x-delivery-countl" + struct.pack(">q", forged)) * 2))
        await attack.flush()
    seen = []
    for _ in range(3):
        claim = await next_claim(transport)
        seen.append((claim.deliveries, claim.suspect))
        for channel in list(transport._consumers["q"]._channels):  # as if the process had died
            channel.abandon()
        transport._receipts._cuts.clear()
    assert seen == [(1, False), (2, False), (3, True)]


async def test_unreadable_headers_that_fill_a_frame_are_a_dead_letter(transport: Any) -> None:
    """The broker adds its own headers when it moves the message, and sends a frame above frame_max"""
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        await attack.send(table(b"\x02\xe9\xe9S" + struct.pack(">I", 131_000) + b"x" * 131_000))
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"good")])
    claim = await next_claim(transport)
    assert claim.message.payload == b"good"
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.reason) == (b"hostile", "undecodable")
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_headers_count_as_memory_of_listed_letters(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small headers need far more memory than their bytes"""
    monkeypatch.setattr(letters_of, "MOST_BYTES", 1 << 20)
    assert await Control(transport).messages("q") == []
    many = b"".join(b"\x04%04dt\x01" % n for n in range(3000))
    async with attacker(transport.url.raw) as attack:
        for _ in range(20):
            await attack.send(table(many), queue="millpond.dead.q")
        await attack.flush()
    page: list[Any] = []
    async with asyncio.timeout(SOON):
        while len(page) < 3:  # the first list may come before the letters
            page = await Control(transport).messages("q", limit=10_000)
    assert len(page) == 3  # (21,009 - 1,024) * 16 bytes each


async def test_messages_of_one_id_are_each_handled(transport: Any) -> None:
    """Another publisher may use the id of a message that is on its way"""
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        for n in range(50):
            await attack.publish({"n": n}, b"%d" % n, message_id="order-7")
        await attack.flush()
    for attempts in (0, 1):
        claims = await claim_all(transport, 50)
        assert {int(claim.message.payload) for claim in claims} == set(range(50))
        assert {claim.attempts for claim in claims} == {attempts}
        outcome = Nack if attempts == 0 else Ack
        assert await transport.settle([outcome(claim.receipt) for claim in claims]) == []
    # On one channel they would wait for each other, and the outcomes of others with them.
    assert len(transport.publisher._channels) > 1


def test_copies_of_one_id_are_spread() -> None:
    ids = ["a", "b", "a", "c", "a", "a", "b"]
    messages: Any = [SimpleNamespace(envelope=SimpleNamespace(message_id=id_)) for id_ in ids]
    parts = [[ids[n] for n in part] for part in _spread(messages, 3)]
    assert parts == [["a", "b", "c", "a"], ["a", "b"], ["a"]]
    assert [list(part) for part in _spread(messages[:2], 3)] == [[0, 1]]
    assert [list(part) for part in _spread(messages, 1)] == [list(range(7))]


async def test_a_bridge_moves_what_can_be_moved(transport: Any, tmp_path: Path) -> None:
    target: Any = await millpond.connect(f"sqlite:///{tmp_path / 'target.db'}", migrate=True)
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    hostile = [*UNDECODABLE.values(), *(metadata(text) for text in METADATA.values())]
    hostile.append(table(b"\x01aS" + struct.pack(">I", 131_000) + b"x" * 131_000))
    hostile.append(table(b"\x01aS" + struct.pack(">I", 3) + b"\0\xff\0"))
    hostile.append(metadata('{"queue":"q","key":"k","priority":0,"expires_us":1,"attempts":1073741823}'))
    async with attacker(transport.url.raw) as attack:
        for properties in hostile:
            await attack.send(properties)
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3, 6)])
    async with asyncio.timeout(2 * SOON):
        await Bridge(transport, target, ["q"]).drain()
        while len(rows := await Control(transport).messages("q", limit=1000)) < len(hostile) - 1:
            await Bridge(transport, target, ["q"]).drain()
    claims = await target.claim(["q"], 100)
    assert {claim.message.payload for claim in claims} >= {b"%d" % n for n in range(6)}
    assert len(claims) + len(rows) == 6 + len(hostile)
    await target.close()


FORGED_DEATH = table(b"\x07x-deathS\0\0\0\x01x" + b"\x02\xe9\xe9t\x01")
"""The broker cannot move it, so a copy is published."""


@pytest.mark.parametrize(("limit", "count", "size"), [(500, 1500, 2000), (50, 400, 100_000)], ids=["many", "large"])
async def test_a_flood_is_not_read_into_memory(
    transport: Any, monkeypatch: pytest.MonkeyPatch, limit: int, count: int, size: int
) -> None:
    """Unreadable messages come faster than they are moved. A claim receives no more of them meanwhile"""
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        for _ in range(count):
            await attack.send(FORGED_DEATH, b"x" * size)
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"good")])
    most = most_bytes = 0
    add = Republisher.add

    def noted(self: Republisher, each: Republish) -> None:
        nonlocal most, most_bytes
        add(self, each)
        pending = [one.size for lane in self._lanes.values() for one in lane.pending]
        most, most_bytes = max(most, len(pending)), max(most_bytes, sum(pending))

    monkeypatch.setattr(Republisher, "add", noted)
    async with asyncio.timeout(2 * SOON):
        while not (claims := await transport.claim(["q"], limit)):
            pass
    assert [claim.message.payload for claim in claims] == [b"good"]
    assert most <= republish.MOST + limit and most_bytes <= republish.MOST_BYTES + limit * size
    monkeypatch.undo()
    assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []


@pytest.mark.parametrize("kind", ["unreadable", "expired"])
async def test_a_claim_ends_while_a_flood_lasts(transport: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A worker that claims nothing for the time of a lease is not ready, and is started anew"""
    monkeypatch.setattr(rabbit, "_GIVE_UP_AFTER", 0.2)
    await transport.claim(["q"])
    properties = FORGED_DEATH if kind == "unreadable" else metadata('{"queue":"q","expires_us":1}')

    async def flood(attack: Any) -> None:
        while True:
            for _ in range(100):
                await attack.send(properties)
            await attack.flush()

    async with attacker(transport.url.raw) as attack:
        flooding = asyncio.create_task(flood(attack))
        for _ in range(3):
            assert await asyncio.wait_for(transport.claim(["q"], 10), SOON) == []
        flooding.cancel()
