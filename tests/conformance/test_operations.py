"""The operator's verbs: count, browse, change, pause, purge, replay."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from millpond import Ack, Capability, ManualClock, Nack, Reject, Row, State, Transport
from millpond.clock import as_datetime
from millpond.errors import InvalidMessage, InvalidOption, InvalidPriority, InvalidQueue, InvalidTime
from millpond.message import replayed_id
from tests.conformance.backends import requires
from tests.conformance.messages import bodies, claim_one, counts, crash, message, publish, row

browse = requires(Capability.BROWSE)
reschedule = requires(Capability.RESCHEDULE)
pause = requires(Capability.PAUSE)
archive = requires(Capability.ARCHIVE)


async def settled(
    transport: Transport, outcome: type[Ack] | type[Reject], queue: str = "q", body: bytes = b"body"
) -> UUID:
    """One archived message."""
    id_ = await publish(transport, body, queue)
    claim = await claim_one(transport, queue, ids=[id_])
    assert await transport.settle([outcome(claim.receipt)]) == []
    return id_


# --- count ------------------------------------------------------------------------------------------------


@browse
async def test_count_gives_every_state_of_every_queue(transport: Transport) -> None:
    assert await transport.operations.count() == []
    await publish(transport, queue="b")
    await settled(transport, Ack, "a")
    stats = await transport.operations.count()
    assert [s.queue for s in stats] == ["a", "b"]
    assert dict(stats[0].counts) == {**dict.fromkeys(State, 0), State.COMPLETED: 1}
    assert dict(stats[1].counts) == {**dict.fromkeys(State, 0), State.PENDING: 1}
    assert not any(s.approximate or s.paused for s in stats)


@browse
async def test_count_of_chosen_queues_in_their_order(transport: Transport) -> None:
    for queue in ("a", "b", "c"):
        await publish(transport, queue=queue)
    stats = await transport.operations.count(["c", "unknown", "a"], exact=True)
    assert [(s.queue, sum(s.counts.values())) for s in stats] == [("c", 1), ("unknown", 0), ("a", 1)]


@browse
async def test_count_tells_since_when_something_is_due(transport: Transport, clock: ManualClock) -> None:
    start = clock.now()
    await publish(transport, delay=5)
    assert (await transport.operations.count(["q"]))[0].oldest_due_us is None
    clock.advance(10)
    await publish(transport)
    assert (await transport.operations.count(["q"]))[0].oldest_due_us == start + 5_000_000
    await transport.claim(["q"], 10)
    assert (await transport.operations.count(["q"]))[0].oldest_due_us is None


# --- browse and find --------------------------------------------------------------------------------------


@browse
async def test_browse_shows_live_messages_in_the_order_of_claims(transport: Transport, clock: ManualClock) -> None:
    await publish(transport, b"3", priority=60)
    await publish(transport, b"2", delay=30)
    await publish(transport, b"1", priority=10)
    await publish(transport, b"b", "other")
    assert [r.payload for r in await transport.operations.browse("q")] == [b"1", b"2", b"3"]
    assert [r.payload for r in await transport.operations.browse()] == [b"b", b"1", b"2", b"3"]


@browse
async def test_browse_by_state_and_key(transport: Transport) -> None:
    await transport.publish([message(str(n).encode(), key=f"k{n % 2}") for n in range(6)])
    held, nacked = await transport.claim(["q"], 2)
    await transport.settle([Nack(nacked.receipt, delay=60)])
    assert [r.payload for r in await transport.operations.browse("q", states=[State.PROCESSING])] == [
        held.message.payload
    ]
    assert [r.payload for r in await transport.operations.browse("q", states=[State.RETRYABLE])] == [
        nacked.message.payload
    ]
    assert len(await transport.operations.browse("q", states=[State.PENDING, State.RETRYABLE])) == 5
    assert {r.payload for r in await transport.operations.browse("q", key="k1")} == {b"1", b"3", b"5"}
    assert await transport.operations.browse("q", key="none") == []
    assert await transport.operations.browse("q", states=[]) == []


@browse
async def test_pages_neither_miss_nor_repeat(transport: Transport) -> None:
    sent = [
        message(f"{q}{p}{n}".encode(), q, priority=p, delay=n % 3)
        for q in ("a", "b")
        for p in (0, 50)
        for n in range(7)
    ]
    await transport.publish(sent)
    await transport.claim(["a"], 3)
    seen: list[Row] = []
    while page := await transport.operations.browse(limit=5, after=seen[-1].position if seen else None):
        assert len(page) <= 5
        seen += page
    assert sorted(r.payload for r in seen) == sorted(m.payload for m in sent)
    assert [r.position for r in seen] == sorted(r.position for r in seen)


@browse
async def test_a_row_shows_its_times_as_datetimes(transport: Transport, clock: ManualClock) -> None:
    id_ = await publish(transport)
    found = await row(transport, id_)
    assert found.created_at == found.due_at == as_datetime(clock.now())
    assert found.archived_at is None
    with pytest.raises(AttributeError):
        _ = found.nonsense_at


@browse
@archive
async def test_find_looks_everywhere_live_first(transport: Transport) -> None:
    done, live = await settled(transport, Ack), await publish(transport)
    assert [r.id for r in await transport.operations.find([done, uuid4(), live, done])] == [live, done]
    assert await transport.operations.find([]) == []


@browse
@pytest.mark.parametrize("limit", [-1, 10_001, 1.5, None, True])
async def test_a_page_has_a_size(transport: Transport, limit: object) -> None:
    with pytest.raises(InvalidOption):
        await transport.operations.browse(limit=limit)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption):
        await transport.operations.archived(limit=limit)  # type: ignore[arg-type]


@browse
@archive
async def test_states_that_a_verb_does_not_know(transport: Transport) -> None:
    with pytest.raises(InvalidOption, match="PENDING"):
        await transport.operations.browse(states=[State.FAILED])
    with pytest.raises(InvalidOption, match="COMPLETED"):
        await transport.operations.archived(states=[State.PENDING])
    with pytest.raises(InvalidOption):
        await transport.operations.purge(older_than=0, states=[State.PENDING])
    for after in ("x", (1, 2, 3), (), ("a", uuid4())):
        with pytest.raises(InvalidOption):
            await transport.operations.browse(after=after)
        with pytest.raises(InvalidOption):
            await transport.operations.archived(after=after)


# --- the archive ------------------------------------------------------------------------------------------


@archive
async def test_archived_messages_newest_first(transport: Transport, clock: ManualClock) -> None:
    for n in range(3):
        await settled(transport, Ack if n % 2 == 0 else Reject, body=str(n).encode())
        clock.advance(10)
    await settled(transport, Ack, "other", b"3")
    assert [r.payload for r in await transport.operations.archived()] == [b"3", b"2", b"1", b"0"]
    assert [r.payload for r in await transport.operations.archived("q")] == [b"2", b"1", b"0"]
    assert [r.payload for r in await transport.operations.archived(states=[State.FAILED])] == [b"1"]


@archive
async def test_archived_between_two_moments(transport: Transport, clock: ManualClock) -> None:
    start = as_datetime(clock.now())
    for n in range(4):
        await settled(transport, Ack, body=str(n).encode())
        clock.advance(10)
    found = await transport.operations.archived(
        since=start + timedelta(seconds=10), until=start + timedelta(seconds=30)
    )
    assert [r.payload for r in found] == [b"2", b"1"]
    with pytest.raises(InvalidTime):
        await transport.operations.archived(since=start.replace(tzinfo=None))


@archive
async def test_pages_of_the_archive_neither_miss_nor_repeat(transport: Transport, clock: ManualClock) -> None:
    for n in range(4):
        await transport.publish([message(f"{q}{n}{m}".encode(), q) for q in ("a", "b") for m in range(3)])
        claims = await transport.claim(["a", "b"], 10)
        await transport.settle(
            [Ack(c.receipt) if n % 2 else Reject(c.receipt) for c in claims]
        )  # several with the same time
        clock.advance(n % 2)
    seen: list[Row] = []
    while page := await transport.operations.archived(limit=5, after=seen[-1].position if seen else None):
        seen += page
    assert len({r.id for r in seen}) == len(seen) == 24
    assert [r.position for r in seen] == sorted((r.position for r in seen), reverse=True)


@archive
async def test_archived_by_key(transport: Transport) -> None:
    await transport.publish([message(str(n).encode(), key=f"k{n % 2}") for n in range(4)])
    await transport.settle([Ack(c.receipt) for c in await transport.claim(["q"], 4)])
    assert {r.payload for r in await transport.operations.archived("q", key="k0")} == {b"0", b"2"}


@archive
async def test_purge_what_is_older(transport: Transport, clock: ManualClock) -> None:
    await settled(transport, Ack, body=b"old")
    clock.advance(10)
    await settled(transport, Reject, body=b"young")
    live = await publish(transport, b"live")
    assert await transport.operations.purge(older_than=10.000001) == 0
    assert await transport.operations.purge(older_than=10) == 1
    assert [r.payload for r in await transport.operations.archived()] == [b"young"]
    assert await transport.operations.purge(older_than=0) == 1
    assert [r.id for r in await transport.operations.find([live])] == [live]


@archive
async def test_purge_what_was_archived_before_a_time(transport: Transport, clock: ManualClock) -> None:
    """The messages that `archived` reads up to this time, whatever is archived meanwhile."""
    for body in (b"first", b"second", b"third"):
        await settled(transport, Ack, body=body)
        clock.advance(0.000001)
    (second,) = [row for row in await transport.operations.archived() if row.payload == b"second"]
    until = as_datetime(second.archived_us)
    (first,) = await transport.operations.archived(until=until)
    assert first.payload == b"first"
    clock.advance(60)
    with pytest.raises(InvalidTime, match="naive"):
        await transport.operations.purge(until=until.replace(tzinfo=None))
    with pytest.raises(InvalidOption, match="not both"):
        await transport.operations.purge(until=until, older_than=0)
    assert await transport.operations.purge("other", until=until) == 0
    assert await transport.operations.purge(until=until, states=[State.FAILED]) == 0
    assert await transport.operations.purge(until=until) == 1
    assert {row.payload for row in await transport.operations.archived()} == {b"second", b"third"}


@archive
async def test_purge_by_queue_and_state(transport: Transport) -> None:
    for queue in ("a", "b"):
        await settled(transport, Ack, queue)
        await settled(transport, Reject, queue)
    assert await transport.operations.purge("a", older_than=0, states=[State.COMPLETED]) == 1
    assert await counts(transport, "a") == {State.FAILED: 1}
    assert await counts(transport, "b") == {State.COMPLETED: 1, State.FAILED: 1}
    assert await transport.operations.purge("unknown", older_than=0) == 0
    assert await transport.operations.purge(older_than=0, states=[State.FAILED]) == 2


@archive
async def test_purge_by_retention(transport: Transport, clock: ManualClock) -> None:
    """By default the archive keeps everything; a queue may set another time for each state."""
    for queue in ("a", "b"):
        await settled(transport, Ack, queue)
        await settled(transport, Reject, queue)
    clock.advance(timedelta(days=400))
    assert await transport.operations.purge() == 0
    await transport.operations.retain("a", completed=timedelta(days=1), failed=None)
    await transport.operations.retain("b", completed=timedelta(days=500), failed=timedelta(days=400))
    assert await transport.operations.purge() == 2
    assert await counts(transport, "a") == {State.FAILED: 1}
    assert await counts(transport, "b") == {State.COMPLETED: 1}
    (stats,) = await transport.operations.count(["a"])
    assert (stats.keep_completed_us, stats.keep_failed_us) == (86_400_000_000, None)
    await transport.operations.retain("a", completed=None, failed=0)
    assert await transport.operations.purge("b") == 0
    assert await transport.operations.purge("a") == 1


@archive
async def test_a_purged_message_is_gone_and_its_id_stays_known(transport: Transport) -> None:
    id_ = await publish(transport, id=uuid4())
    await transport.settle([Ack((await claim_one(transport)).receipt)])
    assert await transport.operations.purge(older_than=0) == 1
    assert await transport.operations.find([id_]) == []
    assert not (await transport.publish([message(id=id_)]))[0].new


@archive
async def test_more_than_a_purge_deletes_at_once(transport: Transport) -> None:
    await transport.publish([message(b"") for _ in range(6_000)])
    await transport.settle([Ack(c.receipt) for c in await transport.claim(["q"], 6_000)])
    assert await transport.operations.purge(older_than=0) == 6_000
    assert await counts(transport) == {}


# --- reschedule and cancel --------------------------------------------------------------------------------


@reschedule
async def test_reschedule_priority(transport: Transport) -> None:
    """A new priority applies at once."""
    ids = [p.id for p in await transport.publish([message(str(n).encode()) for n in range(3)])]
    assert await transport.operations.reschedule([ids[2], uuid4()], priority=0) == [ids[2]]
    assert await bodies(transport) == [b"2", b"0", b"1"]


@reschedule
async def test_reschedule_due_time(transport: Transport, clock: ManualClock) -> None:
    now, later = [p.id for p in await transport.publish([message(b"now"), message(b"later", delay=60)])]
    assert await transport.operations.reschedule([later], delay=0) == [later]
    assert await transport.operations.reschedule([now], due_at=as_datetime(clock.now()) + timedelta(seconds=20)) == [
        now
    ]
    assert await bodies(transport) == [b"later"]
    clock.advance(20)
    assert await bodies(transport) == [b"now"]


@reschedule
@browse
async def test_reschedule_attempts(transport: Transport, clock: ManualClock) -> None:
    """The message begins again and is no longer a suspect."""
    id_ = await publish(transport)
    await crash(transport, 2)
    assert (await row(transport, id_)).suspect
    assert await transport.operations.reschedule([id_], attempts=0) == [id_]
    fresh = await row(transport, id_)
    assert (fresh.attempts, fresh.deliveries, fresh.first_attempt_us, fresh.suspect) == (0, 0, None, False)
    claim = await claim_one(transport, suspects=False)
    assert (claim.deliveries, claim.attempts, claim.crashes) == (1, 0, 0)


@reschedule
async def test_a_suspect_keeps_its_lane_when_its_priority_changes(transport: Transport, clock: ManualClock) -> None:
    id_ = await publish(transport, b"suspect")
    await crash(transport, 2)
    assert await transport.operations.reschedule([id_], priority=1) == [id_]
    assert await bodies(transport, suspects=False) == []
    assert (await claim_one(transport)).message.priority == 1


@reschedule
async def test_what_somebody_holds_is_not_rescheduled_nor_cancelled(transport: Transport) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    assert await transport.operations.reschedule([claim.receipt.id], delay=60) == []
    assert await transport.operations.cancel([claim.receipt.id]) == []
    assert await transport.settle([Ack(claim.receipt)]) == []
    assert await transport.operations.cancel([claim.receipt.id]) == []


@reschedule
async def test_a_retry_is_hastened(transport: Transport) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt, delay=3600)])
    assert await transport.operations.reschedule([claim.receipt.id], delay=0) == [claim.receipt.id]
    assert (await claim_one(transport)).attempts == 1


@reschedule
async def test_reschedule_says_what_is_wrong(transport: Transport, clock: ManualClock) -> None:
    id_ = await publish(transport)
    now = as_datetime(clock.now())
    for wrong, error in (
        ({}, InvalidOption),
        ({"delay": 1, "due_at": now}, InvalidTime),
        ({"delay": -1}, InvalidTime),
        ({"due_at": now.replace(tzinfo=None)}, InvalidTime),
        ({"priority": 101}, InvalidPriority),
        ({"attempts": -1}, InvalidOption),
        ({"attempts": 10**12}, InvalidOption),
    ):
        with pytest.raises(error):
            await transport.operations.reschedule([id_], **wrong)  # type: ignore[arg-type]


@reschedule
@archive
async def test_cancel_fails_without_running(transport: Transport, clock: ManualClock) -> None:
    """A cancelled message is not claimed."""
    ids = [p.id for p in await transport.publish([message(b"1"), message(b"2", delay=60), message(b"3")])]
    assert await transport.operations.cancel([ids[1], ids[0], uuid4(), ids[0]], reason="not needed") == [ids[1], ids[0]]
    assert await bodies(transport) == [b"3"]
    cancelled = await row(transport, ids[0])
    assert (cancelled.state, cancelled.reason, cancelled.attempts) == (State.FAILED, "not needed", 0)
    assert await transport.operations.cancel(ids[:2]) == []


@reschedule
async def test_no_old_receipt_takes_a_cancellation_for_its_own_work(transport: Transport) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt)])
    assert await transport.operations.cancel([claim.receipt.id]) == [claim.receipt.id]
    assert await transport.settle([Reject(claim.receipt)]) == [claim.receipt]
    assert await transport.settle([Nack(claim.receipt)]) == [claim.receipt]


@reschedule
async def test_thousands_at_once(transport: Transport) -> None:
    ids = [p.id for p in await transport.publish([message(b"") for _ in range(2_500)])]
    assert await transport.operations.reschedule(ids, priority=7) == ids
    assert await transport.operations.cancel(ids) == ids
    assert await transport.claim(["q"]) == []


# --- pause ------------------------------------------------------------------------------------------------


@pause
async def test_a_paused_queue_gives_nothing_until_it_is_resumed(transport: Transport) -> None:
    await publish(transport, b"1")
    await transport.operations.pause("q")
    await transport.operations.pause("q")
    await publish(transport, b"2")
    await publish(transport, b"other", "other")
    assert await bodies(transport, ["q", "other"]) == [b"other"]
    assert [s.paused for s in await transport.operations.count(["q", "other"])] == [True, False]
    await transport.operations.resume("q")
    assert await bodies(transport) == [b"1", b"2"]


@pause
@requires(Capability.CLAIM_BY_ID)
async def test_a_pause_holds_for_claims_by_id(transport: Transport) -> None:
    id_ = await publish(transport)
    await transport.operations.pause("q")
    assert await transport.claim(["q"], ids=[id_]) == []


@pause
async def test_what_was_claimed_before_the_pause_is_settled(transport: Transport) -> None:
    await transport.publish([message(b"1"), message(b"2")])
    one, two = await transport.claim(["q"], 2)
    await transport.operations.pause("q")
    assert await transport.settle([Ack(one.receipt), Nack(two.receipt)]) == []
    assert await transport.claim(["q"]) == []
    await transport.operations.resume("q")
    assert await bodies(transport) == [b"2"]


@pause
async def test_an_unknown_queue_may_be_paused(transport: Transport) -> None:
    await transport.operations.resume("new")
    await transport.operations.pause("new")
    await publish(transport, queue="new")
    assert await transport.claim(["new"]) == []
    with pytest.raises(InvalidQueue):
        await transport.operations.pause("")


# --- replay -----------------------------------------------------------------------------------------------


@archive
async def test_replay_publishes_again_under_a_new_id(transport: Transport, clock: ManualClock) -> None:
    sent = message(b"body", key="k", priority=9, headers={"a": 1}, expires=5)
    (published,) = await transport.publish([sent])
    claim = await claim_one(transport)
    await transport.settle([Reject(claim.receipt, error="boom")])
    clock.advance(60)
    (again,) = await transport.operations.replay([published.id], name="monday")
    assert (again.id, again.new) == (replayed_id(published.id, "monday"), True)
    claim = await claim_one(transport)
    assert claim.message.id == again.id
    assert (claim.message.payload, claim.message.key, claim.message.priority) == (b"body", "k", 9)
    assert claim.message.headers == {"a": 1, "replay-of": str(published.id)}
    assert (claim.deliveries, claim.attempts, claim.created_us, claim.expires_us) == (1, 0, clock.now(), None)
    assert (await row(transport, published.id)).state is State.FAILED


@archive
async def test_the_same_replay_twice_is_harmless(transport: Transport) -> None:
    ids = [await settled(transport, Ack, body=str(n).encode()) for n in range(3)]
    assert [p.new for p in await transport.operations.replay(ids[:2], name="monday")] == [True, True]
    assert [p.new for p in await transport.operations.replay(ids, name="monday")] == [False, False, True]
    assert [p.new for p in await transport.operations.replay(ids, name="tuesday")] == [True] * 3
    assert len(await transport.claim(["q"], 10)) == 6


@archive
async def test_replay_into_another_queue(transport: Transport) -> None:
    id_ = await settled(transport, Ack)
    await transport.operations.replay([id_], name="try", queue="sandbox")
    assert await bodies(transport, ["q"]) == []
    assert await bodies(transport, ["sandbox"]) == [b"body"]


@archive
async def test_replay_of_what_is_not_archived(transport: Transport) -> None:
    live, done = await publish(transport, queue="live"), await settled(transport, Ack)
    with pytest.raises(InvalidMessage, match=str(live)):
        await transport.operations.replay([done, live], name="monday")
    assert await transport.claim(["q"]) == []
    assert await transport.operations.replay([], name="monday") == []
    with pytest.raises(InvalidQueue):
        await transport.operations.replay([done], name="")
    with pytest.raises(InvalidQueue):
        await transport.operations.replay([done], name="monday", queue="bad ")
