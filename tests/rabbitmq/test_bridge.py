"""The bridge: a database's queue goes to the broker and back, at least once and under the same ids."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from pamqp.commands import Basic

import millpond
from millpond import Ack, Message, State
from millpond.bridge import Bridge
from millpond.control import Control
from tests.rabbitmq.conftest import SOON, arrival, dead_letters


@pytest.fixture
async def store(sqlite_url: str) -> Any:
    store = await millpond.connect(sqlite_url)
    yield store
    await store.close()


async def test_an_outbox_relay(store: Any, transport: Any) -> None:
    """Database to broker: what a transaction published leaves as it is"""
    sent = await store.publish(
        [Message(queue="q", payload=b"%d" % n, key="k", priority=7, headers={"a": [n]}) for n in range(1200)]
    )
    assert await Bridge(store, transport, ["q"]).drain() == 1200
    claims = await transport.claim(["q"], 2000)
    assert [c.receipt.id for c in claims] == [p.id for p in sent]
    first = claims[0].message
    assert (first.payload, first.key, first.priority, first.headers) == (b"0", "k", 7, {"a": [0]})
    assert (await store.count(["q"]))[0].counts[State.COMPLETED] == 1200


async def test_back_into_a_database_twice_is_harmless(store: Any, transport: Any) -> None:
    """A crash between publish and ack moves the batch again; the ids are recognised"""
    sent = await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(20)])
    settle = transport.settle

    async def crash(outcomes: Any) -> Any:
        raise ConnectionError

    transport.settle = crash
    with pytest.raises(ConnectionError):
        await Bridge(transport, store, ["q"], into="in").drain()
    transport.settle = settle
    other = await millpond.connect(transport.url.raw)
    await transport.close()  # what it held comes back
    async with asyncio.timeout(30):
        bridge = Bridge(other, store, ["q"], into="in")
        while bridge.moved < 20:
            await other.wait(["q"], 1)
            await bridge.drain()
    await other.close()
    claims = await store.claim(["in"], 100)
    assert sorted(c.receipt.id for c in claims) == sorted(p.id for p in sent)


async def test_what_the_target_would_never_take_holds_up_nobody(transport: Any, sqlite_url: str) -> None:
    """It is among the dead letters, with the reason"""
    bodies = [b"%d" % n for n in range(7)]
    await transport.publish([Message(queue="q", payload=body) for body in (*bodies[:4], b"too long", *bodies[4:])])
    store: Any = await millpond.connect(sqlite_url, body_limit=5)
    assert await Bridge(transport, store, ["q"]).drain() == 7
    assert sorted(claim.message.payload for claim in await store.claim(["q"], 10)) == bodies
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.attempts) == (b"too long", 0)
    assert letter.reason == "refused by the bridge's target" and "BodyTooLarge" in (letter.error or "")
    await store.close()


async def test_headers_that_only_amqp_knows_become_text(store: Any, transport: Any) -> None:
    channel = await transport.publishing.channel()
    await transport.claim(["q"])
    headers = {"at": datetime(2026, 1, 1, tzinfo=UTC), "raw": bytearray(b"x"), "list": [1], "none": None}
    await channel._underlay.basic_publish(b"", routing_key="q", properties=Basic.Properties(headers=headers))
    async with asyncio.timeout(SOON):
        while not await Bridge(transport, store, ["q"]).drain():
            await transport.wait(["q"], 1)
    (claim,) = await store.claim(["q"])
    assert claim.message.headers == {"at": "2026-01-01T00:00:00Z", "raw": "eA==", "list": [1], "none": None}


async def test_it_runs_until_it_is_stopped(store: Any, transport: Any) -> None:
    bridge = Bridge(store, transport, ["q"])
    running = asyncio.create_task(bridge.run())
    for n in range(3):
        await store.publish([Message(queue="q", payload=b"%d" % n)])
        claim = await arrival(transport)
        assert claim.message.payload == b"%d" % n
        await transport.settle([Ack(claim.receipt)])
    bridge.stop()
    await asyncio.wait_for(running, 10)


async def test_by_the_command_line(transport: Any, sqlite_url: str, rabbitmq_url: str) -> None:
    store: Any = await millpond.connect(sqlite_url, table_prefix="mp_", migrate=True)
    await store.publish([Message(queue="q", payload=b"x")])
    await store.close()
    command = ("bridge", sqlite_url, rabbitmq_url, "--queue", "q", "--from-table-prefix", "mp_", "--once", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond", *command, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output) == {"moved": 1}
    assert (await arrival(transport)).message.payload == b"x"
