"""Unique messages: at most one with a value waits, is unfinished, or comes within a time; the result shows which."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from millpond import Ack, Capability, ManualClock, Nack, Published, Transport, Unique
from millpond.errors import InvalidMessage, InvalidQueue, InvalidTime
from tests.conformance.backends import requires
from tests.conformance.conftest import Connect
from tests.conformance.messages import bodies, claim_one, message

pytestmark = requires(Capability.UNIQUE)


async def publish(transport: Transport, body: bytes = b"1", value: str = "v", **options: Any) -> Published:
    names = ("while_", "on_conflict")
    unique = Unique(value, **{name: options.pop(name) for name in names if name in options})
    (published,) = await transport.publish([message(body, unique=unique, **options)])
    return published


async def test_the_waiting_message_is_kept_and_the_caller_learns_its_id(transport: Transport) -> None:
    first = await publish(transport, b"first")
    assert (first.new, first.result) == (True, "published")
    assert await publish(transport, b"second") == Published(first.id, False, "kept")
    assert await bodies(transport) == [b"first"]


async def test_values_and_queues_are_apart(transport: Transport) -> None:
    results = [
        await publish(transport, value="a"),
        await publish(transport, value="A"),
        await publish(transport, value="a", queue="other"),
        await publish(transport, value="", queue="q"),
    ]
    assert all(one.new for one in results)


async def test_a_running_message_is_no_longer_waiting_and_still_unfinished(transport: Transport) -> None:
    first = await publish(transport)
    claim = await claim_one(transport)
    assert await publish(transport, while_="unfinished") == Published(first.id, False, "kept")
    second = await publish(transport, b"2")
    assert second.new and second.id != first.id
    await transport.settle([Ack(claim.receipt)])
    assert (await publish(transport, while_="unfinished")).id == second.id


@pytest.mark.parametrize("while_", ["waiting", "unfinished"])
async def test_the_value_is_free_when_the_message_is_finished(transport: Transport, while_: str) -> None:
    first = await publish(transport, while_=while_)
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt, delay=60)])
    assert (await publish(transport, while_=while_)).id == first.id
    await transport.operations.cancel([first.id])
    assert (await publish(transport, while_=while_)).new


async def test_a_window_counts_from_the_publish_whatever_became_of_the_message(
    transport: Transport, clock: ManualClock
) -> None:
    hour = timedelta(hours=1)
    first = await publish(transport, while_=hour)
    await transport.settle([Ack((await claim_one(transport)).receipt)])
    clock.advance(3599)
    for choice in ("keep", "replace", "postpone"):
        assert await publish(transport, while_=hour, on_conflict=choice) == Published(first.id, False, "kept")
    clock.advance(1)
    assert (await publish(transport, while_=hour)).new


@pytest.mark.parametrize("while_", ["waiting", "unfinished"])
@pytest.mark.parametrize("choice", ["keep", "replace", "postpone", "raise"])
async def test_an_expired_message_has_no_value(
    transport: Transport, clock: ManualClock, while_: str, choice: str
) -> None:
    await publish(transport, b"old", delay=100, expires=60)
    clock.advance(60)
    assert (await publish(transport, b"new", while_=while_, on_conflict=choice)).result == "published"
    assert await bodies(transport) == [b"new"]


async def test_a_postponed_message_has_the_new_expiry(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, b"first", delay=10, expires=15)
    clock.advance(8)
    assert (await publish(transport, delay=10, expires=15, on_conflict="postpone")).result == "postponed"
    clock.advance(10)
    assert (await claim_one(transport)).message.payload == b"first"


@pytest.mark.parametrize("while_", ["waiting", 10])
@pytest.mark.parametrize("archived", [False, True])
async def test_a_window_counts_messages_of_another_rule(
    transport: Transport, clock: ManualClock, while_: Any, archived: bool
) -> None:
    first = await publish(transport, while_=while_)
    if archived:
        await transport.settle([Ack((await claim_one(transport)).receipt)])
    clock.advance(59)
    assert (await publish(transport, while_=60)) == Published(first.id, False, "kept")
    clock.advance(1)
    assert (await publish(transport, while_=60)).new


async def test_replace_changes_body_priority_and_due_time(transport: Transport, clock: ManualClock) -> None:
    key = "b" if Capability.UNIQUE_IDS in transport.capabilities else "a"  # over shards a value belongs to a key
    first = await publish(transport, b"old", priority=50, key="a", headers={"n": 1})
    replaced = await publish(transport, b"new", priority=10, key=key, headers={"n": 2}, delay=30, on_conflict="replace")
    assert replaced == Published(first.id, False, "replaced")
    assert await transport.claim(["q"]) == []
    clock.advance(30)
    claim = await claim_one(transport)
    assert (claim.receipt.id, claim.message.payload, claim.message.priority) == (first.id, b"new", 10)
    assert (claim.message.key, claim.message.headers) == (key, {"n": 2})
    kept = await publish(transport, b"newer", key=key, while_="unfinished", on_conflict="replace")
    assert kept == Published(first.id, False, "kept")  # it runs: its body stays


async def test_a_replaced_message_has_all_attempts_again(transport: Transport) -> None:
    """A postponed one keeps its own."""
    first = await publish(transport, b"old")
    for attempts in (1, 2):
        await transport.settle([Nack((await claim_one(transport)).receipt, delay=0, error="wrong sku")])
        (row,) = await transport.operations.find([first.id])
        assert (row.state, row.attempts) == ("RETRYABLE", attempts)
    await publish(transport, b"late", on_conflict="postpone")
    (row,) = await transport.operations.find([first.id])
    assert (row.state, row.attempts, row.payload) == ("RETRYABLE", 2, b"old")
    await publish(transport, b"new", on_conflict="replace")
    (row,) = await transport.operations.find([first.id])
    assert (row.state, row.attempts, row.error, row.first_attempt_at) == ("PENDING", 0, None, None)
    claim = await claim_one(transport)
    assert (claim.attempts, claim.message.payload) == (0, b"new")


async def test_a_replaced_message_may_become_due_earlier(transport: Transport) -> None:
    await publish(transport, b"late", delay=3600)
    assert await transport.claim(["q"]) == []
    await publish(transport, b"now", on_conflict="replace")
    assert (await claim_one(transport)).message.payload == b"now"


async def test_postpone_debounces(transport: Transport, clock: ManualClock) -> None:
    first = await publish(transport, b"first", delay=10)
    for _ in range(3):
        clock.advance(8)
        postponed = await publish(transport, b"later", delay=10, on_conflict="postpone")
        assert postponed == Published(first.id, False, "postponed")
        assert await transport.claim(["q"]) == []
    clock.advance(10)
    assert (await claim_one(transport)).message.payload == b"first"


async def test_a_refused_message_changes_nothing(transport: Transport) -> None:
    first = await publish(transport, b"first")
    assert await publish(transport, b"second", on_conflict="raise") == Published(first.id, False, "refused")
    assert await bodies(transport) == [b"first"]


async def test_twice_in_one_call_and_beside_others(transport: Transport) -> None:
    unique = Unique("v")
    published = await transport.publish([message(b"1", unique=unique), message(b"2"), message(b"3", unique=unique)])
    assert [p.new for p in published] == [True, True, False]
    assert published[2].id == published[0].id
    assert sorted(await bodies(transport)) == [b"1", b"2"]


async def test_concurrent_publishers_publish_one(connect: Connect) -> None:
    handles = [await connect() for _ in range(4)]
    results = await asyncio.gather(*(publish(handles[n % 4], b"%d" % n) for n in range(40)))
    assert sum(one.new for one in results) == 1
    assert len({one.id for one in results}) == 1
    assert len(await bodies(handles[0])) == 1


async def test_purge_forgets_values_that_are_free(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, value="waits")
    await publish(transport, value="window", while_=60)
    done = await publish(transport, value="done")
    await transport.operations.cancel([done.id])
    await transport.operations.purge()
    assert not (await publish(transport, value="waits")).new
    assert not (await publish(transport, value="window", while_=60)).new
    assert (await publish(transport, value="done")).new


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"value": "x" * 256}, InvalidQueue),
        ({"value": "a\0"}, InvalidQueue),
        ({"value": 7}, InvalidQueue),
        ({"while_": "forever"}, InvalidMessage),
        ({"while_": -1}, InvalidTime),
        ({"on_conflict": "ignore"}, InvalidMessage),
    ],
)
async def test_wrong_values_are_refused(transport: Transport, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await publish(transport, **wrong)
    with pytest.raises(InvalidMessage, match="either id or unique"):
        await transport.publish([message(unique=Unique("v"), id=(await publish(transport)).id)])
