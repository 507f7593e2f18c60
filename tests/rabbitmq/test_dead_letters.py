"""Dead letters: kept with reason and error, listed, retried and replayed, also by commands."""

from __future__ import annotations

import asyncio
import json
import struct
import tracemalloc
from typing import Any

import pytest
from typer.testing import CliRunner

import millpond
from millpond import Ack, Message, Reject, Unsupported
from millpond.cli.app import app
from millpond.control import Control
from millpond.message import State, new_id, replayed_id
from millpond.transports.rabbitmq import dead_letters as dead_letters_module
from millpond.transports.rabbitmq.broker_errors import AccessRefused
from millpond.transports.rabbitmq.dead_letters import MOST_BYTES
from millpond.transports.rabbitmq.envelope import Envelope, Metadata
from millpond.transports.rabbitmq.names import dead_name
from millpond.transports.rabbitmq.outgoing import OutgoingMessage
from tests.rabbitmq.attacker import attacker
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim

DEAD = dead_name("q")


async def reject(transport: Any, body: bytes, reason: str, queue: str = "q") -> Any:
    await transport.publish([Message(queue=queue, payload=body, key="k", headers={"a": 1, "b": [1]})])
    claim = await next_claim(transport, queue)
    assert await transport.settle([Reject(claim.receipt, reason=reason, error=f"why {reason}")]) == []
    return claim.receipt.id


async def test_letters_are_listed_newest_first_and_stay(transport: Any) -> None:
    ids = [await reject(transport, b"%d" % n, f"r{n}") for n in range(3)]
    control = Control(transport)
    for _ in range(2):  # listing removes nothing
        rows = await control.messages("q")
        assert [row.id for row in rows] == ids[::-1]
    assert next((r.state, r.reason, r.error, r.attempts) for r in rows) == (State.FAILED, "r2", "why r2", 1)
    assert rows[0].headers == {"a": 1, "b": [1]} and rows[0].key == "k"


async def test_retry_publishes_again_and_removes(transport: Any) -> None:
    kept, again = await reject(transport, b"1", "other"), await reject(transport, b"2", "chosen")
    control = Control(transport)
    retried = await control.retry_queue("q", reason="chosen")
    assert retried.published == [replayed_id(again, "retry")]
    claim = await next_claim(transport)
    assert claim.message.payload == b"2" and claim.message.headers["replay-of"] == str(again)
    assert (claim.deliveries, claim.attempts) == (1, 0)
    assert [row.id for row in await control.messages("q")] == [kept]
    assert (await control.retry_queue("q", reason="chosen")).published == []


async def test_letters_are_taken_out_once_for_all_pages(transport: Any) -> None:
    letters = [
        OutgoingMessage(
            Envelope(new_id(), b"", {}, Metadata(queue="q", created_us=n, failed_us=n, reason=f"r{n % 2}")),
            side_queue=DEAD,
        )
        for n in range(1, 2501)
    ]
    await transport.publisher.send(letters)
    control = Control(transport)
    letter_room: Any = control.operations
    taken, take = 0, letter_room._receive

    async def count_takes(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        return await take(*arguments)

    letter_room._receive = count_takes
    assert len((await control.retry_queue("q", reason="r1")).published) == 1250
    assert taken == 3  # for all pages; after the last one, which put them back; to see that nothing is left
    assert len(await transport.claim(["q"], 2000)) == 1250
    other, rest = Control(transport), list[Any]()
    async with asyncio.timeout(SOON):  # without further calls they return to their queue
        while len(rest) < 1250:
            rest = await other.messages("q", limit=2000)
    assert {row.reason for row in rest} == {"r0"} and len(rest) == 1250


async def test_replay_into_another_queue(transport: Any) -> None:
    id_ = await reject(transport, b"1", "r")
    assert await Control(transport).replay_queue("q", name="monday", to="other") == [replayed_id(id_, "monday")]
    assert (await next_claim(transport, "other")).message.payload == b"1"


async def test_verbs_that_a_broker_lacks_are_errors(transport: Any) -> None:
    control = Control(transport)
    with pytest.raises(Unsupported, match=r"names of queues.* BROWSE"):
        await control.operations.count()
    with pytest.raises(Unsupported, match="queue"):
        await control.messages()
    with pytest.raises(Unsupported, match=r"name of its queue.* BROWSE"):
        await control.retry([new_id()])
    with pytest.raises(Unsupported, match="PAUSE"):
        await control.operations.pause("q")


async def test_by_the_command_line(transport: Any, rabbitmq_url: str) -> None:
    await reject(transport, b'"x"', "r")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments, "--url", rabbitmq_url])

    listed = await asyncio.to_thread(run, "list", "q", "--json")
    assert listed.exit_code == 0, listed.output
    (row,) = json.loads(listed.stdout)["messages"]
    assert row["reason"] == "r"
    retried = await asyncio.to_thread(run, "retry", "--queue", "q", "--json")
    assert len(json.loads(retried.stdout)["published"]) == 1
    assert (await next_claim(transport)).message.payload == b'"x"'
    id_ = await reject(transport, b"y", "r")
    replayed = await asyncio.to_thread(run, "replay", "--queue", "q", "--name", "monday", "--to", "other", "--json")
    assert json.loads(replayed.stdout)["published"] == [str(replayed_id(id_, "monday"))], replayed.output
    assert (await next_claim(transport, "other")).message.payload == b"y"


