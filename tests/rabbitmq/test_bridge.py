"""The bridge: a queue moves from a database to the broker and back, at least once and with the same ids."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic

import millpond
from millpond import Ack, Message, State
from millpond.bridge import Bridge
from millpond.control import Control
from millpond.errors import StoreUnavailable
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim
from tests.triggers import failing


@pytest.fixture
async def store(sqlite_url: str) -> Any:
    store = await millpond.connect(sqlite_url)
    yield store
    await store.close()


async def test_an_outbox_relay(store: Any, transport: Any) -> None:
    """Messages of a database arrive at the broker unchanged"""
    sent = await store.publish(
        [Message(queue="q", payload=b"%d" % n, key="k", priority=7, headers={"a": [n]}) for n in range(1200)]
    )
    assert await Bridge(store, transport, ["q"]).drain() == 1200
    claims = await transport.claim(["q"], 2000)
    assert [c.receipt.id for c in claims] == [p.id for p in sent]
    first = claims[0].message
    assert (first.payload, first.key, first.priority, first.headers) == (b"0", "k", 7, {"a": [0]})
    assert (await store.operations.count(["q"]))[0].counts[State.COMPLETED] == 1200


async def test_headers_with_a_meaning_for_the_broker_pass_in_both_directions(store: Any, transport: Any) -> None:
    headers = {"CC": "boss@example.org", "BCC": ["payments"], "x-death": 1, "plain": "x"}
    await transport.claim(["payments"])
    await store.publish([Message(queue="q", payload=b"x", headers=headers), Message(queue="q", payload=b"y")])
    assert await Bridge(store, transport, ["q"]).drain() == 2
    back: Any = await millpond.connect("memory://")  # the store knows the ids
    async with asyncio.timeout(SOON):
        bridge = Bridge(transport, back, ["q"])
        while bridge.moved < 2:
            await bridge.drain()
    claims = await back.claim(["q"], 2)
    await back.close()
    assert {claim.message.payload: dict(claim.message.headers) for claim in claims} == {b"x": headers, b"y": {}}
    assert await transport.claim(["payments"]) == []


async def test_moving_a_batch_into_a_database_twice_is_harmless(store: Any, transport: Any) -> None:
    """After a crash between publish and ack the batch is moved again, and the database recognises the ids"""
    sent = await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(20)])
    settle = transport.settle

    async def crash(outcomes: Any) -> Any:
        raise ConnectionError

    transport.settle = crash
    with pytest.raises(ConnectionError):
        await Bridge(transport, store, ["q"], into="in").drain()
    transport.settle = settle
    other = await millpond.connect(transport.url.raw)
    await transport.close()  # the broker returns its messages
    async with asyncio.timeout(30):
        bridge = Bridge(other, store, ["q"], into="in")
        while bridge.moved < 20:
            await other.wait(["q"], 1)
            await bridge.drain()
    await other.close()
    claims = await store.claim(["in"], 100)
    assert sorted(c.receipt.id for c in claims) == sorted(p.id for p in sent)


async def test_a_message_that_the_target_refuses_delays_no_other(transport: Any, sqlite_url: str) -> None:
    """The refused message is a dead letter with the reason"""
    bodies = [b"%d" % n for n in range(7)]
    await transport.publish([Message(queue="q", payload=body) for body in (*bodies[:4], b"too long", *bodies[4:])])
    store: Any = await millpond.connect(sqlite_url, body_limit=5)
    assert await Bridge(transport, store, ["q"]).drain() == 7
    assert sorted(claim.message.payload for claim in await store.claim(["q"], 10)) == bodies
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.attempts) == (b"too long", 0)
    assert letter.reason == "refused by the bridge's target" and "BodyTooLarge" in (letter.error or "")
    await store.close()


async def test_a_row_that_the_target_database_refuses_delays_no_other(store: Any, tmp_path: Path) -> None:
    """Neither by a bridge that runs, nor at its next start"""
    target_url = f"sqlite:///{tmp_path / 'target.db'}"
    target: Any = await millpond.connect(target_url, migrate=True)
    messages = [Message(queue="q", payload=b"%d" % n, priority=99 if n == 3 else 50) for n in range(10)]
    ids = [published.id for published in await store.publish(messages)]
    with failing(target_url, "INSERT", "millpond_message", "ROW.priority = 99"):
        assert await Bridge(store, target, ["q"]).drain() == 9
        assert await Bridge(store, target, ["q"]).drain() == 0
    assert {claim.message.payload for claim in await target.claim(["q"], 20)} == {b"%d" % n for n in range(10)} - {b"3"}
    (row,) = await store.operations.find([ids[3]])
    assert (row.state, row.reason) == (State.FAILED, "refused by the bridge's target")
    assert "DataRefused" in (row.error or "")
    await target.close()


async def test_headers_with_amqp_types_become_text(store: Any, transport: Any) -> None:
    channel = await transport.publisher_pool.channel()
    await transport.claim(["q"])
    headers = {"at": datetime(2026, 1, 1, tzinfo=UTC), "raw": bytearray(b"x"), "list": [1], "none": None}
    await channel._underlay.basic_publish(b"", routing_key="q", properties=Basic.Properties(headers=headers))
    async with asyncio.timeout(SOON):
        while not await Bridge(transport, store, ["q"]).drain():
            await transport.wait(["q"], 1)
    (claim,) = await store.claim(["q"])
    assert claim.message.headers == {"at": "2026-01-01T00:00:00Z", "raw": "eA==", "list": [1], "none": None}


async def test_a_bridge_runs_until_it_is_stopped(store: Any, transport: Any) -> None:
    bridge = Bridge(store, transport, ["q"])
    running = asyncio.create_task(bridge.run())
    for n in range(3):
        await store.publish([Message(queue="q", payload=b"%d" % n)])
        claim = await next_claim(transport)
        assert claim.message.payload == b"%d" % n
        await transport.settle([Ack(claim.receipt)])
    bridge.stop()
    await asyncio.wait_for(running, 10)


async def test_by_the_command_line(transport: Any, sqlite_url: str, rabbitmq_url: str) -> None:
    store: Any = await millpond.connect(sqlite_url, table_prefix="mp_", migrate=True)
    await store.publish([Message(queue="q", payload=b"x"), Message(queue="q", payload=b"tomorrow", delay=86_400)])
    await store.close()
    command = ("bridge", sqlite_url, rabbitmq_url, "--queue", "q", "--from-table-prefix", "mp_", "--once", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "millpond", *command, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output) == {"moved": 1, "left": 1}
    assert (await next_claim(transport)).message.payload == b"x"


class Away:
    """A target that is away."""

    def __init__(self) -> None:
        self.tries = 0
        self.tried = asyncio.Event()

    async def publish(self, messages: Any) -> None:
        self.tries += 1
        if self.tries >= 4:
            self.tried.set()
        raise StoreUnavailable("the target is away")


@pytest.mark.parametrize("source_name", ["store", "transport"])
async def test_a_target_that_is_away_does_not_spoil_the_source(source_name: str, store: Any, transport: Any) -> None:
    """No delivery counts, so no message becomes a suspect"""
    source = store if source_name == "store" else transport
    await source.publish([Message(queue="q", payload=b"%d" % n) for n in range(20)])
    away: Any = Away()
    bridge = Bridge(source, away, ["q"], batch=5)
    running = asyncio.create_task(bridge.run())
    await asyncio.wait_for(away.tried.wait(), SOON)
    bridge.stop()
    await asyncio.wait_for(running, SOON)
    claims: list[Any] = []
    async with asyncio.timeout(SOON):
        while len(claims) < 20:
            claims += await source.claim(["q"], 20)
    assert {(claim.deliveries, claim.attempts) for claim in claims} == {(1, 0)}
    await source.settle([Ack(claim.receipt) for claim in claims])


async def test_messages_that_stay_are_reported(store: Any, transport: Any, caplog: pytest.LogCaptureFixture) -> None:
    await store.publish([Message(queue="q", payload=b"now"), Message(queue="q", payload=b"tomorrow", delay=86_400)])
    bridge = Bridge(store, transport, ["q"])
    assert await bridge.drain() == 1
    assert bridge.left == 1 and "messages stay at the source: 1 of queue 'q'" in caplog.text
    caplog.clear()
    bridge.stop()
    await bridge.run()
    assert bridge.left == 1 and "messages stay at the source: 1 of queue 'q'" in caplog.text
    back = Bridge(transport, store, ["q"])
    await back.drain()
    assert back.left is None, "a broker does not count delayed and claimed messages"
