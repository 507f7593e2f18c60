"""A publisher of the virtual host may send anything: the connection lives, neighbours are handled, and the message is
handled or dead-lettered with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from pathlib import Path
from typing import Any

import aiormq
import pytest
from aiormq.abc import ChannelFrame

import millpond
from millpond import Ack, Message, Millpond, Nack, Reject, Retry
from millpond.control import Control
from millpond.errors import BodyTooLarge, StoreUnavailable
from millpond.message import State, replayed_id
from millpond.transports.rabbitmq import transport as rabbit
from tests.rabbitmq.attacker import FORGED_DEATHS, METADATA, UNDECODABLE, USER_ID, attacker, table
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim
from tests.triggers import failing_beside
from tests.waiting import until
from tests.worker.shop import Shop

SHOP = """
import os
from millpond import Delivery, Millpond

pond = Millpond({url!r})


def note(*words):
    with open("notes", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


@pond.on_start
def started():
    note("started", os.getpid())


@pond.subscriber("q")
async def handle(body: bytes, delivery: Delivery):
    note(body.decode(), delivery.headers["n"])
"""


async def claim_all(transport: Any, count: int, queue: str = "q") -> list[Any]:
    claims: list[Any] = []
    async with asyncio.timeout(SOON):
        while len(claims) < count:
            claims += await transport.claim([queue], 10)
            if len(claims) < count:
                await transport.wait([queue], 1)
    return claims


@pytest.mark.parametrize("properties", UNDECODABLE.values(), ids=UNDECODABLE)
async def test_properties_that_cannot_be_decoded_are_a_dead_letter(transport: Any, properties: bytes) -> None:
    lost: list[float] = []
    transport.on_event = lambda event: lost.append(0)
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    async with attacker(transport.url.raw) as attack:
        await attack.send(properties)
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3, 6)])
    claims = await claim_all(transport, 6)
    assert [claim.message.payload for claim in claims] == [b"%d" % n for n in range(6)]
    assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.reason) == (b"hostile", "undecodable") and letter.error
    assert lost == []


@pytest.mark.parametrize("text", METADATA.values(), ids=METADATA)
async def test_our_own_header_with_wrong_content_is_a_dead_letter(transport: Any, text: str) -> None:
    await transport.publish([Message(queue="q", payload=b"before")])
    async with attacker(transport.url.raw) as attack:
        await attack.publish({"millpond": text})
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"after")])
    claims = await claim_all(transport, 2)
    assert [claim.message.payload for claim in claims] == [b"before", b"after"]
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.reason) == (b"hostile", "undecodable")


@pytest.mark.parametrize("header", FORGED_DEATHS.values(), ids=FORGED_DEATHS)
async def test_a_forged_death_stops_no_dead_letters(transport: Any, header: bytes) -> None:
    """The broker would read the header when it moves the message, and not recover"""
    await transport.claim(["q"])
    forged = table(header + b"\x02\xe9\xe9t\x01")
    async with attacker(transport.url.raw) as attack:
        for body, properties in ((b"forged", forged), (b"next", UNDECODABLE["header name in Latin-1"])):
            await attack.send(properties, body)
        await attack.flush()
    found: set[bytes] = set()
    async with asyncio.timeout(SOON):
        while found != {b"forged", b"next"}:
            assert await transport.claim(["q"]) == []
            found = {row.payload for row in await Control(transport).messages("q")}


async def test_a_routing_key_in_another_encoding_is_harmless(transport: Any) -> None:
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        await attack.channel.exchange_declare("public", exchange_type="fanout")
        await attack.channel.queue_bind("q", "public")
        number = attack.channel.number
        method = struct.pack(">HHH", 60, 40, 0) + b"\x06public\x02\xe9\xe9\x00"
        header = struct.pack(">HHQH", 60, 0, 0, 0)
        frames = struct.pack(">BHI", 1, number, len(method)) + method + b"\xce"
        frames += struct.pack(">BHI", 2, number, len(header)) + header + b"\xce"
        await attack.channel.write_queue.put(ChannelFrame(frames, should_close=False, drain_future=None))
        await attack.flush()
    claim = await next_claim(transport)
    await transport.settle([Nack(claim.receipt)])
    claim = await next_claim(transport)
    assert await transport.settle([Ack(claim.receipt)]) == []


async def test_a_header_value_in_latin_1_survives_every_outcome(transport: Any) -> None:
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        await attack.send(table(b"\x04cityS" + struct.pack(">I", 7) + b"M\xfcnchen"))
        await attack.flush()
    claim = await next_claim(transport)
    assert claim.message.headers == {"city": "München"}
    assert await transport.settle([Nack(claim.receipt)]) == []
    claim = await next_claim(transport)
    assert claim.message.headers == {"city": "München"} and claim.attempts == 1
    assert await transport.settle([Reject(claim.receipt)]) == []
    (letter,) = await dead_letters(Control(transport))
    assert letter.headers == {"city": "München"} and letter.attempts == 2


async def test_a_suspect_that_cannot_be_read_is_a_dead_letter(transport: Any) -> None:
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        for properties in UNDECODABLE.values():
            await attack.send(properties, queue="millpond.suspects.q")
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"good")])
    assert (await next_claim(transport)).message.payload == b"good"
    async with asyncio.timeout(SOON):
        while len(rows := await Control(transport).messages("q", states=[State.FAILED])) < len(UNDECODABLE):
            transport._consumers["q"].suspects_known = True
            await transport.claim(["q"])
    assert {row.reason for row in rows} == {"undecodable"}


async def test_a_suspect_with_a_large_integer_runs(transport: Any, tmp_path: Path) -> None:
    """It reaches the child process in which suspects run. The worker lives."""
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        text = '{"queue":"q","headers":"{\\"n\\":1' + "0" * 30 + '}"}'
        await attack.publish({"millpond": text}, b"large", to="millpond.suspects.q")
        await attack.publish({"millpond": text}, b"ordinary")
        await attack.flush()
    shop = Shop(tmp_path, transport.url.raw, SHOP)
    try:
        worker = shop.start("shop")
        await until(lambda: {note[0] for note in shop.notes} >= {"large", "ordinary"})
        assert {note[1] for note in shop.notes if note[0] != "started"} == {"1" + "0" * 30}
        assert worker.poll() is None
    finally:
        shop.close()


async def test_a_message_that_cannot_be_claimed_is_a_dead_letter(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the claim are returned. A caller without stack loses no message."""
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(3)])
    real, errors = rabbit.make_claim, {b"0": RecursionError("too deep")}

    def fail(envelope: Any, *further: Any) -> Any:
        if envelope.payload in errors:
            raise errors[envelope.payload]
        return real(envelope, *further)

    monkeypatch.setattr(rabbit, "make_claim", fail)
    with pytest.raises(RecursionError):
        await transport.claim(["q"], 3)
    errors = {b"1": ValueError("no such value")}
    assert [claim.message.payload for claim in await claim_all(transport, 2)] == [b"0", b"2"]
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.reason, letter.error) == (b"1", "undecodable", "ValueError: no such value")