async def test_stats_count_messages_that_are_ready_and_dead_letters(rabbitmq_url: str, sqlite_url: str) -> None:
    await (await millpond.connect(sqlite_url)).close()
    transport: Any = await millpond.connect(rabbitmq_url, archive=sqlite_url)
    await reject(transport, b"x", "r")
    await transport.publish([Message(queue="q", payload=b"%d" % n) for n in range(4)])
    await transport.settle([Ack((await next_claim(transport)).receipt)])
    await transport.close()  # gives back messages that were received ahead

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["stats", *arguments, "--url", rabbitmq_url])

    await asyncio.to_thread(run, "q")
    async with asyncio.timeout(SOON):  # a quorum queue needs a moment
        while True:
            output = await asyncio.to_thread(run, "q", "missing", "--json")
            queues = json.loads(output.stdout)["queues"]
            if queues["q"]["PENDING"] == 3 and queues["q"]["FAILED"] == 1:
                break
    unknown = {"PROCESSING": None, "RETRYABLE": None, "COMPLETED": None}
    others = {"retried": 0, "approximate": False, "paused": False, "oldest_due_at": None}
    assert queues["q"] == {"PENDING": 3, "FAILED": 1, **unknown, **others}
    assert queues["missing"] == {"PENDING": 0, "FAILED": 0, **unknown, **others}
    table = (await asyncio.to_thread(run, "q")).stdout.splitlines()
    assert table[1].split() == ["q", "3", "?", "?", "?", "1"]
    with_archive = await asyncio.to_thread(run, "q", "--json", "--option", f"archive={sqlite_url}")
    assert json.loads(with_archive.stdout)["queues"]["q"]["COMPLETED"] == 1
    refused = await asyncio.to_thread(run)
    assert "names of queues" in str(refused.exception)


