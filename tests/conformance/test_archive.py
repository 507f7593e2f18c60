"""Archive: settled messages with state, counters, times, reason and error."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millpond import Ack, Capability, GiveBack, ManualClock, Nack, Reject, Row, State, Transport
from millpond.errors import InvalidOption
from millpond.message import new_id
from tests.conformance.backends import requires
from tests.conformance.conftest import Connect
from tests.conformance.messages import claim_one, counts, message, publish, row

pytestmark = requires(Capability.ARCHIVE | Capability.BROWSE)

SECOND = 1_000_000


async def test_success_leaves_one_completed_row(transport: Transport, clock: ManualClock) -> None:
    """Counters 1/1, created < first = acquired <= last <= archived; the queue is empty."""
    start = clock.now()
    id_ = await publish(transport, b"body", key="k", priority=3, headers={"a": [1]}, expires=3600)
    clock.advance(1)
    claim = await claim_one(transport)
    clock.advance(2)
    await transport.settle([Ack(claim.receipt)])
    assert await row(transport, id_) == Row(
        id=id_,
        queue="q",
        key="k",
        priority=3,
        state=State.COMPLETED,
        headers={"a": [1]},
        payload=b"body",
        deliveries=1,
        attempts=1,
        due_us=start,
        created_us=start,
        expires_us=start + 3600 * SECOND,
        first_attempt_us=start + 1 * SECOND,
        last_attempt_us=start + 3 * SECOND,
        acquired_us=start + 1 * SECOND,
        archived_us=start + 3 * SECOND,
    )
    assert await counts(transport) == {State.COMPLETED: 1}
    assert await transport.operations.browse("q") == []


async def test_nothing_is_archived_by_request(transport: Transport) -> None:
    """`keep=False`."""
    await transport.publish([message(b"1"), message(b"2")])
    one, two = await transport.claim(["q"], 2)
    assert await transport.settle([Ack(one.receipt, keep=False), Reject(two.receipt, keep=False)]) == []
    assert await counts(transport) == {}
    assert await transport.operations.find([one.receipt.id, two.receipt.id]) == []


async def test_a_retry_is_visible(transport: Transport, clock: ManualClock) -> None:
    """RETRYABLE, 1/1, due after the delay, lease cleared, archive empty."""
    start = clock.now()
    id_ = await publish(transport)
    claim = await claim_one(transport)
    clock.advance(1)
    await transport.settle([Nack(claim.receipt, delay=10, error="ValueError: no")])
    waiting = await row(transport, id_)
    assert (waiting.state, waiting.deliveries, waiting.attempts) == (State.RETRYABLE, 1, 1)
    assert waiting.due_us == start + 11 * SECOND
    assert waiting.lease_us is None and waiting.archived_us is None
    assert (waiting.first_attempt_us, waiting.last_attempt_us) == (start, start + 1 * SECOND)
    assert waiting.error == "ValueError: no"
    assert await transport.operations.archived("q") == []


async def test_a_claimed_message_is_visible(transport: Transport, clock: ManualClock) -> None:
    """After a crash: PROCESSING, attempts 0, deliveries 1."""
    start = clock.now()
    id_ = await publish(transport)
    await claim_one(transport, lease=30)
    held = await row(transport, id_)
    assert (held.state, held.deliveries, held.attempts) == (State.PROCESSING, 1, 0)
    assert (held.acquired_us, held.lease_us) == (start, start + 30 * SECOND)
    assert held.first_attempt_us is None and held.last_attempt_us is None


async def test_a_message_given_back_is_as_before(transport: Transport, clock: ManualClock) -> None:
    """PENDING, delivery not counted, lease cleared."""
    id_ = await publish(transport)
    before = await row(transport, id_)
    claim = await claim_one(transport)
    clock.advance(1)
    await transport.settle([GiveBack(claim.receipt)])
    after = await row(transport, id_)
    assert (after.state, after.deliveries, after.attempts) == (State.PENDING, 0, 0)
    assert (after.due_us, after.lease_us, after.first_attempt_us) == (before.due_us, None, None)


async def test_a_rejected_message_is_kept_with_its_reason(transport: Transport, clock: ManualClock) -> None:
    """Dead-lettered and kept."""
    id_ = await publish(transport, b"body")
    claim = await claim_one(transport)
    await transport.settle([Reject(claim.receipt, reason="bad address", error="ValueError: no such street")])
    failed = await row(transport, id_)
    assert (failed.state, failed.payload) == (State.FAILED, b"body")
    assert (failed.reason, failed.error) == ("bad address", "ValueError: no such street")
    assert (failed.deliveries, failed.attempts) == (1, 1)


async def test_a_reject_without_an_attempt_counts_none(transport: Transport) -> None:
    id_ = await publish(transport)
    claim = await claim_one(transport)
    await transport.settle([Reject(claim.receipt, reason="unreadable", attempted=False)])
    failed = await row(transport, id_)
    assert (failed.deliveries, failed.attempts, failed.first_attempt_us, failed.last_attempt_us) == (1, 0, None, None)


@pytest.mark.parametrize(("last", "error"), [(None, "second"), ("third", "third")])
async def test_the_last_error_survives(transport: Transport, last: str | None, error: str) -> None:
    id_ = await publish(transport)
    for text in ("first", "second"):
        claim = await claim_one(transport)
        await transport.settle([Nack(claim.receipt, error=text)])
    claim = await claim_one(transport)
    await transport.settle([Reject(claim.receipt, error=last)])
    assert (await row(transport, id_)).error == error


async def test_first_and_last_attempt_over_several(transport: Transport, clock: ManualClock) -> None:
    start = clock.now()
    id_ = await publish(transport)
    for _ in range(3):
        claim = await claim_one(transport)
        clock.advance(1)
        await transport.settle([Nack(claim.receipt, delay=1)])
        clock.advance(1)
    assert (await claim_one(transport)).first_attempt_us == start
    waiting = await row(transport, id_)
    assert (waiting.first_attempt_us, waiting.last_attempt_us) == (start, start + 5 * SECOND)


async def test_a_crash_between_is_no_attempt(transport: Transport, clock: ManualClock) -> None:
    start = clock.now()
    id_ = await publish(transport)
    await claim_one(transport, lease=1)
    clock.advance(1)
    claim = await claim_one(transport)
    clock.advance(1)
    await transport.settle([Ack(claim.receipt)])
    done = await row(transport, id_)
    assert (done.deliveries, done.attempts) == (2, 1)
    assert (done.first_attempt_us, done.last_attempt_us) == (start + 1 * SECOND, start + 2 * SECOND)


async def test_settling_twice_leaves_one_row(transport: Transport) -> None:
    id_ = await publish(transport)
    claim = await claim_one(transport)
    for _ in range(3):
        assert await transport.settle([Ack(claim.receipt)]) == []
    assert len(await transport.operations.find([id_])) == 1


async def test_states_are_counted_per_queue(transport: Transport, clock: ManualClock) -> None:
    await transport.publish([message(b"") for _ in range(15)])
    await transport.publish([message(b"", "other") for _ in range(2)])
    claims = await transport.claim(["q"], 10)
    await transport.settle(
        [
            *(Ack(c.receipt) for c in claims[:4]),
            *(Reject(c.receipt) for c in claims[4:7]),
            *(Nack(c.receipt, delay=60) for c in claims[7:9]),
        ]
    )
    assert await counts(transport) == {
        State.PENDING: 5,
        State.PROCESSING: 1,
        State.RETRYABLE: 2,
        State.COMPLETED: 4,
        State.FAILED: 3,
    }
    assert await counts(transport, "other") == {State.PENDING: 2}


# --- record: messages that another transport settled ------------------------------------------------------


def settled(id_: UUID, state: State = State.COMPLETED, **fields: Any) -> Row:
    return Row(
        **{
            **{"id": id_, "queue": "q", "key": "k", "priority": 3, "state": state, "headers": {"a": [1]}},
            **{"payload": b"body", "deliveries": 3, "attempts": 2, "due_us": 5, "created_us": 4, "expires_us": 99},
            **{"first_attempt_us": 6, "last_attempt_us": 8, "acquired_us": 7, "reason": "why", "error": "e"},
            **fields,
        }
    )


async def test_a_recorded_message_is_archived_as_the_row_tells(transport: Transport, clock: ManualClock) -> None:
    rows = [settled(new_id()), settled(new_id(), State.FAILED, key=None, headers={}, expires_us=None, error="\0")]
    assert await transport.operations.record(rows) == 2
    at = clock.now()
    expected = [msgspec.structs.replace(r, archived_us=at, error="e" if r.error == "e" else "�") for r in rows]
    assert await transport.operations.find([r.id for r in rows]) == expected
    assert await counts(transport) == {State.COMPLETED: 1, State.FAILED: 1}
    assert await transport.claim(["q"]) == []


async def test_recorded_once_for_each_state(transport: Transport, clock: ManualClock) -> None:
    id_ = new_id()
    done, failed, other = settled(id_), settled(id_, State.FAILED), settled(new_id())
    assert await transport.operations.record([failed, failed, other]) == 2
    assert await transport.operations.record([other, done, failed]) == 1
    assert [r.state for r in await transport.operations.find([id_])] == [State.COMPLETED, State.FAILED]
    both = new_id()
    assert await transport.operations.record([settled(both), settled(both, State.FAILED)]) == 2
    clock.advance(8 * 86_400)  # by then another message may have the id
    assert await transport.operations.record([done]) == 1
    assert await transport.operations.record([]) == 0


async def test_an_own_trace_is_not_what_another_transport_recorded(transport: Transport) -> None:
    """The relay of an outbox acked the message here; the other transport records its own result."""
    id_ = await publish(transport)
    await transport.settle([Ack((await claim_one(transport)).receipt)])
    assert await transport.operations.record([settled(id_)]) == 1
    assert len(await transport.operations.find([id_])) == 2


async def test_many_are_recorded(transport: Transport) -> None:
    rows = [settled(new_id()) for _ in range(2_500)]
    assert await transport.operations.record(rows) == 2_500
    assert await transport.operations.record(rows) == 0


async def test_two_who_record_copies_of_one_message(connect: Connect) -> None:
    """Each checks after it has the lock. Otherwise two callers would find no row, and both would insert it."""
    rows = [settled(new_id()) for _ in range(20)]
    handles = [await connect() for _ in range(4)]
    counted = await asyncio.gather(*(handle.operations.record(rows) for handle in handles for _ in range(5)))
    assert sum(counted) == 20


async def test_only_what_is_settled_can_be_recorded(transport: Transport) -> None:
    with pytest.raises(InvalidOption, match="PENDING"):
        await transport.operations.record([settled(new_id(), State.PENDING)])