async def test_dead_letters_of_others_are_listed(transport: Any) -> None:
    """Also those that cannot be read, and those without our header"""
    assert await Control(transport).messages("q") == []
    async with attacker(transport.url.raw) as attack:
        await attack.send(UNDECODABLE["message_id in Latin-1"], b"bad", queue="millpond.dead.q")
        await attack.send(struct.pack(">H", 0), b"plain", queue="millpond.dead.q")
        await attack.flush()
    async with asyncio.timeout(SOON):
        while len(rows := await Control(transport).messages("q")) < 2:
            pass
    assert {row.payload: row.reason for row in rows} == {b"bad": "undecodable", b"plain": "moved by the broker"}


async def test_routing_headers_of_others_are_never_published_again(transport: Any) -> None:
    """The broker would send a copy to every queue that CC names, with the worker's rights"""
    for queue in ("q", "payments"):
        await transport.claim([queue])
    async with attacker(transport.url.raw) as attack:
        await attack.channel.exchange_declare("public", exchange_type="fanout")
        await attack.channel.queue_bind("q", "public")
        encoded = b"".join(
            name + b"A" + struct.pack(">I", 13) + b"S" + struct.pack(">I", 8) + b"payments"
            for name in (b"\x02CC", b"\x03BCC")
        )
        await attack.send(table(encoded), queue="any", exchange="public")
        await attack.flush()
        while (await attack.channel.queue_purge("payments")).message_count:  # CC also names queues of `public`
            pass
    for _ in range(2):
        claim = await next_claim(transport)
        assert claim.message.headers == {"CC": ["payments"]}  # the broker removes BCC
        await transport.settle([Nack(claim.receipt)])
    claim = await next_claim(transport)
    await transport.settle([Reject(claim.receipt)])
    (letter,) = await dead_letters(Control(transport))
    await Control(transport).retry([letter.id])
    await next_claim(transport)
    assert await transport.claim(["payments"]) == []


