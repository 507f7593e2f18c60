"""Publish: messages arrive unchanged, all or none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest

from millpond import Ack, ManualClock, Message, MillpondError, Transport
from millpond.errors import BodyTooLarge
from millpond.message import BODY_LIMIT, DEFAULT_PRIORITY
from tests.conformance.messages import bodies, claim_one, message, publish


async def test_a_message_arrives_as_it_was_published(transport: Transport) -> None:
    sent = Message(
        queue="orders",
        payload=b'{"sku": 7}',
        key="customer-7",
        priority=10,
        headers={"trace": "x", "n": 7, "nested": {"list": [1, None, True, "ü"]}},
    )
    (published,) = await transport.publish([sent])
    claim = await claim_one(transport, "orders")
    received = claim.message
    assert (received.queue, received.payload, received.key, received.priority) == (
        sent.queue,
        sent.payload,
        sent.key,
        sent.priority,
    )
    assert received.headers == sent.headers
    assert received.id == claim.receipt.id == published.id
    assert (claim.deliveries, claim.attempts, claim.crashes, claim.redelivered) == (1, 0, 0, False)


async def test_defaults(transport: Transport, clock: ManualClock) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    assert claim.message.key is None
    assert claim.message.priority == DEFAULT_PRIORITY
    assert claim.message.headers == {}
    assert claim.created_us == claim.due_us == claim.claimed_us == clock.now()
    assert claim.expires_us is None and claim.first_attempt_us is None


async def test_generated_ids_are_uuid7_in_the_order_of_publishing(transport: Transport) -> None:
    published = await transport.publish([message() for _ in range(50)])
    ids = [p.id for p in published]
    assert all(isinstance(i, UUID) and i.version == 7 for i in ids)
    assert ids == sorted(ids) and len(set(ids)) == 50


async def test_nothing_to_publish_is_no_error(transport: Transport) -> None:
    assert await transport.publish([]) == []


@pytest.mark.parametrize("count", [1, 3, 499, 500])
async def test_batches_of_any_size_arrive_whole(transport: Transport, count: int) -> None:
    """From 500 messages or a mebibyte on PostgreSQL uses a bulk load."""
    await transport.publish([message(str(n).encode()) for n in range(count)])
    assert await bodies(transport, limit=count + 1) == [str(n).encode() for n in range(count)]


async def test_a_few_large_bodies_arrive_whole(transport: Transport) -> None:
    sent = [message(bytes([n]) * 400_000, key=f"k{n}", headers={"n": n}) for n in range(3)]
    await transport.publish(sent)
    received = [claim.message for claim in await transport.claim(["q"], limit=4)]
    assert [(m.payload, m.key, m.headers) for m in received] == [(m.payload, m.key, m.headers) for m in sent]


async def test_a_batch_goes_to_several_queues_with_a_setting_of_each_message(
    transport: Transport, clock: ManualClock
) -> None:
    await transport.publish(
        [message(b"1", "a"), message(b"2", "b", priority=7), message(b"3", "b", delay=5), message(b"4", "a", key="k")]
    )
    assert await bodies(transport, ["a"]) == [b"1", b"4"]
    assert await bodies(transport, ["b"]) == [b"2"]
    clock.advance(5)
    assert await bodies(transport, ["b"]) == [b"3"]


async def test_one_bad_message_and_nothing_is_published(transport: Transport) -> None:
    """One row of the batch cannot be stored."""
    with pytest.raises(BodyTooLarge):
        await transport.publish([message(), message(bytes(BODY_LIMIT + 1)), message()])
    with pytest.raises(MillpondError):
        await transport.publish([message(), message(queue="")])
    assert await transport.claim(["q"], 10) == []


async def test_many_zones_one_moment(transport: Transport, clock: ManualClock) -> None:
    due = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    await publish(transport, b"utc", due_at=due)
    await publish(transport, b"east", due_at=due.astimezone(timezone(timedelta(hours=5, minutes=30))))
    assert await bodies(transport) == []
    clock.advance(30)
    claims = await transport.claim(["q"], 10)
    assert [c.message.payload for c in claims] == [b"utc", b"east"]
    assert {c.due_at for c in claims} == {due}


async def test_another_handle_sees_it_at_once(transport: Transport, connect: object) -> None:
    """Two handles share their messages."""
    other = await connect()  # type: ignore[operator]
    await publish(transport)
    claim = await claim_one(other)
    assert await transport.claim(["q"]) == []
    assert await other.settle([Ack(claim.receipt)]) == []


async def test_payload_and_headers_do_not_change_with_the_callers_objects(transport: Transport) -> None:
    payload, headers = bytearray(b"before"), {"list": [1]}
    await publish(transport, payload, headers=headers)  # type: ignore[arg-type]
    payload[:] = b"after!"
    headers["list"].append(2)
    claim = await claim_one(transport)
    assert claim.message.payload == b"before"
    assert claim.message.headers == {"list": [1]}
