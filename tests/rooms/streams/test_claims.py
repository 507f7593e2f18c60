"""A stream's claims: made once, found again, acknowledged up to a number, released by hand."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from millpond import Ack, GiveBack, ManualClock, Message, State
from millpond.clock import as_datetime
from millpond.errors import ClaimLost, StreamBehind, StreamFenced, UnknownStream
from millpond.seam.streams import RecordedOutcome
from millpond.transports.database.store import DatabaseStore
from tests.rooms.streams.driver import Driver, counts, processing, publish
from tests.stores import Connect


async def crash(store: DatabaseStore, times: int) -> None:
    for _ in range(times):
        (held,) = await store.claim(["q"])
        assert await store.settle([GiveBack(held.receipt, crashed=True)]) == []


async def test_a_claim_takes_what_is_due_and_counts_the_delivery(store: DatabaseStore, clock: ManualClock) -> None:
    ids = await publish(store, 10)
    await publish(store, delay=60)
    driver = await Driver(store).open()
    claim = await driver.held(1, slices=3)
    assert claim.messages == 10
    assert [part.messages for part in claim.slices] == [4, 4, 2]
    assert [part.first for part in claim.slices] == [sorted(ids)[n] for n in (0, 4, 8)]
    assert [part.stop for part in claim.slices] == [*[part.first for part in claim.slices[1:]], None]
    assert claim.claimed_us == clock.now()
    rows = await store.operations.browse("q", states=[State.PROCESSING])
    assert {row.id for row in rows} == set(ids)
    assert {row.deliveries for row in rows} == {1}
    assert rows[0].lease_at is not None and rows[0].lease_at.year == 9999


async def test_nothing_due_is_no_claim(store: DatabaseStore) -> None:
    driver = await Driver(store).open()
    assert await driver.claim(1) is None
    assert await store.streams.recorded("s", driver.epoch, 1) is None


async def test_a_claim_is_found_again_as_it_was(store: DatabaseStore, connect: Connect) -> None:
    await publish(store, 5)
    first = await (await Driver(store).open()).held(1, limit=3, slices=2)
    await publish(store, 5, priority=0)
    second = await Driver(await connect()).open()
    assert await second.held(1, limit=7, slices=5) == first
    assert await second.store.streams.recorded("s", second.epoch, 1) == first
    assert len(await processing(store)) == 3
    assert {row.deliveries for row in await store.operations.find(list(await processing(store)))} == {1}


async def test_messages_come_in_the_order_of_claims(store: DatabaseStore) -> None:
    late = await publish(store, 2, priority=90)
    early = await publish(store, 2, priority=10)
    middle = await publish(store, 3)
    driver = await Driver(store).open()
    await driver.held(1, limit=4)
    assert await processing(store) == {*early, *middle[:2]}
    await driver.ack(1)
    await driver.held(2, limit=10)
    assert await processing(store) == {middle[2], *late}


async def test_several_queues_share_the_limit_and_hand_on_what_they_leave(store: DatabaseStore) -> None:
    for queue, count in (("a", 100), ("b", 3), ("c", 100)):
        await publish(store, count, queue)
    driver = await Driver(store).open()
    claim = await driver.held(1, limit=60, queues=("a", "b", "c"))
    assert claim.messages == 60
    taken = {queue: len(await processing(store, queue)) for queue in "abc"}
    assert taken["b"] == 3 and min(taken["a"], taken["c"]) >= 20


async def test_a_paused_queue_gives_nothing(store: DatabaseStore) -> None:
    await publish(store, 3)
    await store.operations.pause("q")
    driver = await Driver(store).open()
    assert await driver.claim(1) is None
    await store.operations.resume("q")
    assert (await driver.held(1)).messages == 3


async def test_until_leaves_what_came_later(store: DatabaseStore, clock: ManualClock) -> None:
    now = clock.now()
    first = await publish(store, 3)
    later = await publish(store, 2, delay=1)
    clock.advance(5)
    past = await publish(store, 2, due_at=as_datetime(now) - timedelta(hours=1))
    driver = await Driver(store).open()
    await driver.held(1, until_us=now)
    assert await processing(store) == set(first)
    await driver.ack(1)
    assert await driver.claim(2, until_us=now) is None
    await driver.held(2)
    assert await processing(store) == {*later, *past}


async def test_an_ack_archives_and_moves_on(store: DatabaseStore) -> None:
    ids = await publish(store, 5)
    driver = await Driver(store).open()
    await driver.held(1)
    await driver.ack(1, messages=5)
    assert await counts(store) == {State.COMPLETED: 5}
    rows = await store.operations.find(ids)
    assert {(row.deliveries, row.attempts, row.reason) for row in rows} == {(1, 1, None)}
    assert all(row.first_attempt_us and row.last_attempt_us and row.acquired_us for row in rows)
    await driver.ack(1, messages=5)  # again is harmless
    (status,) = await store.streams.status()
    assert (status.acked_seq, status.held, status.held_for) == (1, 0, None)


async def test_the_next_claim_may_be_made_before_the_ack(store: DatabaseStore, connect: Connect) -> None:
    first, second, third = await publish(store, 3)
    driver = await Driver(store).open()
    await driver.held(1, limit=1)
    held = await driver.held(2, limit=1)
    with pytest.raises(StreamBehind):
        await driver.claim(3)
    assert await store.streams.record("s", [RecordedOutcome(first, "reject"), RecordedOutcome(second, "reject")]) == [
        first
    ]
    await driver.ack(1, messages=1)
    assert {row.id: row.state for row in await store.operations.find([first, second, third])} == {
        first: State.COMPLETED,
        second: State.PROCESSING,
        third: State.PENDING,
    }
    assert await driver.held(2) == held
    await driver.held(3)
    driver = await Driver(await connect()).open()
    await driver.ack(3, messages=1)
    assert await counts(store) == {State.COMPLETED: 2, State.FAILED: 1}


async def test_an_ack_of_a_claim_that_was_empty_here_moves_on(store: DatabaseStore) -> None:
    driver = await Driver(store).open()
    await driver.ack(7, messages=0)
    await publish(store)
    assert (await driver.held(8)).seq == 8


async def test_reapers_and_workers_leave_a_stream_alone(store: DatabaseStore, clock: ManualClock) -> None:
    await publish(store, 3)
    (worked,) = await store.claim(["q"])
    driver = await Driver(store).open()
    await driver.held(1)
    clock.advance(50 * 365 * 86_400)
    assert await store.workers.reap() == 1
    (again,) = await store.claim(["q"], limit=10)
    assert again.receipt.id == worked.receipt.id
    await driver.ack(1)
    assert await store.settle([Ack(again.receipt)]) == []
    assert await counts(store) == {State.COMPLETED: 3}


async def test_a_receipt_of_before_settles_nothing_of_a_stream(store: DatabaseStore, clock: ManualClock) -> None:
    await publish(store)
    (stale,) = await store.claim(["q"], lease=1)
    clock.advance(2)
    await store.workers.reap()
    driver = await Driver(store).open()
    await driver.held(1)
    assert await store.settle([Ack(stale.receipt)]) == [stale.receipt]
    assert await store.extend([stale.receipt]) == [stale.receipt]
    assert len(await processing(store)) == 1


# --- fences -----------------------------------------------------------------------------------------------


async def test_whoever_opens_last_fences_out_the_others(store: DatabaseStore, connect: Connect) -> None:
    await publish(store, 3)
    old = await Driver(store).open()
    await old.held(1)
    new = await Driver(await connect()).open()
    for call in (old.claim(1), old.claim(2), old.ack(1), store.streams.recorded("s", old.epoch, 1)):
        with pytest.raises(StreamFenced, match="stream 's'"):
            await call
    await new.ack(1)
    assert await counts(store) == {State.COMPLETED: 3}


async def test_a_given_epoch_is_taken_only_if_it_is_the_highest(store: DatabaseStore) -> None:
    assert await store.streams.open("s", epoch=5) == (5, 0)
    for epoch in (4, 5):
        with pytest.raises(StreamFenced):
            await store.streams.open("s", epoch=epoch)
    assert (await store.streams.open("s", epoch=6))[0] == 6
    assert (await store.streams.open("s"))[0] == 7
    assert (await store.streams.open("s", above=20))[0] == 21
    assert (await store.streams.open("s", above=20))[0] == 22


async def test_streams_do_not_meet(store: DatabaseStore) -> None:
    await publish(store, 4)
    one, other = await Driver(store, "one").open(), await Driver(store, "o'ther; --").open()
    assert ((await one.held(1, limit=3)).messages, (await other.held(1)).messages) == (3, 1)
    await other.ack(1)
    assert await counts(store) == {State.PROCESSING: 3, State.COMPLETED: 1}


async def test_a_checkpoint_behind_the_stream_is_refused(store: DatabaseStore) -> None:
    await publish(store, 3)
    driver = await Driver(store).open()
    for seq in (1, 2):
        await driver.held(seq, limit=1)
        await driver.ack(seq)
    with pytest.raises(StreamBehind, match="claim 1"):
        await driver.ack(1)
    for seq in (2, 1, 5):
        with pytest.raises(StreamBehind):
            await driver.claim(seq)
    assert await counts(store) == {State.COMPLETED: 2, State.PENDING: 1}


async def test_an_ack_of_a_released_claim_is_refused_unless_data_may_be_lost(store: DatabaseStore) -> None:
    await publish(store, 3)
    driver = await Driver(store).open()
    await driver.held(1)
    await store.streams.release("s")
    driver = await Driver(store).open()
    with pytest.raises(ClaimLost, match="held 3 messages, and now holds 0"):
        await driver.ack(1, messages=3)
    await driver.ack(1)
    assert (await driver.held(2)).messages == 3


# --- poison and expiry ------------------------------------------------------------------------------------


async def test_a_suspect_is_claimed_alone(store: DatabaseStore) -> None:
    (poison,) = await publish(store)
    await crash(store, 2)
    await publish(store, 5)
    driver = await Driver(store).open()
    sizes = []
    for seq in (1, 2):
        sizes.append((await driver.held(seq)).messages)
        if sizes[-1] == 1:
            assert await processing(store) == {poison}
        await driver.ack(seq)
    assert sorted(sizes) == [1, 5]


async def test_what_expired_is_failed(store: DatabaseStore, clock: ManualClock) -> None:
    old = await publish(store, 3, expires=1)
    clock.advance(2)
    fresh = await publish(store, 2)
    driver = await Driver(store).open()
    handed_out = 0
    for seq in (1, 2, 3):
        claim = await driver.claim(seq, limit=2)
        handed_out += 0 if claim is None else claim.messages
        assert await processing(store) <= set(fresh)
        await driver.ack(seq)
    assert handed_out == 2
    found = {row.id: (row.state, row.reason, row.attempts) for row in await store.operations.find(old)}
    assert {found[id_] for id_ in old} == {(State.FAILED, "expired", 0)}


async def test_a_suspect_that_a_stream_nacks_begins_anew(store: DatabaseStore) -> None:
    (id_,) = await publish(store)
    await crash(store, 5)
    driver = await Driver(store).open()
    assert (await driver.held(1)).messages == 1
    await store.streams.record(driver.name, [RecordedOutcome(id_, "nack")])
    await driver.ack(1)
    (row,) = await store.operations.find([id_])
    assert (row.state, row.attempts, row.deliveries, row.crashes) == (State.RETRYABLE, 1, 6, 0)
    assert [claim.crashes for claim in await store.claim(["q"], suspects=False)] == [0]


# --- outcomes ---------------------------------------------------------------------------------------------


async def test_recorded_outcomes_are_applied_by_the_ack(store: DatabaseStore, clock: ManualClock) -> None:
    ids = await publish(store, 6)
    stranger = uuid4()
    driver = await Driver(store).open()
    assert await store.streams.record("s", [RecordedOutcome(ids[0], "ack")]) == [ids[0]]
    claim = await driver.held(1, slices=2)
    outcomes = [
        RecordedOutcome(ids[0], "reject"),
        RecordedOutcome(ids[1], "nack", 30, "not yet"),
        RecordedOutcome(ids[2], "reject", None, "b\N{DUCK}d"),
        RecordedOutcome(stranger, "ack"),
        RecordedOutcome(ids[3], "nack"),
        RecordedOutcome(ids[0], "ack"),
    ]
    assert await store.streams.record("s", outcomes) == [stranger]
    assert await driver.held(1) == claim, "a replay reads the same"
    assert await store.streams.record("s", [RecordedOutcome(ids[3], "reject")]) == [], "the last word counts"
    await driver.ack(1, unsettled="nack", messages=6)
    rows = {row.id: row for row in await store.operations.find(ids)}
    assert rows[ids[0]].state is State.COMPLETED
    assert (rows[ids[1]].state, rows[ids[1]].error) == (State.RETRYABLE, "not yet")
    assert rows[ids[1]].due_us == clock.now() + 30_000_000
    assert (rows[ids[2]].state, rows[ids[2]].reason) == (State.FAILED, "b\N{DUCK}d")
    assert (rows[ids[3]].state, rows[ids[3]].reason) == (State.FAILED, "rejected")
    assert {rows[id_].state for id_ in ids[4:]} == {State.RETRYABLE}
    assert {(row.deliveries, row.attempts) for row in rows.values()} == {(1, 1)}
    (again,) = await store.claim(["q"], limit=1)
    assert again.receipt.id in ids[4:] and again.first_attempt_us


@pytest.mark.parametrize(
    ("unsettled", "state"), [("ack", State.COMPLETED), ("nack", State.RETRYABLE), ("reject", State.FAILED)]
)
async def test_what_becomes_of_messages_without_an_outcome(store: DatabaseStore, unsettled: str, state: State) -> None:
    ids = await publish(store, 2)
    driver = await Driver(store).open()
    await driver.held(1)
    await driver.ack(1, unsettled=unsettled)
    rows = await store.operations.find(ids)
    assert {row.state for row in rows} == {state}
    if state is State.FAILED:
        assert {row.reason for row in rows} == {"no outcome was recorded"}


# --- the operator's verbs ---------------------------------------------------------------------------------


async def test_a_release_gives_back_as_if_never_claimed(store: DatabaseStore, clock: ManualClock) -> None:
    await publish(store, 5)
    driver = await Driver(store).open()
    await driver.held(1, limit=3)
    clock.advance(30)
    await driver.held(2, limit=1)
    clock.advance(60)
    (status,) = await store.streams.status()
    assert (status.name, status.epoch, status.acked_seq, status.held, status.held_for) == ("s", 1, 0, 4, 90.0)
    assert await store.streams.release("s") == 4
    (status,) = await store.streams.status()
    assert (status.epoch, status.held, status.held_for) == (2, 0, None)
    with pytest.raises(StreamFenced):
        await driver.ack(1)
    claims = await store.claim(["q"], limit=10)
    assert len(claims) == 5 and {claim.deliveries for claim in claims} == {1}


async def test_releasing_what_is_not_there_says_what_is(store: DatabaseStore) -> None:
    await store.streams.open("orders")
    with pytest.raises(UnknownStream, match="there are 'orders'"):
        await store.streams.release("order")


async def test_waiting_counts_what_is_due_up_to_a_limit(store: DatabaseStore, clock: ManualClock) -> None:
    await publish(store, 7)
    await publish(store, 4, "r", priority=3)
    await publish(store, 2, delay=5)
    waiting = await store.streams.waiting(["q", "r"])
    assert (waiting.messages, waiting.at_us) == (11, clock.now())
    assert (await store.streams.waiting(["q", "r"], limit=5)).messages == 5


async def test_a_claim_is_bounded_by_the_size_of_its_bodies(store: DatabaseStore) -> None:
    """Over lanes and queues in their order; a body that alone is larger is claimed alone."""
    sizes = {"q": [(1, 10), (1, 30), (0, 50)], "r": [(0, 40), (0, 500), (0, 5)]}
    for queue, bodies in sizes.items():
        for priority, size in bodies:
            await store.publish([Message(queue=queue, payload=b"x" * size, priority=priority)])
    driver, found = await Driver(store).open(), list[list[int]]()
    while await driver.claim(len(found) + 1, 10, ("q", "r"), max_bytes=100):
        held = await store.operations.browse(states=[State.PROCESSING], limit=100)
        found.append(sorted(len(row.payload) for row in held))
        await driver.ack(len(found))
    assert sorted(size for batch in found for size in batch) == [5, 10, 30, 40, 50, 500]
    assert all(sum(batch) <= 100 or len(batch) == 1 for batch in found), found
    assert len(found) <= 4


async def test_a_claim_that_was_handed_out_names_its_checkpoint(store: DatabaseStore, connect: Connect) -> None:
    await publish(store, 2)
    driver = await Driver(store).open()
    assert (await driver.held(1, limit=1)).checkpoint is None
    await store.streams.hand_out("s", driver.epoch, 1, "one")
    assert (await driver.held(2, checkpoint="two")).checkpoint == "two"
    (status,) = await store.streams.status()
    assert (status.open_claims, status.shard) == (((1, "one"), (2, "two")), None)
    other = await connect()
    await other.streams.open("s", shard=3)
    await other.streams.open("s", shard=4)
    (status,) = await store.streams.status()
    assert status.shard == 3, "recorded once"
    with pytest.raises(StreamFenced):
        await store.streams.hand_out("s", driver.epoch, 1, "other")


async def test_a_large_claim(store: DatabaseStore) -> None:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(10_000)])
    driver = await Driver(store).open()
    claim = await driver.held(1, limit=20_000, slices=8)
    assert (claim.messages, len(claim.slices)) == (10_000, 8)
    ids = [row.id for row in await store.operations.browse("q", states=[State.PROCESSING], limit=10_000)]
    unknown = await store.streams.record("s", [RecordedOutcome(id_, "nack", n % 7) for n, id_ in enumerate(ids)])
    assert unknown == []
    await driver.ack(1, messages=10_000)
    assert await counts(store) == {State.RETRYABLE: 10_000}