@pytest.mark.parametrize("name", ["CC", "BCC", "cc", "x-death", "millpond", "x-delivery-count"])
async def test_headers_with_a_meaning_for_the_broker_arrive_unchanged(transport: Any, name: str) -> None:
    await transport.publish([Message(queue="q", payload=b"", headers={name: "boss@example.org"})])
    claim = await next_claim(transport)
    assert claim.message.headers == {name: "boss@example.org"}
    await transport.settle([Nack(claim.receipt)])
    assert (await next_claim(transport)).message.headers == {name: "boss@example.org"}


async def test_a_user_id_of_another_publisher_is_no_obstacle(transport: Any) -> None:
    """The broker compares it with the account that publishes"""
    await transport.claim(["q"])
    user = transport.url.raw.split("//")[1].split(":")[0].encode()
    async with attacker(transport.url.raw) as attack:
        await attack.send(struct.pack(">H", USER_ID) + bytes([len(user)]) + user)
        await attack.flush()
    claim = await next_claim(transport)
    assert claim.message.headers == {"amqp-user-id": user.decode()}
    assert await transport.settle([Nack(claim.receipt)]) == []
    assert (await next_claim(transport)).message.headers == {"amqp-user-id": user.decode()}


async def test_properties_of_other_publishers_survive_a_retry_and_the_dead_letters(transport: Any) -> None:
    await transport.claim(["q"])
    given: dict[str, Any] = {
        "content_type": "application/json",
        "content_encoding": "gzip",
        "correlation_id": "c-1",
        "reply_to": "answers",
        "message_type": "order",
        "app_id": "shop",
        "priority": 7,
        "message_id": "order-7",
    }
    async with attacker(transport.url.raw) as attack:
        await attack.publish({"n": 1}, **given, expiration="600000")
        await attack.flush()
    shown = {"amqp-" + name.replace("_", "-"): value for name, value in given.items() if "message" not in name}
    shown |= {"amqp-type": "order"}
    shown |= {"n": 1, "amqp-expiration": "600000"}
    claim = await next_claim(transport)
    assert claim.message.headers == shown
    await transport.settle([Nack(claim.receipt)])
    again = await next_claim(transport)
    assert again.message.headers == shown and again.receipt.id == claim.receipt.id
    await transport.settle([Reject(again.receipt)])
    (letter,) = await dead_letters(Control(transport))
    assert letter.headers == shown
    await transport.operations._put_back("q")
    other = await aiormq.connect(transport.url.raw)
    channel = await other.channel()
    got = await channel.basic_get("millpond.dead.q", no_ack=True)
    assert {name: getattr(got.header.properties, name) for name in given} == given
    assert got.header.properties.expiration is None
    await other.close()


async def test_properties_of_other_publishers_survive_an_operators_retry(transport: Any) -> None:
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        await attack.publish({"n": 1}, correlation_id="c-1", reply_to="answers", message_id="order-7")
        await attack.flush()
    claim = await next_claim(transport)
    await transport.settle([Reject(claim.receipt)])
    (letter,) = await dead_letters(Control(transport))
    await Control(transport).retry([letter.id])
    again = await next_claim(transport)
    shown = {"n": 1, "amqp-correlation-id": "c-1", "amqp-reply-to": "answers", "replay-of": str(claim.receipt.id)}
    assert again.message.headers == shown and again.receipt.id == replayed_id(claim.receipt.id, "retry")


async def test_a_letter_of_others_keeps_the_id_that_was_listed(rabbitmq_url: str, transport: Any) -> None:
    """It has none of its own: the one of the first list is stored with it"""
    assert await Control(transport).messages("q") == []
    async with attacker(rabbitmq_url) as attack:
        await attack.send(UNDECODABLE["message_id in Latin-1"], b"bad", queue="millpond.dead.q")
        await attack.send(struct.pack(">H", 0), b"plain", queue="millpond.dead.q")
        await attack.flush()
    seen = []
    for _ in range(3):
        async with asyncio.timeout(SOON):
            while len(rows := await Control(transport).messages("q")) < 2:
                pass
        seen.append({row.payload: row.id for row in rows})
    assert seen[0] == seen[1] == seen[2]


# --- sizes ------------------------------------------------------------------------------------------


