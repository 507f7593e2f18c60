"""Reschedule, cancel, pause and resume."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pymysql
import pytest

from millpond import Ack, GiveBack, ManualClock, Nack, State, Transport
from millpond.errors import (
    InvalidMessage,
    InvalidOption,
    InvalidPriority,
    InvalidQueue,
    InvalidTime,
)
from millpond.transports.url import Url
from tests.rooms.operations.lives import HOSTILE, claim, complete, counts, crash, message, publish
from tests.waiting import until

# --- reschedule -----------------------------------------------------------------------------------------


async def order(store: Transport) -> list[UUID]:
    return [c.receipt.id for c in await store.claim(["q"], 100, lease=86_400)]


async def test_priority_moves_a_message(store: Transport) -> None:
    one, two, three = await publish(store, *(message(priority=5) for _ in range(3)))
    assert await store.operations.reschedule([three], priority=1) == [three]
    assert await store.operations.reschedule([one], priority=9) == [one]
    assert await order(store) == [three, two, one]


async def test_delay_and_due_at(store: Transport, clock: ManualClock) -> None:
    later, sooner, kept = await publish(store, message(), message(delay=60), message())
    assert await store.operations.reschedule([later], due_at=datetime(2026, 1, 1, 12, tzinfo=UTC)) == [later]
    assert await store.operations.reschedule([sooner], delay=0) == [sooner]
    assert set(await order(store)) == {kept, sooner}
    clock.advance(timedelta(hours=12))
    assert await order(store) == [later]


async def test_a_claim_that_runs_full_sees_it_at_once(store: Transport) -> None:
    """Messages that become due below the floor of a claim."""
    await publish(store, *(message() for _ in range(10)))
    (late,) = await publish(store, message(delay=3600))
    await claim(store, number=3)
    await store.operations.reschedule([late], due_at=datetime(2025, 12, 31, tzinfo=UTC))
    assert (await claim(store))[0].receipt.id == late


async def test_attempts_begin_anew(store: Transport) -> None:
    (id_,) = await publish(store, message())
    for _ in range(3):
        (held,) = await claim(store)
        await store.settle([Nack(held.receipt, error="no")])
    assert await store.operations.reschedule([id_], attempts=0) == [id_]
    (row,) = await store.operations.find([id_])
    assert (row.attempts, row.deliveries, row.first_attempt_us, row.error) == (0, 0, None, "no")
    (held,) = await claim(store)
    assert (held.deliveries, held.attempts, held.crashes, held.first_attempt_us) == (1, 0, 0, None)


async def test_attempts_clear_suspicion(store: Transport, clock: ManualClock) -> None:
    (id_,) = await publish(store, message(priority=5))
    await crash(store, times=2)
    (other,) = await publish(store, message(priority=9))
    assert await store.claim(["q"], 5, suspects=False, lease=1) != []
    clock.advance(2)
    await store.workers.reap()
    assert await store.operations.reschedule([id_], attempts=4) == [id_]
    (row,) = await store.operations.find([id_])
    assert (row.attempts, row.deliveries, row.suspect) == (4, 4, False)
    assert [c.receipt.id for c in await store.claim(["q"], 5, suspects=False)] == [id_, other]


async def test_a_suspect_stays_one_at_another_priority(store: Transport, clock: ManualClock) -> None:
    (id_,) = await publish(store, message(priority=5))
    await crash(store, times=2)
    assert await store.operations.reschedule([id_], priority=1) == [id_]
    assert await store.claim(["q"], 5, suspects=False) == []
    (held,) = await claim(store)
    assert (held.receipt.id, held.message.priority) == (id_, 1)
    await store.settle([GiveBack(held.receipt)])
    (row,) = await store.operations.browse("q")
    assert row.suspect and row.position[2] == 1


async def test_everything_at_once(store: Transport, clock: ManualClock) -> None:
    ids = await publish(store, *(message(priority=n % 100) for n in range(2500)))
    assert await store.operations.reschedule(ids, priority=0, delay=5, attempts=2) == ids
    rows = await store.operations.find(ids)
    assert {(r.priority, r.attempts, r.deliveries, r.due_us) for r in rows} == {(0, 2, 2, clock.now() + 5_000_000)}
    clock.advance(5)
    assert len(await store.claim(["q"], 3000)) == 2500


async def test_only_waiting_messages_change(store: Transport) -> None:
    waiting, nacked, held = await publish(store, *(message(priority=n) for n in (5, 1, 2)))
    first, second = await claim(store, number=2)
    await store.settle([Nack(first.receipt, delay=60)])
    (done,) = await complete(store)
    wanted = [held, done, uuid4(), nacked, waiting, waiting]
    assert await store.operations.reschedule(wanted, priority=7) == [nacked, waiting]
    assert [row.priority for row in await store.operations.find([held, nacked, waiting])] == [2, 7, 7]
    assert (await store.operations.find([nacked]))[0].state is State.RETRYABLE
    assert await store.settle([Ack(second.receipt)]) == []
    assert await store.operations.reschedule([], priority=1) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, InvalidOption),
        ({"priority": 101}, InvalidPriority),
        ({"priority": -1}, InvalidPriority),
        ({"delay": -1}, InvalidTime),
        ({"due_at": datetime(2026, 1, 1)}, InvalidTime),
        ({"delay": 1, "due_at": datetime(2026, 1, 1, tzinfo=UTC)}, InvalidTime),
        ({"attempts": -1}, InvalidOption),
        ({"attempts": 2**31}, InvalidOption),
        ({"attempts": True}, InvalidOption),
    ],
)
async def test_bad_arguments(store: Transport, arguments: dict[str, object], error: type[Exception]) -> None:
    (id_,) = await publish(store, message())
    with pytest.raises(error):
        await store.operations.reschedule([id_], **arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage):
        await store.operations.reschedule(["no id"], priority=1)  # type: ignore[list-item]


def lock(url: str, id_: UUID) -> object:
    """Another session that locks a row until it is closed."""
    if url.startswith("postgres"):
        session = psycopg.connect(url)
        session.execute("SELECT 1 FROM millpond_message WHERE id = %s FOR UPDATE", [id_])
        return session
    parsed = Url(url)
    session = pymysql.connect(
        host=parsed.host,
        port=parsed.port or 3306,
        user=parsed.user,
        password=parsed.password or "",
        database=parsed.path.removeprefix("/"),
    )
    session.begin()
    session.cursor().execute("SELECT 1 FROM millpond_message WHERE id = %s FOR UPDATE", [id_.bytes])
    return session


@pytest.mark.parametrize("url", ["postgres", "mariadb"], indirect=True)
async def test_locked_messages_are_left_as_they_are(store: Transport, url: str) -> None:
    """SQLite has no row locks."""
    one, two = await publish(store, message(), message())
    with closing(lock(url, one)):  # type: ignore[type-var]
        async with asyncio.timeout(60):
            assert await store.operations.reschedule([one, two], priority=3) == [two]
            assert await store.operations.cancel([one, two]) == [two]
    assert await counts(store) == {State.PENDING: 1, State.FAILED: 1}
    # The server ends a closed connection a little later.
    assert await until(lambda: store.operations.cancel([one])) == [one]


async def test_it_wakes_who_waits(url: str, connect: Callable[..., object]) -> None:
    """In the same process on every database; in other processes if the database sends notifications."""
    store = await connect(url)  # type: ignore[misc]
    other = await connect(url) if url.startswith("postgres") else store  # type: ignore[misc]
    (id_,) = await publish(store, message(delay=3600))
    await store.operations.pause("q")
    for wake in (lambda: store.operations.reschedule([id_], delay=0), lambda: store.operations.resume("q")):
        await other.claim(["q"])
        waiting = asyncio.create_task(other.wait(["q"], 300))
        async with asyncio.timeout(60):
            while not waiting.done():  # the listener may not have started
                await wake()
                await asyncio.wait([waiting], timeout=0.2)
        await waiting


# --- cancel ---------------------------------------------------------------------------------------------


async def test_cancelled_messages_are_failed(store: Transport, clock: ManualClock) -> None:
    (id_,) = await publish(store, message(key="k", headers={"a": 1}, delay=60))
    (nacked,) = await publish(store, message())
    (held,) = await claim(store)
    await store.settle([Nack(held.receipt, delay=60, error="no luck")])
    clock.advance(1)
    assert await store.operations.cancel([nacked, id_], reason="customer left: \N{DUCK}'\0") == [nacked, id_]
    first, second = await store.operations.find([id_, nacked])
    assert (first.state, first.reason) == (State.FAILED, "customer left: \N{DUCK}'\N{REPLACEMENT CHARACTER}")
    assert (first.attempts, first.deliveries, first.error, first.archived_us) == (0, 0, None, clock.now())
    assert (first.key, first.headers, first.payload) == ("k", {"a": 1}, b"x")
    assert (second.attempts, second.deliveries, second.error) == (1, 1, "no luck")
    assert await store.operations.cancel([id_, nacked]) == []


async def test_a_message_in_hand_is_not_cancelled(store: Transport) -> None:
    (id_,) = await publish(store, message())
    (held,) = await claim(store)
    assert await store.operations.cancel([id_, uuid4()]) == []
    assert await store.settle([Ack(held.receipt)]) == []
    assert await store.operations.cancel([id_]) == [] == await store.operations.cancel([])
    assert await counts(store) == {State.COMPLETED: 1}


async def test_a_settle_of_an_earlier_claim_is_refused_after_it(store: Transport, clock: ManualClock) -> None:
    (id_,) = await publish(store, message())
    (held,) = await claim(store)
    await store.settle([Nack(held.receipt)])
    await store.operations.cancel([id_])
    assert await store.settle([Ack(held.receipt)]) == [held.receipt]


async def test_reason_must_be_text(store: Transport) -> None:
    with pytest.raises(InvalidOption):
        await store.operations.cancel([uuid4()], reason=None)  # type: ignore[arg-type]
    (id_,) = await publish(store, message())
    await store.operations.cancel([id_], reason="x" * 100_000)
    assert len((await store.operations.find([id_]))[0].reason or "") == 8190  # and three bytes for …


# --- pause ----------------------------------------------------------------------------------------------


async def test_a_paused_queue_gives_nothing(store: Transport) -> None:
    await store.operations.pause("q")
    await store.operations.pause("q")
    (id_,) = await publish(store, message())
    await publish(store, message("other"))
    assert await store.claim(["q"], 5) == [] == await store.claim(["q"], ids=[id_])
    assert [c.message.queue for c in await store.claim(["q", "other"], 5)] == ["other"]
    assert (await store.operations.count(["q"]))[0].paused
    await store.operations.resume("q")
    await store.operations.resume("q")
    assert len(await store.claim(["q"], 5)) == 1
    assert not (await store.operations.count(["q"]))[0].paused


async def test_what_is_in_hand_may_be_settled(store: Transport) -> None:
    await publish(store, message())
    (held,) = await claim(store)
    await store.operations.pause("q")
    assert await store.settle([Ack(held.receipt)]) == []


async def test_pausing_keeps_the_retention_and_the_other_way_round(store: Transport) -> None:
    await store.operations.retain("q", completed=1, failed=2)
    await store.operations.pause("q")
    await store.operations.retain("q", completed=3, failed=None)
    (stats,) = await store.operations.count()
    assert (stats.paused, stats.keep_completed_us, stats.keep_failed_us) == (True, 3_000_000, None)


async def test_many_pause_at_once(store: Transport) -> None:
    await asyncio.gather(
        *(
            store.operations.pause("new") if n % 2 else store.operations.retain("new", completed=n, failed=n)
            for n in range(20)
        )
    )
    assert (await store.operations.count(["new"]))[0].paused


async def test_names_are_data(store: Transport) -> None:
    for name in HOSTILE:
        await store.operations.pause(name)
    assert [(stats.queue, stats.paused) for stats in await store.operations.count()] == [
        (name, True) for name in sorted(HOSTILE)
    ]
    for name in HOSTILE:
        await store.operations.resume(name)
    for bad in ("", "a\0", "x" * 256, None):
        for verb in (store.operations.pause, store.operations.resume):
            with pytest.raises(InvalidQueue):
                await verb(bad)  # type: ignore[arg-type]
