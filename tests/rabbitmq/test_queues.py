"""Queues, policies and accounts of others: nothing is lost, and what exists is used as it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiormq
import pytest
from typer.testing import CliRunner

import millpond
from millpond import Ack, ManualClock, Message, Nack, Reject
from millpond.cli.app import app
from millpond.control import Control
from millpond.errors import QueueMismatch, StoreError, StoreUnavailable
from millpond.message import State
from millpond.transports.rabbitmq import transport as rabbit
from millpond.transports.rabbitmq.names import BUCKETS
from servers import RabbitMQ
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim


def vhost_of(transport: Any) -> str:
    return quote(str(transport.url.raw.rsplit("/", 1)[1]), safe="")


def set_policy(server: RabbitMQ, transport: Any, **definition: Any) -> None:
    body = {"pattern": ".*", "definition": definition, "apply-to": "queues"}
    server.ask("PUT", f"/policies/{vhost_of(transport)}/test", body)


async def test_a_message_that_another_client_rejects_is_a_dead_letter(transport: Any) -> None:
    await transport.publish([Message(queue="q", payload=b"x", key="k", headers={"a": 1})])
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    got = await channel.basic_get("q")
    await channel.basic_reject(got.delivery.delivery_tag, requeue=False)
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.key, letter.reason) == (b"x", "k", "rejected by the broker")
    await other.close()
    await Control(transport).retry([letter.id])
    claim = await next_claim(transport)
    assert claim.message.payload == b"x" and claim.message.headers["a"] == 1


async def test_cc_of_a_publisher_does_not_divert_a_rejected_message(transport: Any) -> None:
    """The fixed routing key also replaces CC"""
    for queue in ("q", "payments"):
        await transport.claim([queue])
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    await channel.exchange_declare("public", exchange_type="fanout")
    await channel.queue_bind("q", "public")
    properties = aiormq.spec.Basic.Properties(headers={"CC": ["payments"]})
    await channel.basic_publish(b"x", exchange="public", properties=properties)
    got = await channel.basic_get("q")
    await channel.basic_reject(got.delivery.delivery_tag, requeue=False)
    await dead_letters(Control(transport))
    assert await transport.claim(["payments"]) == []
    await other.close()


async def test_a_lifetime_by_policy_makes_dead_letters(transport: Any, rabbitmq_server: RabbitMQ) -> None:
    await transport.claim(["q"])
    rabbitmq_server.ask(
        "PUT",
        f"/policies/{vhost_of(transport)}/ttl",
        {"pattern": "^q$", "definition": {"message-ttl": 50}, "apply-to": "queues"},
    )
    await transport.publish([Message(queue="q", payload=b"x")])
    (letter,) = await dead_letters(Control(transport))
    assert letter.reason == "expired by the broker"


async def test_a_length_by_policy_drops_no_dead_letter(transport: Any, rabbitmq_server: RabbitMQ) -> None:
    """A full queue of dead letters refuses further ones, whose messages stay where they are"""
    bodies = {b"%d" % n for n in range(4)}
    await transport.publish([Message(queue="q", payload=body) for body in bodies])
    claims: list[Any] = []
    while len(claims) < len(bodies):
        claims += await transport.claim(["q"], 10)
    set_policy(rabbitmq_server, transport, **{"max-length": 1})
    with pytest.raises(StoreUnavailable, match="refused"):
        while True:
            await transport.publish([Message(queue="q", payload=b"fill")])
    outcomes = [Reject(claim.receipt) for claim in claims]
    letters: set[bytes] = set()
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    async with asyncio.timeout(SOON):
        while letters < bodies:
            with contextlib.suppress(StoreUnavailable):
                await transport.settle(outcomes)
            letters |= {(await channel.basic_get("millpond.dead.q", no_ack=True)).body} - {b""}
    await other.close()


async def test_an_expired_message_beside_full_dead_letters_delays_no_other(
    transport: Any, rabbitmq_server: RabbitMQ
) -> None:
    await transport.publish([Message(queue="q", payload=b"old", expires=0.001), Message(queue="q", payload=b"good")])
    policy = {"pattern": "^millpond.dead", "definition": {"max-length": 1}, "apply-to": "queues"}
    rabbitmq_server.ask("PUT", f"/policies/{vhost_of(transport)}/full", policy)
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    with pytest.raises(aiormq.exceptions.DeliveryError):
        while True:
            await channel.basic_publish(b"fill", routing_key="millpond.dead.q")
    claim = await next_claim(transport)
    assert claim.message.payload == b"good"
    assert await transport.settle([Ack(claim.receipt)]) == []
    await channel.queue_purge("millpond.dead.q")
    async with asyncio.timeout(SOON):
        while not (rows := await Control(transport).messages("q")):
            pass
    assert [(row.payload, row.reason, row.deliveries) for row in rows] == [(b"old", "expired", 1)]
    await other.close()


async def test_a_delivery_limit_loses_nothing(transport: Any, rabbitmq_server: RabbitMQ) -> None:
    """20 is the default of RabbitMQ 4"""
    set_policy(rabbitmq_server, transport, **{"delivery-limit": 20})
    await transport.publish([Message(queue="q", payload=b"healthy")])
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    async with asyncio.timeout(SOON):
        while True:
            got = await channel.basic_get("q")
            if isinstance(got.delivery, aiormq.spec.Basic.GetEmpty):
                break
            await channel.basic_nack(got.delivery.delivery_tag, requeue=True)
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.reason) == (b"healthy", "delivery_limit by the broker")
    await other.close()


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_listing_does_not_use_up_dead_letters(transport: Any, rabbitmq_server: RabbitMQ, limit: int) -> None:
    set_policy(rabbitmq_server, transport, **{"delivery-limit": limit})
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    claims: list[Any] = []
    while len(claims) < 3:
        claims += await transport.claim(["q"], 3)
    await transport.settle([Reject(claim.receipt, reason="bad") for claim in claims])
    ids = None
    for _ in range(10):
        async with asyncio.timeout(SOON):  # letters that were put back need a moment
            while len(rows := await Control(transport).messages("q", states=[State.FAILED])) < 3:
                pass
        assert ids in (None, {row.id for row in rows}) and {row.reason for row in rows} == {"bad"}
        ids = {row.id for row in rows}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"x-delivery-limit": 50},
        {"x-quorum-initial-group-size": 3},
        {"x-max-length": 100_000, "x-overflow": "reject-publish"},
        {"x-single-active-consumer": True},
    ],
    ids=str,
)
async def test_a_queue_that_exists_is_used_as_it_is(
    transport: Any, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    await channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum", **arguments})
    await other.close()
    with caplog.at_level(logging.WARNING, "millpond.rabbitmq"):
        await transport.publish([Message(queue="q", payload=b"x")])
        claim = await next_claim(transport)
        assert await transport.settle([Nack(claim.receipt)]) == []
        claim = await next_claim(transport)
        assert await transport.settle([Ack(claim.receipt)]) == []
    assert sum("other arguments" in record.message for record in caplog.records) == 1


async def declared_by_another_client(transport: Any, name: str = "q") -> None:
    other = await aiormq.connect(transport.url.raw)
    await (await other.channel()).queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    await other.close()


async def test_a_queue_beside_that_differs_is_named_once(transport: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Dead letters would expire in it"""
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    arguments = {"x-queue-type": "quorum", "x-message-ttl": 60_000}
    await channel.queue_declare("millpond.dead.q", durable=True, arguments=arguments)
    await other.close()
    for _ in range(2):
        await transport.publish([Message(queue="q", payload=b"x")])
        transport.topology.forget()
    named = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.startswith("queue 'millpond.dead.q' exists with other") for text in named if "exists" in text] == [
        True
    ]
    claim = await next_claim(transport)
    assert await transport.settle([Reject(claim.receipt, "r")]) == []
    (letter,) = await dead_letters(Control(transport))
    assert letter.reason == "r"