async def test_headers_that_do_not_fit_into_a_frame_are_refused(transport: Any) -> None:
    """The broker would close the connection of all publishers"""
    wide = Message(queue="q", payload=b"", headers={"note": "水" * 50_000})
    publishing = asyncio.gather(*(transport.publish([Message(queue="q", payload=b"ok")]) for _ in range(50)))
    with pytest.raises(BodyTooLarge, match="frame_max"):
        await transport.publish([wide])
    assert len(await publishing) == 50


async def test_the_largest_headers_can_be_retried_with_a_long_error(transport: Any) -> None:
    largest = 31_000
    while True:
        try:
            await transport.publish([Message(queue="q", payload=b"edge", headers={"note": '"' * largest})])
            break
        except BodyTooLarge:
            largest -= 100
    await transport.publish([Message(queue="q", payload=b"good")])
    edge, good = await claim_all(transport, 2)
    assert await transport.settle([Nack(edge.receipt, error="E" * 8000), Ack(good.receipt)]) == []
    edge = await next_claim(transport)
    assert edge.attempts == 1 and len(edge.message.headers["note"]) == largest
    assert await transport.settle([Reject(edge.receipt, error="水" * 8000)]) == []
    (letter,) = await dead_letters(Control(transport))
    assert letter.attempts == 2 and letter.error is not None and letter.error.startswith("水") and letter.headers


async def test_a_foreign_message_without_room_for_our_header_is_a_dead_letter(transport: Any) -> None:
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        await attack.send(table(b"\x01aS" + struct.pack(">I", 131_000) + b"x" * 131_000))
        await attack.flush()
    await transport.publish([Message(queue="q", payload=b"good")])
    large, good = await claim_all(transport, 2)
    assert await transport.settle([Nack(large.receipt, error="no"), Ack(good.receipt)]) == []
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.reason, letter.attempts) == (b"hostile", "headers too large", 1)
    assert "no" in (letter.error or "")


async def test_one_id_in_two_queues_of_which_one_was_deleted(transport: Any) -> None:
    """A returned message is found again by its id alone"""
    first, second = (Message(queue=queue, payload=queue.encode(), id=millpond.id_from("x")) for queue in "ab")
    await transport.publish([first, second])
    await transport.claim(["a"]), await transport.claim(["b"])
    admin = await aiormq.connect(transport.url.raw)
    channel = await admin.channel()
    await channel.queue_delete("a")
    await channel.queue_purge("b")
    await transport.publish([first, second])
    for queue in ("a", "b"):
        assert (await channel.queue_declare(queue, passive=True)).message_count == 1
    await admin.close()


