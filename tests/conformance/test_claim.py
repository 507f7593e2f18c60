"""Claim: each message to one claimer, counted, leased and fenced."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from millpond import Ack, Capability, GiveBack, ManualClock, Message, Transport
from millpond.errors import InvalidOption, InvalidQueue, InvalidTime
from tests.conformance.backends import requires
from tests.conformance.conftest import Connect
from tests.conformance.messages import bodies, claim_one, message, publish


async def test_a_claimed_message_is_claimed_by_nobody_else(transport: Transport) -> None:
    await publish(transport)
    assert len(await transport.claim(["q"])) == 1
    assert await transport.claim(["q"]) == []


async def test_a_claim_tells_its_times(transport: Transport, clock: ManualClock) -> None:
    created = clock.now()
    await publish(transport)
    clock.advance(2)
    claim = await claim_one(transport, lease=30)
    assert claim.created_us == claim.due_us == created
    assert claim.claimed_us == created + 2_000_000
    assert claim.lease_us == claim.claimed_us + 30_000_000


async def test_an_empty_or_unknown_queue_gives_nothing(transport: Transport) -> None:
    """A queue exists while it has messages; a claim from another name is no error."""
    assert await transport.claim(["never-seen"], 10) == []
    assert await transport.claim([], 10) == []


async def test_only_the_queues_asked_for_are_read(transport: Transport) -> None:
    for queue in ("a", "b", "c"):
        await publish(transport, queue.encode(), queue)
    assert await bodies(transport, ["b"]) == [b"b"]
    assert sorted(await bodies(transport, ["a", "c", "b"])) == [b"a", b"c"]


@requires(Capability.ONE_ORDER)
async def test_three_messages_in_batches_of_two(transport: Transport) -> None:
    await transport.publish([message(b"1"), message(b"2"), message(b"3")])
    assert await bodies(transport, limit=2) == [b"1", b"2"]
    assert await bodies(transport, limit=2) == [b"3"]
    assert await bodies(transport, limit=2) == []


async def test_a_limit_of_zero_takes_nothing(transport: Transport) -> None:
    await publish(transport)
    assert await transport.claim(["q"], 0) == []
    assert len(await transport.claim(["q"], 1)) == 1


@pytest.mark.parametrize("limit", [-1, 1.5, "1", True, None])
async def test_a_limit_must_be_a_number(transport: Transport, limit: object) -> None:
    with pytest.raises(InvalidOption):
        await transport.claim(["q"], limit)  # type: ignore[arg-type]


async def test_a_lease_must_be_a_time(transport: Transport) -> None:
    await publish(transport)
    for lease in (-1, 0, float("nan"), float("inf"), 1e30):
        with pytest.raises(InvalidTime):
            await transport.claim(["q"], lease=lease)
    with pytest.raises(InvalidOption):
        await transport.claim(["q"], lease="30")  # type: ignore[arg-type]
    with pytest.raises(InvalidQueue):
        await transport.claim([""])
    assert len(await transport.claim(["q"])) == 1


async def test_receipts_of_two_claims_differ(transport: Transport) -> None:
    await publish(transport)
    first = await claim_one(transport)
    await transport.settle([GiveBack(first.receipt)])
    second = await claim_one(transport)
    assert first.receipt.id == second.receipt.id
    assert first.receipt.token != second.receipt.token


async def test_eight_claimers_take_each_message_once(connect: Connect) -> None:
    """Eight handles in one process; tests/races has the same with processes."""
    transports = [await connect() for _ in range(8)]
    await transports[0].publish([message(str(n).encode()) for n in range(400)])
    taken: list[bytes] = []

    async def take(transport: Transport) -> None:
        while claims := await transport.claim(["q"], 7):
            taken.extend(claim.message.payload for claim in claims)
            assert await transport.settle([Ack(claim.receipt) for claim in claims]) == []

    await asyncio.gather(*(take(transport) for transport in transports))
    assert sorted(taken) == sorted(str(n).encode() for n in range(400))


async def test_concurrent_claims_on_one_handle(transport: Transport) -> None:
    await transport.publish([message(str(n).encode()) for n in range(100)])
    got = await asyncio.gather(*(bodies(transport, limit=10) for _ in range(12)))
    taken = [body for claim in got for body in claim]
    while rest := await bodies(transport, limit=10):  # a claim may step over rows that another one is taking
        taken += rest
    assert sorted(taken) == sorted(str(n).encode() for n in range(100))


# --- several queues --------------------------------------------------------------------------------------


async def test_several_queues_share_the_limit(transport: Transport) -> None:
    for queue in ("a", "b", "c"):  # the keys put messages of every queue on every shard
        await transport.publish([message(b"x", queue, key=str(n)) for n in range(10)])
    claims = await transport.claim(["a", "b", "c"], 9)
    assert sorted(c.message.queue for c in claims) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


async def test_an_unused_share_is_handed_on(transport: Transport) -> None:
    await transport.publish([message(b"x", "a"), *(message(b"x", "b") for _ in range(20))])
    for _ in range(2):
        assert len(await transport.claim(["a", "b", "c"], 10)) == 10
    assert len(await transport.claim(["a", "b", "c"], 10)) == 1


@requires(Capability.ONE_ORDER)
async def test_no_queue_starves_its_neighbours(transport: Transport) -> None:
    """Each queue is first in turn, even if another has far more messages."""
    await transport.publish([message(b"x", "busy") for _ in range(50)])
    await transport.publish([message(b"x", queue) for queue in ("quiet", "calm")])
    seen = [claim.message.queue for _ in range(3) for claim in await transport.claim(["busy", "quiet", "calm"], 1)]
    assert sorted(seen) == ["busy", "calm", "quiet"]


async def test_a_queue_named_twice_counts_once(transport: Transport) -> None:
    await transport.publish([message(), message()])
    assert len(await transport.claim(["q", "q"], 10)) == 2


async def test_a_single_name_is_one_queue_not_its_letters(transport: Transport) -> None:
    await publish(transport, queue="orders")
    assert len(await transport.claim("orders", 10)) == 1


# --- by id -----------------------------------------------------------------------------------------------


@requires(Capability.CLAIM_BY_ID)
async def test_claim_by_id(transport: Transport) -> None:
    ids = [published.id for published in await transport.publish([message(str(n).encode()) for n in range(5)])]
    assert await bodies(transport, ids=[ids[3], ids[1], uuid4()]) == [b"1", b"3"]
    assert await bodies(transport, ids=[ids[3], ids[1]]) == []
    assert await bodies(transport, ids=[]) == []
    assert await bodies(transport) == [b"0", b"2", b"4"]


@requires(Capability.CLAIM_BY_ID | Capability.ONE_ORDER)
async def test_claim_by_id_obeys_queue_due_time_and_limit(transport: Transport, clock: ManualClock) -> None:
    here, there, later = [
        published.id
        for published in await transport.publish(
            [message(b"here"), message(b"there", "other"), message(b"later", delay=10)]
        )
    ]
    assert await bodies(transport, ids=[here, there, later]) == [b"here"]
    clock.advance(10)
    assert await bodies(transport, ["q", "other"], ids=[there, later], limit=1) == [b"there"]
    assert await bodies(transport, ids=[here, there, later]) == [b"later"]


@requires(Capability.CLAIM_BY_ID)
async def test_claim_by_id_finds_what_a_lapsed_lease_held(transport: Transport, clock: ManualClock) -> None:
    id_ = await publish(transport)
    await claim_one(transport, lease=10)
    clock.advance(10)
    claim = await claim_one(transport, ids=[id_])
    assert claim.deliveries == 2


@requires(Capability.CLAIM_BY_ID)
async def test_more_ids_than_a_statement_has_parameters(transport: Transport) -> None:
    published = await transport.publish([message() for _ in range(3)])
    ids = [*(uuid4() for _ in range(40_000)), *(p.id for p in published)]
    assert len(await transport.claim(["q"], 10, ids=ids)) == 3


async def test_claims_are_plain_values(transport: Transport) -> None:
    await publish(transport, priority=3)
    claim = await claim_one(transport)
    assert isinstance(claim.message, Message)
    with pytest.raises(AttributeError):
        claim.deliveries = 7  # type: ignore[misc]