async def test_the_documented_policy_protects_a_queue_that_exists(transport: Any, rabbitmq_server: RabbitMQ) -> None:
    await declared_by_another_client(transport, "orders")
    text = Path("docs/how-to/rabbitmq.md").read_text()
    (arguments,) = re.findall(r"^rabbitmqctl (set_policy .*?})'$", text, re.MULTILINE | re.DOTALL)
    words = shlex.split(arguments.replace("\\\n", " ") + "'")
    await asyncio.to_thread(rabbitmq_server.control, *words, "--vhost", vhost_of(transport))
    await transport.publish([Message(queue="orders", payload=b"x")])
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    async with asyncio.timeout(SOON):
        while isinstance((got := await channel.basic_get("orders")).delivery, aiormq.spec.Basic.GetEmpty):
            pass
    await channel.basic_reject(got.delivery.delivery_tag, requeue=False)
    (letter,) = await dead_letters(Control(transport), "orders")
    assert (letter.payload, letter.reason) == (b"x", "rejected by the broker")
    await other.close()


async def test_a_drained_queue_is_declared_anew(
    transport: Any, rabbitmq_server: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    """The documented commands. Afterwards there is no warning"""
    await declared_by_another_client(transport, "orders")
    await transport.publish([Message(queue="orders", payload=b"x")])
    assert await transport.settle([Ack((await next_claim(transport, "orders")).receipt)]) == []
    assert "other arguments" in caplog.text
    await asyncio.to_thread(rabbitmq_server.control, "delete_queue", "orders", "--vhost", vhost_of(transport))
    caplog.clear()
    anew: Any = await millpond.connect(transport.url.raw)
    await anew.publish([Message(queue="orders", payload=b"x")])
    assert (await next_claim(anew, "orders")).message.payload == b"x"
    queue = rabbitmq_server.ask("GET", f"/queues/{vhost_of(transport)}/orders")
    assert queue["arguments"]["x-dead-letter-routing-key"] == "millpond.dead.orders"
    assert caplog.text == ""
    await anew.close()


async def test_a_queue_of_the_other_type_is_refused(transport: Any) -> None:
    """Classic queues do not count deliveries"""
    other = await aiormq.connect(transport.url.raw)
    await (await other.channel()).queue_declare("q", durable=True)
    await other.close()
    with pytest.raises(QueueMismatch, match="queue_type"):
        await transport.publish([Message(queue="q", payload=b"x")])


async def test_further_arguments_of_new_queues(rabbitmq_url: str, rabbitmq_server: RabbitMQ) -> None:
    transport: Any = await millpond.connect(rabbitmq_url, queue_arguments={"x-quorum-initial-group-size": 1})
    await transport.publish([Message(queue="q", payload=b"x")])
    queue = rabbitmq_server.ask("GET", f"/queues/{vhost_of(transport)}/q")
    assert queue["arguments"]["x-quorum-initial-group-size"] == 1
    assert queue["arguments"]["x-dead-letter-strategy"] == "at-least-once"
    await transport.close()


async def test_without_declaring(rabbitmq_url: str, transport: Any) -> None:
    quiet: Any = await millpond.connect(rabbitmq_url, declare=False, reconnect_timeout=1)
    with pytest.raises(StoreError, match="no longer has the queue"):
        await quiet.publish([Message(queue="q", payload=b"x")])
    await transport.claim(["q"])
    await quiet.publish([Message(queue="q", payload=b"x")])
    assert (await next_claim(quiet)).message.payload == b"x"
    await quiet.close()


PERMISSIONS = {
    "publisher": {"configure": "^$", "write": r"^(amq\.default|millpond\.wait)$", "read": "^$"},
    "declarer": {
        "configure": r"^(orders|millpond\..*)$",
        "write": r"^(orders|amq\.default|millpond\..*)$",
        "read": r"^(orders|millpond\..*)$",
    },
    "operator": {"configure": ".*", "write": ".*", "read": ".*"},
    "worker": {
        "configure": "^$",
        "write": r"^(amq\.default|millpond\.wait)$",
        "read": r"^(orders|millpond\.(dead|suspects)\.orders)$",
    },
}


async def test_accounts_without_configure(transport: Any, rabbitmq_server: RabbitMQ) -> None:
    """The permissions in docs/reference/rabbitmq.md. Another account has declared the queues"""
    accounts = {}
    table = Path("docs/reference/rabbitmq.md").read_text().replace("\\|", "|")
    for name, permissions in PERMISSIONS.items():
        assert all(f"`{pattern}`" in table for pattern in permissions.values())
        user = f"{name}-{vhost_of(transport)}"
        rabbitmq_server.ask("PUT", f"/users/{user}", {"password": "long-enough", "tags": ""})
        rabbitmq_server.ask("PUT", f"/permissions/{vhost_of(transport)}/{user}", permissions)
        login = f"{rabbitmq_server.user}:{rabbitmq_server.password}@"
        url = transport.url.raw.replace(login, f"{user}:long-enough@")
        accounts[name] = await millpond.connect(url)
    assert await accounts["declarer"].declare(["orders"]) == []
    await accounts["declarer"].publish([Message(queue="orders", payload=b"0", delay=0.1)])
    queues = {queue["name"]: queue for queue in rabbitmq_server.ask("GET", f"/queues/{vhost_of(transport)}")}
    assert queues["orders"]["arguments"]["x-dead-letter-strategy"] == "at-least-once"
    waits = {f"millpond.wait.{bucket}" for bucket in BUCKETS}
    assert {"millpond.dead.orders", "millpond.suspects.orders", "millpond.undelivered", *waits} <= queues.keys()
    await accounts["publisher"].publish([Message(queue="orders", payload=b"1"), Message(queue="orders", payload=b"2")])
    await accounts["publisher"].publish([Message(queue="orders", payload=b"3", delay=0.1)])
    with pytest.raises(StoreError):
        await accounts["publisher"].claim(["orders"])
    bodies = {b"0", b"1", b"2", b"3"}
    claimed: set[bytes] = set()
    while claimed < bodies:
        claim = await next_claim(accounts["worker"], "orders")
        if not claim.attempts:  # any wait queue, as with jitter
            assert await accounts["worker"].settle([Nack(claim.receipt, delay=0.3)]) == []
            continue
        claimed.add(claim.message.payload)
        assert await accounts["worker"].settle([Reject(claim.receipt)]) == []
    with pytest.raises(StoreError):
        await accounts["publisher"].publish([Message(queue="new", payload=b"")])
    letters = Counter(row.payload for row in await Control(accounts["worker"]).messages("orders"))
    assert letters == Counter(bodies)
    operator = Control(accounts["operator"])
    assert Counter(row.payload for row in await operator.messages("orders")) == Counter(bodies)
    assert len((await operator.retry_queue("orders")).published) == len(bodies)
    assert await operator.messages("orders") == await operator.messages("millpond.undelivered") == []
    for account in accounts.values():
        await account.close()


async def test_a_command_declares_queues(
    rabbitmq_url: str, rabbitmq_server: RabbitMQ, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbit, "BUCKETS", BUCKETS[:2])
    await declared_by_another_client(transport, "b")
    command = ["migrate", rabbitmq_url, "--queue", "a", "--queue", "b", "--json"]
    for _ in range(2):
        done = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert json.loads(done.stdout) == {"declared": ["a", "b"], "used_as_found": ["b"]}
    names = {queue["name"] for queue in rabbitmq_server.ask("GET", f"/queues/{vhost_of(transport)}")}
    sides = {f"millpond.{side}.{queue}" for side in ("dead", "suspects") for queue in "ab"}
    assert names == {"a", "b", *sides, "millpond.undelivered", "millpond.wait.100", "millpond.wait.125"}


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_full_queue_does_not_multiply_the_copies_of_others(
    rabbitmq_url: str, rabbitmq_server: RabbitMQ, queue_type: str
) -> None:
    """One copy is refused because its queue is full. The other outcomes are written, once"""
    clock = ManualClock()
    transport: Any = await millpond.connect(rabbitmq_url, queue_type=queue_type, clock=clock)
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(2)])
    claims: list[Any] = []
    async with asyncio.timeout(SOON):
        while len(claims) < 2:
            claims += await transport.claim(["q"], 2)
        full = {"max-length": 1, "overflow": "reject-publish"}
        policy = {"pattern": "^q$", "definition": full, "apply-to": "queues"}
        rabbitmq_server.ask("PUT", f"/policies/{vhost_of(transport)}/full", policy)
        with pytest.raises(StoreUnavailable, match="refused"):
            while True:
                await transport.publish([Message(queue="q", payload=b"fill")])
    outcomes = [Reject(claims[0].receipt), Nack(claims[1].receipt)]
    for _ in range(6):
        with pytest.raises(StoreUnavailable, match="refused"):
            await transport.settle(outcomes)
    channel = await transport.consumer_pool.channel()
    assert await channel.find_queue("millpond.dead.q") == 1
    assert await transport.extend([claims[1].receipt]) == [], "the other one is still held"
    if queue_type == "classic":  # it is given back by a copy too, and no claim waits for that
        clock.advance(31)
        while (claim := await next_claim(transport)).message.payload == b"fill":
            assert await transport.settle([Ack(claim.receipt)]) == []
        assert (claim.message.payload, claim.crashes) == (claims[1].message.payload, 1)
    await transport.close()
