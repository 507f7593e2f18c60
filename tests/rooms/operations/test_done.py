"""Done, retried marks, and the purge of `once`."""

from __future__ import annotations

import pytest

from millpond import Ack, ManualClock, Nack, Reject, State
from millpond.control import Control
from millpond.seam.transport import NEVER_US
from millpond.transports.database.store import DatabaseStore
from tests.rooms.operations.lives import claim, complete, counts, fail, message, publish
from tests.triggers import execute


async def test_waiting_messages_are_done_without_a_run(store: DatabaseStore) -> None:
    now, later, nacked = await publish(store, message(), message(delay=3600), message(priority=1))
    (held,) = await store.claim(["q"])
    assert held.receipt.id == nacked
    await store.settle([Nack(held.receipt, delay=60)])
    assert await store.operations.done([later, nacked]) == [later, nacked]
    assert {row.state for row in await store.operations.find([later, nacked])} == {State.COMPLETED}
    (row,) = await store.operations.find([nacked])
    assert (row.attempts, row.deliveries, row.reason) == (1, 1, None)
    assert await store.operations.done([later]) == []
    assert [c.receipt.id for c in await store.claim(["q"], 10)] == [now]
    # The receipt of an earlier delivery is stale.
    assert await store.settle([Ack(held.receipt)]) == [held.receipt]


async def test_a_claimed_message_is_done_by_force_only_and_its_receipt_is_stale(store: DatabaseStore) -> None:
    (id_,) = await publish(store, message())
    (held,) = await claim(store)
    assert await store.operations.done([id_]) == []
    assert await store.operations.done([id_], force=True) == [id_]
    for outcome in (Ack(held.receipt), Nack(held.receipt), Reject(held.receipt)):
        assert await store.settle([outcome]) == [held.receipt]
    assert await store.extend([held.receipt]) == [held.receipt]
    assert [row.state for row in await store.operations.find([id_])] == [State.COMPLETED]


async def test_messages_of_a_stream_are_not_done_by_force(store: DatabaseStore) -> None:
    (id_,) = await publish(store, message())
    await claim(store)
    execute(store.url.raw, f"UPDATE millpond_message SET lease_until = {NEVER_US}")  # as the claim of a stream
    assert await store.operations.done([id_], force=True) == []


async def test_a_retried_message_is_marked_and_no_longer_counted_as_failed(store: DatabaseStore) -> None:
    control = Control(store)
    await publish(store, message(), message())
    await fail(store, number=2)
    assert (await counts(store))[State.FAILED] == 2
    first = (await store.operations.archived("q"))[0]
    (new,) = (await control.retry([first.id])).published
    (stats,) = await store.operations.count()
    assert (stats.counts[State.FAILED], stats.retried) == (1, 1)
    rows = {row.id: row.retried for row in await store.operations.archived("q", states=[State.FAILED])}
    assert rows[first.id] and sum(rows.values()) == 1
    assert [row.retried for row in await store.operations.find([first.id])] == [True]
    await complete(store)
    (stats,) = await store.operations.count()
    assert (stats.counts[State.FAILED], stats.counts[State.COMPLETED]) == (1, 1)
    # A second retry of all finds the other one, and changes nothing about the first.
    result = await control.retry_queue("q")
    assert (len(result.published), result.already_retried) == (1, [first.id])
    assert new not in result.published


async def test_marks_leave_with_their_messages(store: DatabaseStore, clock: ManualClock) -> None:
    control = Control(store)
    await publish(store, message())
    await fail(store)
    await control.retry_queue("q")
    await complete(store)
    clock.advance(3600)
    await store.operations.purge(older_than=60)
    (stats,) = await store.operations.count(["q"])
    assert (stats.retried, stats.counts[State.FAILED]) == (0, 0)


async def test_retry_of_a_queue_makes_retryable_messages_due(store: DatabaseStore) -> None:
    """Also more than a page of them, and only those of this queue."""
    await publish(store, *[message() for _ in range(1100)], message("other"))
    held = await store.claim(["q", "other"], 2000)
    await store.settle([Nack(c.receipt, delay=99_999) for c in held])
    assert await store.claim(["q"], 10) == []
    control = Control(store)
    assert (await control.retry_queue("q", reason="rejected")).due_now == []
    result = await control.retry_queue("q")
    assert len(result.due_now) == 1100
    assert len(await store.claim(["q", "other"], 2000)) == 1100


@pytest.mark.parametrize("live", [True, False])
async def test_old_entries_of_once_are_purged(store: DatabaseStore, clock: ManualClock, live: bool) -> None:
    (id_,) = await publish(store, message())
    url = store.url.raw
    literal = f"'{id_}'" if url.startswith("postgres") else f"x'{id_.hex}'"
    key = "`key`" if url.startswith(("mysql", "mariadb")) else "key"
    execute(url, f"INSERT INTO millpond_once (id, {key}, token, at) VALUES ({literal}, 'mail', 1, {clock.now()})")
    if not live:
        await store.operations.done([id_])
    await store.operations.purge()
    assert execute(url, "SELECT count(*) FROM millpond_once") == [(1,)]
    clock.advance(7 * 86_400 + 1)  # `dedupe_for`
    await store.operations.purge()
    assert execute(url, "SELECT count(*) FROM millpond_once") == [(1 if live else 0,)]
