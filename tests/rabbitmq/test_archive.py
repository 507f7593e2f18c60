"""`archive=`: settled messages are recorded in a database before the ack, each once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pamqp.commands import Basic

import millpond
from millpond import Ack, Delivery, GiveBack, Message, Millpond, Nack, Reject, Retry, State
from millpond.bridge import Bridge
from millpond.codec import CONTENT_TYPE, TEXT
from millpond.control import Control
from millpond.errors import InvalidOption, StoreError, StoreUnavailable, Unsupported
from tests.rabbitmq.attacker import attacker
from tests.rabbitmq.conftest import SOON, dead_letters, next_claim
from tests.rooms.transactions.callers import aiosqlite_connection, asyncmy_connection, asyncpg_connection


@pytest.fixture
async def archive(archive_url: str) -> AsyncIterator[Any]:
    store = await millpond.connect(archive_url)
    yield store
    await store.close()


@pytest.fixture
async def archiving(rabbitmq_url: str, archive: Any) -> AsyncIterator[Any]:
    transport = await millpond.connect(rabbitmq_url, archive=archive.url.raw)
    yield transport
    await transport.close()


async def test_archive_rows_of_each_outcome(archiving: Any, archive: Any) -> None:
    kept = {"key": "k", "priority": 7, "headers": {"a": [1], "b": "x"}, "expires": 3600}
    bodies = [b"acked", b"rejected", b"nacked", b"given back", b"traceless", b"dropped"]
    sent = await archiving.publish([Message(queue="q", payload=body, **kept) for body in bodies])
    claims = await archiving.claim(["q"], 10)
    acked, rejected, nacked, given_back, traceless, dropped = (claim.receipt for claim in claims)
    outcomes = [
        Ack(acked),
        Reject(rejected, reason="no customer", error="ValueError: 7"),
        Nack(nacked, delay=60, error="later"),
        GiveBack(given_back),
        Ack(traceless, keep=False),
        Reject(dropped, keep=False),
    ]
    assert await archiving.settle(outcomes) == []
    rows = {row.payload: row for row in await archive.operations.archived("q")}
    assert set(rows) == {b"acked", b"rejected"}
    done, failed = rows[b"acked"], rows[b"rejected"]
    assert (done.id, done.state, done.reason, done.error) == (sent[0].id, State.COMPLETED, None, None)
    assert (failed.id, failed.state, failed.reason, failed.error) == (
        sent[1].id,
        State.FAILED,
        "no customer",
        "ValueError: 7",
    )
    for row, claim in zip((done, failed), claims, strict=False):
        assert (row.key, row.priority, row.headers) == ("k", 7, {"a": [1], "b": "x"})
        assert (row.deliveries, row.attempts) == (1, 1)
        assert (row.created_us, row.due_us, row.expires_us) == (claim.created_us, claim.due_us, claim.expires_us)
        assert row.created_us <= claim.claimed_us == row.acquired_us == row.first_attempt_us <= row.last_attempt_us
        assert row.archived_us is not None
    # FAILED messages are in both places: in the archive for reports, in the dead letters for retries.
    assert [letter.id for letter in await dead_letters(Control(archiving))] == [failed.id]


async def test_archived_counters_cover_all_deliveries(archiving: Any, archive: Any) -> None:
    await archiving.publish([Message(queue="q", payload=b"")])
    first = await next_claim(archiving)
    await archiving.settle([Nack(first.receipt, error="once")])
    second = await next_claim(archiving)
    await archiving.settle([GiveBack(second.receipt, delivered=True)])
    third = await next_claim(archiving)
    await archiving.settle([Ack(third.receipt)])
    (row,) = await archive.operations.archived("q")
    assert (row.deliveries, row.attempts, row.error) == (3, 2, "once")
    assert (row.first_attempt_us, row.acquired_us) == (first.claimed_us, third.claimed_us)


async def test_messages_that_never_ran_are_recorded(archiving: Any, archive: Any) -> None:
    """Poison and unreadable messages"""
    await archiving.publish([Message(queue="q", payload=b"poison")])
    await archiving.settle([GiveBack((await next_claim(archiving)).receipt, delivered=True)])
    assert await archiving.claim(["q"], max_deliveries=1) == []
    channel = await archiving.publisher_pool.channel()
    await channel._underlay.basic_publish(
        b"bad", routing_key="q", properties=Basic.Properties(headers={"millpond": "{no json"})
    )
    async with asyncio.timeout(SOON):
        while len(rows := await archive.operations.archived("q")) < 2:
            await archiving.claim(["q"])
    assert {(row.payload, row.state, row.reason, row.attempts) for row in rows} == {
        (b"poison", State.FAILED, "max_deliveries", 0),
        (b"bad", State.FAILED, "undecodable", 0),
    }


async def test_a_redelivered_message_has_one_archive_row(archiving: Any, archive: Any) -> None:
    """The ack is lost with its channel, and the message is delivered again"""
    await archiving.publish([Message(queue="q", payload=b"")])
    claim = await next_claim(archiving)
    record, channel = archiving.archive.operations.record, archiving._consumers["q"]._channels[0]

    async def record_and_cut(rows: Any) -> None:
        await record(rows)
        await channel._underlay.close()

    archiving.archive.operations.record = record_and_cut
    assert await archiving.settle([Ack(claim.receipt)]) == [claim.receipt]
    archiving.archive.operations.record = record
    again = await next_claim(archiving)
    assert again.redelivered and again.receipt.id == claim.receipt.id
    assert await archiving.settle([Ack(again.receipt)]) == []
    (row,) = await archive.operations.archived("q")
    assert (row.state, row.deliveries) == (State.COMPLETED, 1)


async def test_killed_between_record_and_ack(archive: Any, rabbitmq_url: str) -> None:
    """kill -9 at the worst time: no message is lost or archived twice, and handlers see the redelivery"""
    transport = await millpond.connect(rabbitmq_url)
    text = {CONTENT_TYPE: TEXT}
    sent = await transport.publish([Message(queue="q", payload=b"%d" % n, headers=text) for n in range(20)])
    await transport.close()
    command = (sys.executable, "-m", "tests.rabbitmq.archiving_worker", rabbitmq_url, archive.url.raw, "20")
    killed = await asyncio.create_subprocess_exec(*command, "killed")
    await asyncio.wait_for(killed.wait(), SOON)
    assert killed.returncode == -signal.SIGKILL
    recorded = len(await archive.operations.archived("q"))
    assert recorded > 0
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), SOON)
    assert process.returncode == 0
    rows = await archive.operations.archived("q")
    assert sorted(row.id for row in rows) == sorted(p.id for p in sent)  # each once
    assert {row.state for row in rows} == {State.COMPLETED}
    deliveries = [int(line) for line in output.split()]
    assert len(deliveries) == 20 and sum(n > 1 for n in deliveries) >= recorded


async def test_no_ack_while_the_archive_is_away(archiving: Any, archive: Any) -> None:
    """A message that cannot be recorded stays held, and the same receipt settles it later"""
    await archiving.publish([Message(queue="q", payload=b"1"), Message(queue="q", payload=b"2")])
    claims = await archiving.claim(["q"], 2)
    record = archiving.archive.operations.record

    async def away(rows: Any) -> int:
        assert await archiving.extend([claim.receipt for claim in claims]) == []  # as a heartbeat does meanwhile
        raise StoreUnavailable("the archive is away")

    archiving.archive.operations.record = away
    outcomes = [Ack(claims[0].receipt), Reject(claims[1].receipt)]
    with pytest.raises(StoreUnavailable):
        await archiving.settle(outcomes)
    assert await archive.operations.archived("q") == []
    assert await Control(archiving).messages("q") == []  # no dead letter either
    archiving.archive.operations.record = record
    assert await archiving.settle(outcomes) == []
    assert len(await archive.operations.archived("q")) == 2


async def test_a_body_that_the_archive_cannot_take_is_left_out(archiving: Any, archive: Any) -> None:
    """MariaDB would end the connection, as if it were away. 9 MiB of NUL double in a statement"""
    large = bytes(9 << 20)
    await archiving.claim(["q"])
    async with attacker(archiving.url.raw) as attack:
        await attack.publish({"a": 1}, large, message_id="large")
        await attack.publish({"millpond": "{no json"}, large)
        await attack.publish({"a": 1}, b"small")
        await attack.flush()
    for _ in range(2):
        claim = await next_claim(archiving)
        assert await archiving.settle([Ack(claim.receipt)]) == []
    async with asyncio.timeout(SOON):
        while len(rows := await archive.operations.archived("q")) < 3:
            await archiving.claim(["q"])
    assert Counter(row.state for row in rows) == {State.COMPLETED: 2, State.FAILED: 1}
    bodies = Counter(len(row.payload) for row in rows)
    if archive.url.scheme in ("mysql", "mariadb"):
        assert bodies == {0: 2, 5: 1}
        (row,) = [row for row in rows if row.state is State.COMPLETED and not row.payload]
        assert row.headers == {"a": 1} and "its body of 9,437,184 bytes was not archived" in (row.error or "")
    else:
        assert bodies == {len(large): 2, 5: 1}


async def test_a_claim_is_repeated_after_the_archive_was_away(archiving: Any) -> None:
    await archiving.publish([Message(queue="q", payload=b"old", expires=0.001), Message(queue="q", payload=b"good")])
    record = archiving.archive.operations.record

    async def away(rows: Any) -> int:
        raise StoreUnavailable("the archive is away")

    archiving.archive.operations.record = away
    with pytest.raises(StoreUnavailable):
        await archiving.claim(["q"], 10)
    archiving.archive.operations.record = record
    (claim,) = await archiving.claim(["q"], 10)
    assert (claim.message.payload, claim.deliveries) == (b"good", 1)


async def test_a_worker_continues_when_its_archive_is_back(rabbitmq_url: str, archive: Any) -> None:
    pond = Millpond(rabbitmq_url, archive=archive.url.raw)
    runs: list[str] = []

    @pond.subscriber("q", max_workers=4, retry=Retry(attempts=2, initial=0.1))
    async def handle(body: str) -> None:
        runs.append(body)
        if body == "7":
            raise ValueError("never")

    await pond.publish_many("q", [str(n) for n in range(10)])
    transport: Any = await pond.transport
    inner = transport._inner.archive
    record, failures = inner.operations.record, 0

    async def away_twice(rows: Any) -> int:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise StoreUnavailable("the archive is away")
        count: int = await record(rows)
        return count

    inner.operations.record = away_twice
    work = asyncio.create_task(pond.run())
    async with asyncio.timeout(SOON):
        while len(rows := await archive.operations.archived("q")) < 10:  # noqa: ASYNC110 - it comes from the broker
            await asyncio.sleep(0.02)
    pond.stop()
    await work
    await pond.close()
    assert failures == 2
    assert sorted(runs) == sorted([*map(str, range(10)), "7"])  # no handler ran again because of the archive
    assert [row.payload for row in rows if row.state is State.FAILED] == [b"7"]


async def test_the_outbox_may_be_the_archive_too(archiving: Any, archive: Any) -> None:
    """The bridge and the consumer each record one row"""
    (sent,) = await archive.publish([Message(queue="q", payload=b"x")])
    assert await Bridge(archive, archiving, ["q"]).drain() == 1
    claim = await next_claim(archiving)
    await archiving.settle([Reject(claim.receipt, reason="no")])
    assert [(row.id, row.state) for row in await archive.operations.archived("q")] == [
        (sent.id, State.FAILED),
        (sent.id, State.COMPLETED),
    ]


CALLERS = {"sqlite": aiosqlite_connection, "postgresql": asyncpg_connection, "mysql": asyncmy_connection}


async def test_once_lets_an_effect_happen_once_in_the_archives_database(rabbitmq_url: str, archive: Any) -> None:
    """The first run fails after its commit"""
    pond = Millpond(rabbitmq_url, archive=archive.url.raw)
    first = []

    @pond.subscriber("q", retry=Retry.constant(0, attempts=3))
    async def handle(body: int, delivery: Delivery) -> None:
        async with CALLERS[archive.url.scheme](archive.url.raw) as caller:
            first.append(await delivery.once("effect", within=caller.within))
            await caller.commit()
        if len(first) < 3:
            raise ValueError("a crash after the effect, before the ack")
        pond.stop()

    await pond.publish("q", 1)
    await asyncio.wait_for(pond.run(), SOON)
    await pond.close()
    assert first == [True, False, False]
    (row,) = await archive.operations.archived("q")
    assert row.state is State.COMPLETED


async def test_publish_and_settle_are_never_part_of_a_transaction(rabbitmq_url: str, sqlite_url: str) -> None:
    store = await millpond.connect(sqlite_url, migrate=True)
    await store.close()
    for options in ({}, {"archive": sqlite_url}):
        transport: Any = await millpond.connect(rabbitmq_url, **options)
        await transport.publish([Message(queue="q", payload=b"x")])
        outcomes = [Ack((await next_claim(transport)).receipt)]
        for refused in (
            lambda t=transport: t.transactions.publish_sync([Message(queue="q", payload=b"x")], within=object()),
            lambda t=transport, o=outcomes: t.transactions.settle_sync(o, within=object()),
        ):
            with pytest.raises(Unsupported, match="TRANSACTIONS"):
                refused()
        with pytest.raises(Unsupported, match="TRANSACTIONS"):
            await transport.publish([Message(queue="q", payload=b"x")], within=object())
        with pytest.raises(Unsupported, match="TRANSACTIONS"):
            await transport.settle(outcomes, within=object())
        assert await transport.settle(outcomes) == []
        await transport.close()


async def test_wrong_archives(rabbitmq_url: str, sqlite_url: str) -> None:
    with pytest.raises(InvalidOption, match="archive"):
        await millpond.connect(rabbitmq_url, archive=rabbitmq_url)
    with pytest.raises(StoreError) as failed:
        await millpond.connect(rabbitmq_url, archive="postgresql://me:hidden-word@127.0.0.1:1/none")
    assert "hidden-word" not in str(failed.value)
    with pytest.raises(InvalidOption, match="archive_options: unknown option 'schem'; the nearest one is 'schema'"):
        await millpond.connect(rabbitmq_url, archive=sqlite_url, archive_options={"schem": "x"})
    with pytest.raises(InvalidOption, match="archive_options"):
        await millpond.connect(rabbitmq_url, archive_options={"schema": "x"})
    with pytest.raises(InvalidOption, match="archive_options"):
        await millpond.connect(rabbitmq_url, archive=sqlite_url, archive_options="schema=x")
    transport: Any = await millpond.connect(rabbitmq_url, archive=sqlite_url)
    assert "hidden" not in repr(transport.options)
    await transport.close()


async def test_an_archive_with_options(rabbitmq_url: str, sqlite_url: str) -> None:
    options = {"table_prefix": "mp_", "migrate": True}
    transport: Any = await millpond.connect(rabbitmq_url, archive=sqlite_url, archive_options=options)
    (sent,) = await transport.publish([Message(queue="q", payload=b"")])
    await transport.settle([Ack((await next_claim(transport)).receipt)])
    await transport.close()
    archive: Any = await millpond.connect(sqlite_url, table_prefix="mp_")
    assert [row.id for row in await archive.operations.archived("q")] == [sent.id]
    await archive.close()