async def test_a_worker_survives_everything(rabbitmq_url: str) -> None:
    """All hostile messages among a hundred good ones, which run once"""
    transport: Any = await millpond.connect(rabbitmq_url)
    good = [Message(queue="q", payload=b"%d" % n) for n in range(100)]
    await transport.publish(good[:50])
    async with attacker(rabbitmq_url) as attack:
        for properties in UNDECODABLE.values():
            await attack.send(properties)
        for text in METADATA.values():
            await attack.publish({"millpond": text})
        await attack.flush()
    await transport.publish(good[50:])
    ran: list[int] = []
    pond = Millpond(rabbitmq_url)

    @pond.subscriber("q", max_workers=8, retry=Retry(attempts=1))
    async def handle(body: int) -> None:
        ran.append(body)

    running = asyncio.create_task(pond.run())
    hostile = len(UNDECODABLE) + len(METADATA)
    async with asyncio.timeout(2 * SOON):
        while len(rows := await Control(transport).messages("q", states=[State.FAILED])) < hostile or len(ran) < 100:
            assert not running.done()
            await asyncio.sleep(0.1)
    assert sorted(ran) == list(range(100)) and len(rows) == hostile
    pond.stop()
    await running
    await pond.close()
    await transport.close()


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_flood_of_unreadable_messages_starves_no_neighbour(
    rabbitmq_url: str, queue_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each claim returns good messages as they come, although many others have not been moved yet"""
    transport: Any = await millpond.connect(rabbitmq_url, queue_type=queue_type)
    await transport.claim(["q"])
    async with attacker(rabbitmq_url) as attack:
        for n in range(100):
            for _ in range(20):
                await attack.send(UNDECODABLE["message_id in Latin-1"])
            await attack.send(struct.pack(">H", 0), b"%d" % n)
        await attack.flush()
    bodies: list[bytes] = []
    moving = 0
    async with asyncio.timeout(4 * SOON):
        while len(bodies) < 100:
            claims = await transport.claim(["q"], 10)
            if claims:
                moving = max(moving, len(transport._republisher))
            else:
                await transport.wait(["q"], 1)
            bodies += [claim.message.payload for claim in claims]
            assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []
        assert sorted(bodies) == sorted(b"%d" % n for n in range(100))
        letters: list[Any] = []
        while len(letters) < 2000:
            letters = await Control(transport).messages("q", states=[State.FAILED], limit=10_000)
            await transport.wait(["q"], 0.1)
    assert moving or queue_type == "quorum", "claims waited for copies"  # a quorum queue moves them without a copy
    assert {row.reason for row in letters} == {"undecodable"} and len(letters) == 2000
    await until(lambda: " more in queue 'q'" in caplog.messages[-1], "the number of further ones")
    assert sum("cannot be read" in message for message in caplog.messages) < 200
    await transport.close()


async def test_a_failed_claim_keeps_its_messages(transport: Any) -> None:
    """A claim of a suspect and of others that fails or is cancelled half-way forgets none of them"""
    await transport.publish([Message(queue="q", payload=b"%d" % n, expires=0.001) for n in range(3)])
    await transport.topology.declare_side_queue("millpond.suspects.q")
    async with attacker(transport.url.raw) as attack:
        text = b'{"queue":"q","crashes":2,"expires_us":1}'
        await attack.send(table(b"\x08millpondS" + struct.pack(">I", len(text)) + text), queue="millpond.suspects.q")
        await attack.flush()
    settle = transport._outcome_writer.settle

    async def fails(outcomes: Any, **how: Any) -> Any:
        raise StoreUnavailable("no archive")

    transport._outcome_writer.settle = fails
    for _ in range(3):
        with contextlib.suppress(StoreUnavailable):
            await transport.claim(["q"], 10)
    transport._outcome_writer.settle = settle
    async with asyncio.timeout(SOON):
        while len(rows := await Control(transport).messages("q")) < 4:
            assert await transport.claim(["q"], 10) == []
    assert {row.reason for row in rows} == {"expired"} and {row.deliveries for row in rows} == {1}


async def test_an_archive_survives_everything(rabbitmq_url: str, archive_url: str) -> None:
    """Fields that a database cannot hold never reach it, and one refused row is no obstacle for the others"""
    store: Any = await millpond.connect(archive_url)
    transport: Any = await millpond.connect(rabbitmq_url, archive=archive_url)
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(5)])
    names = ("deliveries", "attempts", "crashes")
    counters = [f'{{"queue":"q","expires_us":1,"{name}":{2**31 - 1}}}' for name in names]
    largest = f'{{"queue":"q","deliveries":{2**30 - 1},"attempts":{2**30 - 1}}}'
    async with attacker(rabbitmq_url) as attack:
        for text in [*METADATA.values(), *counters, largest]:
            await attack.publish({"millpond": text})
        await attack.send(table(b"\x01aS" + struct.pack(">I", 3) + b"\x00\xff\x00"), b"nul")
        await attack.flush()
    claims = await claim_all(transport, 7)
    outcomes = [Ack(claim.receipt) if claim.attempts == 0 else Nack(claim.receipt) for claim in claims]
    assert await transport.settle(outcomes) == []
    (claim,) = await claim_all(transport, 1)
    assert claim.attempts == claim.deliveries == 2**30 - 1
    assert await transport.settle([Ack(claim.receipt)]) == []
    async with asyncio.timeout(SOON):
        while len(rows := await store.operations.archived("q", limit=100)) < 7 + len(METADATA) + len(counters):
            await transport.wait(["q"], 0.05)
            assert await transport.claim(["q"]) == []
    assert sum(row.state is State.COMPLETED for row in rows) == 7
    await transport.close()
    await store.close()


async def test_a_row_that_the_archive_refuses_ends_no_claim(rabbitmq_url: str, archive_url: str) -> None:
    transport: Any = await millpond.connect(rabbitmq_url, archive=archive_url)
    await transport.publish([Message(queue="q", payload=b"refused", priority=99, expires=0.001)])
    await transport.publish([Message(queue="q", payload=b"good")])
    async with failing_beside(archive_url, "INSERT", "millpond_archive", "ROW.priority = 99"):
        (claim,) = await claim_all(transport, 1)
        assert claim.message.payload == b"good"
        assert await transport.settle([Ack(claim.receipt)]) == []
    (letter,) = await dead_letters(Control(transport))
    assert (letter.payload, letter.reason) == (b"refused", "expired")
    await transport.close()