def many_letters(count: int, size: int = 1) -> list[OutgoingMessage]:
    return [
        OutgoingMessage(
            Envelope(new_id(), b"x" * size, {}, Metadata(queue="q", created_us=n, failed_us=n, reason="r")),
            side_queue=DEAD,
        )
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize("bound", [("MOST_LETTERS", 30, 1), ("MOST_BYTES", 3000, 100)])
async def test_many_letters_are_read_within_bounds(
    transport: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bound: tuple[str, int, int]
) -> None:
    """A list has the oldest ones. A retry of the queue publishes all of them, also those that could not be listed"""
    name, limit, size = bound
    monkeypatch.setattr(dead_letters_module, name, limit)
    letters = many_letters(100, size)
    await transport.publisher.send(letters)
    oldest = [letter.envelope.id for letter in letters[:30]]
    control = Control(transport)
    assert [row.id for row in await control.messages("q", limit=1000)] == oldest[::-1]
    assert "the oldest 30 are read, 70 more wait" in caplog.text
    retried = await control.retry_queue("q")
    assert retried.published == list(dict.fromkeys(retried.published)) and len(retried.published) == 100
    async with asyncio.timeout(SOON):
        claims: list[Any] = []
        while len(claims) < 100:
            claims += await transport.claim(["q"], 100)
    assert {claim.receipt.id for claim in claims} == {replayed_id(each.envelope.id, "retry") for each in letters}
    assert await control.messages("q") == []


async def test_large_letters_behind_small_ones_are_read_within_bounds(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are known only when the letters have come. Those that are too many go back at once"""
    monkeypatch.setattr(dead_letters_module, "MOST_BYTES", 10_000)
    letters = [*many_letters(20), *many_letters(80, 2000)]
    await transport.publisher.send(letters)
    kept: list[int] = []
    receive = dead_letters_module.DeadLetters._receive

    async def measure(*arguments: Any) -> Any:
        page = await receive(*arguments)
        kept.append(sum(len(letter.row.payload) for letter in page.letters))
        return page

    monkeypatch.setattr(dead_letters_module.DeadLetters, "_receive", measure)
    control = Control(transport)
    rows = await control.messages("q", limit=1000)
    assert {row.id for row in rows} == {letter.envelope.id for letter in letters[:24]}
    assert len((await control.retry_queue("q")).published) == 100
    assert max(kept) <= 10_000 and len(kept) > 10


async def test_letters_that_cannot_be_put_back_stay_visible(transport: Any) -> None:
    """A copy is put back for a letter that the broker has made. An account may lack the right to publish it"""
    assert await Control(transport).messages("q") == []
    async with attacker(transport.url.raw) as attack:
        for _ in range(3):
            await attack.send(struct.pack(">H", 0), b"plain", queue=DEAD)
        await attack.flush()
    send = transport.publisher.send_each

    async def refuse(messages: Any) -> Any:
        return [AccessRefused("no right to write")] * len(messages)

    transport.publisher.send_each = refuse
    for _ in range(3):
        async with asyncio.timeout(SOON):
            while len(await Control(transport).messages("q")) < 3:
                pass
    transport.publisher.send_each = send
    async with asyncio.timeout(SOON):
        while len(await Control(transport).messages("q")) < 3:
            pass


async def test_a_letter_beyond_the_bounds_is_found_by_its_id(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters_module, "MOST_LETTERS", 30)
    letters = many_letters(100)
    await transport.publisher.send(letters)
    control = Control(transport)
    await control.messages("q")
    chosen = [letters[n].envelope.id for n in (5, 50, 99)]
    retried = await control.retry([*chosen, new_id()])
    assert set(retried.published) == {replayed_id(id_, "retry") for id_ in chosen} and len(retried.skipped) == 1
    await transport.close()  # puts back the letters that it has
    other: Any = await millpond.connect(transport.url.raw)
    monkeypatch.setattr(dead_letters_module, "MOST_LETTERS", 1000)
    rows = await Control(other).messages("q", limit=1000)
    assert {row.id for row in rows} == {letter.envelope.id for letter in letters} - set(chosen)
    await other.close()


async def test_letters_that_fail_again_are_retried_once(transport: Any) -> None:
    """A retry of a queue ends, although its messages fail as fast as they are published"""
    await reject(transport, b"1", "r")
    publish = transport.publisher.send_each

    async def fail_again(messages: Any) -> Any:
        errors = await publish(messages)
        for _ in messages:
            claim = await next_claim(transport)
            transport.publisher.send_each = publish
            await transport.settle([Reject(claim.receipt, "again")])
            transport.publisher.send_each = fail_again
        return errors

    transport.publisher.send_each = fail_again
    retried = await asyncio.wait_for(Control(transport).retry_queue("q"), SOON)
    assert len(retried.published) == 1
    transport.publisher.send_each = publish
    (row,) = await Control(transport).messages("q")
    assert row.reason == "again"


async def test_letters_with_one_id_are_all_retried(transport: Any) -> None:
    """Any publisher chooses the id; two messages of one id may both fail"""
    await transport.claim(["q"])
    async with attacker(transport.url.raw) as attack:
        for n in range(3):
            await attack.publish({}, b"%d" % n, message_id="order-7")
        await attack.flush()
    for _ in range(3):
        claim = await next_claim(transport)
        assert await transport.settle([Reject(claim.receipt, "r")]) == []
    retried = await asyncio.wait_for(Control(transport).retry_queue("q"), SOON)
    assert len(retried.published) == 3
    claims = [await next_claim(transport) for _ in range(3)]
    assert {claim.message.payload for claim in claims} == {b"0", b"1", b"2"}
    assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []
    assert await Control(transport).messages("q") == []


async def test_a_letter_without_an_id_is_retried(transport: Any) -> None:
    """A publisher wrote it as if Millpond had made it"""
    assert await Control(transport).messages("q") == []
    async with attacker(transport.url.raw) as attack:
        await attack.publish({"millpond": '{"queue":"q","failed_us":1,"reason":"forged"}'}, b"x", to=DEAD)
        await attack.flush()
    (row,) = await dead_letters(Control(transport))
    assert (await Control(transport).retry([row.id])).published == [replayed_id(row.id, "retry")]
    claim = await next_claim(transport)
    assert claim.message.payload == b"x"
    assert await transport.settle([Ack(claim.receipt)]) == []


@pytest.mark.slow
async def test_memory_does_not_grow_with_the_letters(transport: Any) -> None:
    """150 MiB of letters; half of the limit is measured beside the limit itself"""
    await transport.claim(["q"])
    for _ in range(3):
        await transport.publisher.send(many_letters(50, 1 << 20))
    tracemalloc.start()
    try:
        rows = await Control(transport).messages("q")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 10 < len(rows) <= 64 and peak < 1.5 * MOST_BYTES
