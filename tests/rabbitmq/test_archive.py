"""`archive=`: settled messages are recorded in a database, before the broker hears of it, and each once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pamqp.commands import Basic

import millpond
from millpond import Ack, GiveBack, Message, Millpond, Nack, Reject, Retry, State
from millpond.bridge import Bridge
from millpond.codec import CONTENT_TYPE, TEXT
from millpond.control import Control
from millpond.errors import InvalidOption, StoreError, StoreUnavailable
from tests.rabbitmq.conftest import SOON, arrival, dead_letters
from tests.shared import KINDS, empty_database


@pytest.fixture(params=KINDS)
def archive_url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


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


async def test_each_outcome_leaves_what_it_leaves_in_a_database(archiving: Any, archive: Any) -> None:
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
    rows = {row.payload: row for row in await archive.archived("q")}
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
    # What failed is in both places: there for the reports, here for whoever retries it.
    assert [letter.id for letter in await dead_letters(Control(archiving))] == [failed.id]


async def test_counters_are_those_of_the_whole_life(archiving: Any, archive: Any) -> None:
    await archiving.publish([Message(queue="q", payload=b"")])
    first = await arrival(archiving)
    await archiving.settle([Nack(first.receipt, error="once")])
    second = await arrival(archiving)
    await archiving.settle([GiveBack(second.receipt, delivered=True)])
    third = await arrival(archiving)
    await archiving.settle([Ack(third.receipt)])
    (row,) = await archive.archived("q")
    assert (row.deliveries, row.attempts, row.error) == (3, 2, "once")
    assert (row.first_attempt_us, row.acquired_us) == (first.claimed_us, third.claimed_us)


async def test_what_never_ran_is_recorded_too(archiving: Any, archive: Any) -> None:
    """Poison, and what nobody can read"""
    await archiving.publish([Message(queue="q", payload=b"poison")])
    await archiving.settle([GiveBack((await arrival(archiving)).receipt, delivered=True)])
    assert await archiving.claim(["q"], max_crashes=1) == []
    channel = await archiving.publishing.channel()
    await channel._underlay.basic_publish(
        b"bad", routing_key="q", properties=Basic.Properties(headers={"millpond": "{no json"})
    )
    async with asyncio.timeout(SOON):
        while len(rows := await archive.archived("q")) < 2:
            await archiving.claim(["q"])
    assert {(row.payload, row.state, row.reason, row.attempts) for row in rows} == {
        (b"poison", State.FAILED, "max_crashes", 0),
        (b"bad", State.FAILED, "undecodable", 0),
    }


async def test_a_repeat_is_not_doubled(archiving: Any, archive: Any) -> None:
    """The ack is lost with its channel: the message comes again, and its archive has one row"""
    await archiving.publish([Message(queue="q", payload=b"")])
    claim = await arrival(archiving)
    record, channel = archiving.archive.record, archiving._sources["q"]._channels[0]

    async def record_and_cut(rows: Any) -> None:
        await record(rows)
        await channel._underlay.close()

    archiving.archive.record = record_and_cut
    assert await archiving.settle([Ack(claim.receipt)]) == [claim.receipt]
    archiving.archive.record = record
    again = await arrival(archiving)
    assert again.redelivered and again.receipt.id == claim.receipt.id
    assert await archiving.settle([Ack(again.receipt)]) == []
    (row,) = await archive.archived("q")
    assert (row.state, row.deliveries) == (State.COMPLETED, 1)


async def test_killed_between_record_and_ack(archive: Any, rabbitmq_url: str) -> None:
    """kill -9 at the worst moment: nothing is lost, nothing is doubled in the archive, and handlers are told"""
    transport = await millpond.connect(rabbitmq_url)
    text = {CONTENT_TYPE: TEXT}
    sent = await transport.publish([Message(queue="q", payload=b"%d" % n, headers=text) for n in range(20)])
    await transport.close()
    command = (sys.executable, "-m", "tests.rabbitmq.archiving_worker", rabbitmq_url, archive.url.raw, "20")
    killed = await asyncio.create_subprocess_exec(*command, "killed")
    await asyncio.wait_for(killed.wait(), SOON)
    assert killed.returncode == -signal.SIGKILL
    recorded = len(await archive.archived("q"))
    assert recorded > 0
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), SOON)
    assert process.returncode == 0
    rows = await archive.archived("q")
    assert sorted(row.id for row in rows) == sorted(p.id for p in sent)  # each once
    assert {row.state for row in rows} == {State.COMPLETED}
    deliveries = [int(line) for line in output.split()]
    assert len(deliveries) == 20 and sum(n > 1 for n in deliveries) >= recorded


async def test_an_archive_that_is_away_holds_acks_back(archiving: Any, archive: Any) -> None:
    """Nothing is acked that is not recorded; what waits stays held, and is settled later by the same receipt"""
    await archiving.publish([Message(queue="q", payload=b"1"), Message(queue="q", payload=b"2")])
    claims = await archiving.claim(["q"], 2)
    record = archiving.archive.record

    async def away(rows: Any) -> int:
        assert await archiving.extend([claim.receipt for claim in claims]) == []  # by a heartbeat, meanwhile
        raise StoreUnavailable("the archive is away")

    archiving.archive.record = away
    outcomes = [Ack(claims[0].receipt), Reject(claims[1].receipt)]
    with pytest.raises(StoreUnavailable):
        await archiving.settle(outcomes)
    assert await archive.archived("q") == []
    assert await Control(archiving).messages("q") == []  # no dead letter either
    archiving.archive.record = record
    assert await archiving.settle(outcomes) == []
    assert len(await archive.archived("q")) == 2


async def test_claims_that_met_an_archive_that_was_away_are_made_again(archiving: Any) -> None:
    await archiving.publish([Message(queue="q", payload=b"old", expires=0.001), Message(queue="q", payload=b"good")])
    record = archiving.archive.record

    async def away(rows: Any) -> int:
        raise StoreUnavailable("the archive is away")

    archiving.archive.record = away
    with pytest.raises(StoreUnavailable):
        await archiving.claim(["q"], 10)
    archiving.archive.record = record
    (claim,) = await archiving.claim(["q"], 10)
    assert (claim.message.payload, claim.deliveries) == (b"good", 1)


async def test_a_worker_goes_on_when_its_archive_is_back(rabbitmq_url: str, archive: Any) -> None:
    pond = Millpond(rabbitmq_url, archive=archive.url.raw)
    runs: list[str] = []

    @pond.subscriber("q", max_workers=4, retry=Retry(attempts=2, initial=0.1))
    async def handle(body: str) -> None:
        runs.append(body)
        if body == "7":
            raise ValueError("never")

    await pond.publish_many("q", [str(n) for n in range(10)])
    transport: Any = await pond.transport
    inner = transport.archive
    record, failures = inner.record, 0

    async def away_twice(rows: Any) -> int:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise StoreUnavailable("the archive is away")
        count: int = await record(rows)
        return count

    inner.record = away_twice
    work = asyncio.create_task(pond.run())
    async with asyncio.timeout(SOON):
        while len(rows := await archive.archived("q")) < 10:  # noqa: ASYNC110 - it comes from the broker
            await asyncio.sleep(0.02)
    pond.stop()
    await work
    await pond.close()
    assert failures == 2
    assert sorted(runs) == sorted([*map(str, range(10)), "7"])  # no run was repeated for the archive's sake
    assert [row.payload for row in rows if row.state is State.FAILED] == [b"7"]


async def test_the_outbox_may_be_the_archive_too(archiving: Any, archive: Any) -> None:
    """A bridge leaves a trace of its own there, which is not what became of the message"""
    (sent,) = await archive.publish([Message(queue="q", payload=b"x")])
    assert await Bridge(archive, archiving, ["q"]).drain() == 1
    claim = await arrival(archiving)
    await archiving.settle([Reject(claim.receipt, reason="no")])
    assert [(row.id, row.state) for row in await archive.archived("q")] == [
        (sent.id, State.FAILED),
        (sent.id, State.COMPLETED),
    ]


async def test_what_is_no_archive(rabbitmq_url: str, sqlite_url: str) -> None:
    with pytest.raises(InvalidOption, match="archive"):
        await millpond.connect(rabbitmq_url, archive=rabbitmq_url)
    with pytest.raises(StoreError) as failed:
        await millpond.connect(rabbitmq_url, archive="postgresql://me:hidden-word@127.0.0.1:1/none")
    assert "hidden-word" not in str(failed.value)
    with pytest.raises(InvalidOption, match="archive_options: unknown option 'schem'; did you mean 'schema'"):
        await millpond.connect(rabbitmq_url, archive=sqlite_url, archive_options={"schem": "x"})
    with pytest.raises(InvalidOption, match="archive_options"):
        await millpond.connect(rabbitmq_url, archive_options={"schema": "x"})
    with pytest.raises(InvalidOption, match="archive_options"):
        await millpond.connect(rabbitmq_url, archive=sqlite_url, archive_options="schema=x")
    transport: Any = await millpond.connect(rabbitmq_url, archive=sqlite_url)
    assert "hidden" not in repr(transport.options)
    await transport.close()


async def test_an_archive_with_options_of_its_own(rabbitmq_url: str, sqlite_url: str) -> None:
    options = {"table_prefix": "mp_", "migrate": True}
    transport: Any = await millpond.connect(rabbitmq_url, archive=sqlite_url, archive_options=options)
    (sent,) = await transport.publish([Message(queue="q", payload=b"")])
    await transport.settle([Ack((await arrival(transport)).receipt)])
    await transport.close()
    archive: Any = await millpond.connect(sqlite_url, table_prefix="mp_")
    assert [row.id for row in await archive.archived("q")] == [sent.id]
    await archive.close()
