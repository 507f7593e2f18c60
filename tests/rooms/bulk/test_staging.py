"""A bulk write publishes each batch once and completely, also after a crash at any point."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from millpond import Ack, ManualClock, Message, State
from millpond.errors import BatchChanged, StagingLost, StreamBehind
from millpond.message import new_id
from millpond.seam.bulk import Batch
from millpond.transports.database.runner import Mode
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.store import DatabaseStore
from tests.stores import Connect

QUEUE = "bulk"


def rows(store: DatabaseStore, count: int, ids: Sequence[UUID] | None = None) -> list[tuple[Any, ...]]:
    chosen = ids or [new_id() for _ in range(count)]
    return [(store.dialect.id_in(id_), None, 50, QUEUE, None, None, b"%d" % n) for n, id_ in enumerate(chosen)]


async def load(store: DatabaseStore, batch: Batch, *counts: int) -> dict[int, int]:
    return {await store.bulk.load(batch, rows(store, count)): count for count in counts}


async def pending(store: DatabaseStore) -> int:
    stats = await store.operations.count([QUEUE])
    return stats[0].counts[State.PENDING]


async def staged(store: DatabaseStore) -> int:
    """Rows in the staging table."""
    total = 0
    for text in ("SELECT count(*) FROM {staging}", "SELECT count(*) FROM {lot}"):
        total += await scalar(store, text)
    return total


async def scalar(store: DatabaseStore, text: str) -> int:
    def steps() -> Steps[int]:
        answer = yield Query(store.dialect.sql(text), {})
        return int(answer[0][0]) if answer else 0

    return await store.runner.engine.run(steps, Mode.WRITE)


async def test_nobody_sees_what_is_only_loaded(store: DatabaseStore) -> None:
    batch = Batch("job")
    lots = await load(store, batch, 3, 2)
    assert await pending(store) == 0
    written = await store.bulk.publish(batch, lots)
    assert (written.rows, written.new, written.again) == (5, 5, False)
    assert await pending(store) == 5
    claims = await store.claim([QUEUE], 10)
    assert sorted(claim.message.payload for claim in claims) == [b"0", b"0", b"1", b"1", b"2"]
    assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
    assert await store.bulk.collect(batch) == 2
    assert await staged(store) == 0


async def test_a_batch_that_comes_again_is_published_once(store: DatabaseStore) -> None:
    """Also with other parts, and from other attempts."""
    first = await load(store, Batch("job", 7), 4, 4)
    await store.bulk.publish(Batch("job", 7), first)
    again = await load(store, Batch("job", 7), 8)
    written = await store.bulk.publish(Batch("job", 7), again)
    assert (written.rows, written.new, written.again) == (8, 0, True)
    for rows in (7, 9, 0):
        with pytest.raises(BatchChanged, match=f"with 8 rows and came again with {rows}"):
            await store.bulk.publish(Batch("job", 7), await load(store, Batch("job", 7), rows) if rows else {})
    older = await load(store, Batch("job", 6), 8)
    with pytest.raises(StreamBehind, match="has published batch 7, and batch 6 came again"):
        await store.bulk.publish(Batch("job", 6), older)
    assert await pending(store) == 8
    assert await store.bulk.collect(Batch("job", 7)) == 6
    assert await staged(store) == 0
    assert not (await store.bulk.publish(Batch("job", 8), await load(store, Batch("job", 8), 1))).again
    assert not (await store.bulk.publish(Batch("other", 7), await load(store, Batch("other", 7), 1))).again
    assert await pending(store) == 10


async def test_only_the_lots_that_are_named_are_published(store: DatabaseStore) -> None:
    """A task that was retried, or ran twice at once, has loaded its rows twice."""
    batch = Batch("job")
    await load(store, batch, 5)
    await store.bulk.publish(batch, await load(store, batch, 5))
    assert await pending(store) == 5
    await store.bulk.collect(batch)
    assert await staged(store) == 0


@pytest.mark.parametrize("what", ["{staging}", "{lot}"])
async def test_rows_that_are_gone_fail_the_commit(store: DatabaseStore, what: str) -> None:
    """The state after a crash of a PostgreSQL server."""
    batch = Batch("job")
    lots = await load(store, batch, 5, 5)
    await scalar(store, f"DELETE FROM {what} WHERE lot = {min(lots)}")
    with pytest.raises(StagingLost, match="write the batch again"):
        await store.bulk.publish(batch, lots)
    assert await pending(store) == 0
    assert (await store.bulk.publish(batch, await load(store, batch, 10))).new == 10


async def test_a_count_that_differs_fails_the_commit(store: DatabaseStore) -> None:
    batch = Batch("job")
    lots = await load(store, batch, 5)
    with pytest.raises(StagingLost):
        await store.bulk.publish(batch, {number: 6 for number in lots})
    assert await pending(store) == 0


async def test_a_batch_that_is_given_up_leaves_nothing(store: DatabaseStore) -> None:
    batch = Batch("job")
    await load(store, batch, 5, 5)
    kept = await load(store, Batch("other"), 2)
    assert await store.bulk.collect(batch) == 2
    assert await pending(store) == 0
    await store.bulk.publish(Batch("other"), kept)
    await store.bulk.collect(Batch("other"))
    assert await staged(store) == 0


async def test_a_later_batch_collects_what_earlier_ones_left(store: DatabaseStore) -> None:
    await load(store, Batch("job", 1), 5)
    await store.bulk.publish(Batch("job", 2), await load(store, Batch("job", 2), 1))
    assert await store.bulk.collect(Batch("job", 2)) == 2
    assert await staged(store) == 0


async def test_purge_collects_orphans(store: DatabaseStore, clock: ManualClock) -> None:
    waiting = await load(store, Batch("slow"), 2)
    await load(store, Batch("dead"), 5)
    await store.bulk.publish(Batch("job"), await load(store, Batch("job"), 1))
    await store.operations.purge()
    assert await staged(store) == 2 + 1 + 5 + 1, "what is published is of no use; others may come back"
    await store.bulk.publish(Batch("slow"), waiting)
    clock.advance(86_401)
    await store.operations.purge()
    assert await staged(store) == 0
    assert await pending(store) == 3
    assert await store.bulk.published(Batch("job")) == 1
    clock.advance(91 * 86_400)
    await store.operations.purge()
    assert await store.bulk.published(Batch("job")) is None, "a writer's name is not kept for ever"


async def test_parts_go_alone_and_once(store: DatabaseStore) -> None:
    batch = Batch("job", 3)
    assert (await store.bulk.publish(batch, await load(store, batch, 4), part=0)).new == 4
    assert await pending(store) == 4
    assert (await store.bulk.publish(batch, await load(store, batch, 4), part=0)).again
    with pytest.raises(BatchChanged, match="same rows in the same partitions"):
        await store.bulk.publish(batch, await load(store, batch, 5), part=0)
    assert await store.bulk.published(batch, 0) == 4
    assert await store.bulk.published(batch, 1) is None
    assert (await store.bulk.publish(batch, await load(store, batch, 1), part=1)).new == 1
    await store.bulk.publish(batch, {})
    assert (await store.bulk.publish(batch, await load(store, batch, 9), part=2)).again, "the batch is done"
    assert (await store.bulk.publish(Batch("job", 4), await load(store, Batch("job", 4), 2), part=0)).new == 2
    assert await pending(store) == 7


async def test_given_ids_are_published_once(store: DatabaseStore, clock: ManualClock) -> None:
    ids = [new_id() for _ in range(6)]
    await store.publish([Message(queue=QUEUE, payload=b"live", id=ids[0])])
    await store.publish([Message(queue=QUEUE, payload=b"done", id=ids[1])])
    claims = await store.claim([QUEUE], 1, ids=[ids[1]])
    await store.settle([Ack(claim.receipt) for claim in claims])
    batch = Batch("job")
    lots = {}
    for some in (ids[:4], ids[3:]):  # one of them twice
        lots[await store.bulk.load(batch, rows(store, 0, some))] = len(some)
    written = await store.bulk.publish(batch, lots, given=True)
    assert (written.rows, written.new) == (7, 4)
    published = {row.id for row in await store.operations.browse(QUEUE)}
    assert published == {ids[0], *ids[2:]}
    found = await store.publish([Message(queue=QUEUE, payload=b"again", id=ids[5])])
    assert not found[0].new
    clock.advance(8 * 86_400)
    some = {await store.bulk.load(Batch("later"), rows(store, 0, [ids[1], ids[2]])): 2}
    assert (await store.bulk.publish(Batch("later"), some, given=True)).new == 1, "out of the window; one is still live"


async def test_two_commits_of_one_batch_at_once(connect: Connect) -> None:
    """A zombie driver and the one that replaced it."""
    batch = Batch("job", 1)
    stores = [await connect() for _ in range(3)]
    lots = [await load(store, batch, 50) for store in stores]
    found = await asyncio.gather(*(store.bulk.publish(batch, some) for store, some in zip(stores, lots, strict=True)))
    assert sorted(written.new for written in found) == [0, 0, 50]
    assert await pending(stores[0]) == 50


async def test_consumers_see_all_of_a_batch_or_none(connect: Connect) -> None:
    """A claim without a limit never gets half of a batch."""
    writer, reader = await connect(), await connect()
    size, batches, seen = 200, 5, []

    async def consume() -> None:
        while sum(seen) < size * batches:
            claims = await reader.claim([QUEUE], 10 * size)
            if claims:
                seen.append(len(claims))
                await reader.settle([Ack(claim.receipt) for claim in claims])

    consuming = asyncio.create_task(consume())
    for number in range(batches):
        batch = Batch("job", number)
        await writer.bulk.publish(batch, await load(writer, batch, size // 2, size // 2))
        await writer.bulk.collect(batch)
    await consuming
    assert sum(seen) == size * batches
    assert all(count % size == 0 for count in seen), seen


async def test_what_is_due_later_waits(store: DatabaseStore, clock: ManualClock) -> None:
    batch = Batch("job")
    later = clock.now() + 60_000_000
    row = (store.dialect.id_in(new_id()), later, 10, QUEUE, "k", '{"a":"b"}', b"x")
    await store.bulk.publish(batch, {await store.bulk.load(batch, [row]): 1})
    assert await store.claim([QUEUE], 1) == []
    clock.advance(60)
    (claim,) = await store.claim([QUEUE], 1)
    message = claim.message
    assert (message.priority, message.key, dict(message.headers), message.payload) == (10, "k", {"a": "b"}, b"x")


async def test_whoever_waits_is_woken(connect: Connect) -> None:
    writer, reader = await connect(), await connect()
    if writer.dialect.name != "postgresql":
        pytest.skip("only PostgreSQL announces")
    waiting = asyncio.create_task(reader.wait([QUEUE], 3600))
    number = 0
    while not waiting.done():  # the first ones may come before it listens
        batch = Batch("job", number)
        await writer.bulk.publish(batch, await load(writer, batch, 1), queues=[QUEUE])
        await asyncio.wait([waiting], timeout=0.1)
        number += 1
