"""Messages that plain SQL wrote on a shard that does not own them are found and moved."""

from __future__ import annotations

import sqlite3
from collections import Counter
from uuid import UUID, uuid4

import pytest

import millpond
from millpond import transports
from millpond.errors import ShardMapMismatch
from millpond.transports.sharded.connect import opened
from millpond.transports.sharded.mover import Mover
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.url import Url
from tests.shards.conftest import keys_of, message
from tests.shards.test_moves import FIRST, Killed, bodies, connect_one, run


def misplace(urls: list[str], keys: list[str], id_: UUID | None = None, *, created_at: int = 0) -> None:
    """Write messages of these keys on the first shard."""
    with sqlite3.connect(urls[0].removeprefix("sqlite:///")) as connection:
        connection.executemany(
            "INSERT INTO millpond_message (id, created_at, due_at, priority, state, queue, key, payload) "
            "VALUES (?, ?, 0, 50, 'PENDING', 'q', ?, ?)",
            [((id_ or uuid4()).bytes, created_at, key, key.encode()) for key in keys],
        )
    connection.close()


async def counts(urls: list[str], **options: bool) -> dict[str, tuple[int, int, int]]:
    found = await transports.sweep_shards(urls, **options)
    return {str(one.change): (one.moved, one.left, one.claimed) for one in found}


async def test_a_sweep_moves_them_to_their_owners(urls: list[str], store: ShardedStore) -> None:
    keys = [*keys_of(store, "a", 3), *keys_of(store, "b", 4), *keys_of(store, "c", 5)]
    misplace(urls, keys)
    b, c = (f"move misplaced messages from a to {name}" for name in "bc")
    assert await counts(urls, dry_run=True) == {b: (0, 4, 0), c: (0, 5, 0)}
    assert await counts(urls) == {b: (4, 0, 0), c: (5, 0, 0)}
    assert await counts(urls) == {}
    for name, url in zip("abc", urls, strict=True):
        alone = await millpond.connect(url)
        assert {row.key for row in await alone.operations.browse("q")} == set(keys_of(store, name, 5)) & set(keys)
        await alone.close()
    assert await bodies(store) == Counter(key.encode() for key in keys)


async def test_claimed_ones_are_counted_and_stay(urls: list[str], store: ShardedStore) -> None:
    misplace(urls, keys_of(store, "b", 1))
    (claim,) = await store.claim(["q"])
    assert await counts(urls) == {"move misplaced messages from a to b": (0, 0, 1)}
    assert await store.settle([millpond.Ack(claim.receipt)]) == []


@pytest.mark.parametrize("step", ["copy", "remove", "activate"])
async def test_a_sweep_that_is_killed_is_continued(urls: list[str], store: ShardedStore, step: str) -> None:
    keys = keys_of(store, "b", 5)
    misplace(urls, keys)

    async def kill(found: str) -> None:
        if found == step:
            raise Killed(step)

    with pytest.raises(Killed):
        async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
            await Mover(stores, map_, on_step=kill).sweep()
    await counts(urls)
    assert await bodies(store) == Counter(key.encode() for key in keys)


async def test_a_pending_change_comes_first(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message(*keys_of(store, "a", 1))])
    with pytest.raises(Killed):
        await run(urls, ("remove", 1))
    with pytest.raises(ShardMapMismatch, match="move -55 from a to b"):
        await counts(urls)
    await run(urls)
    assert await counts(urls) == {}


async def test_a_copy_that_waits_for_its_id_is_never_lost(urls: list[str], store: ShardedStore) -> None:
    """Another message took the id at the owner, for more than a day. Meanwhile a third message has it."""
    (first, third), (taking,) = keys_of(store, "b", 2), keys_of(store, "b", 3)[2:]
    id_ = uuid4()
    misplace(urls, [first], id_)

    async def kill(found: str) -> None:
        if found == "activate":
            raise Killed(found)

    with pytest.raises(Killed):
        async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
            await Mover(stores, map_, on_step=kill).sweep()
    await store.publish([message(taking, taking.encode(), id=id_)])
    assert await counts(urls) == {}
    with sqlite3.connect(urls[0].removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE millpond_moved SET at = 0")
    connection.close()
    misplace(urls, [third], id_)
    for range_, target in (("-55", "c"), ("-55", "a")):
        await transports.move_range(urls, range_, target)
        assert await counts(urls) == {"move misplaced messages from a to b": (0, 1, 0)}
    found = await bodies(store)
    for _ in range(2):
        await counts(urls)
        found += await bodies(store)
    assert found == Counter(key.encode() for key in (first, taking, third))


async def test_a_move_ends_while_plain_sql_writes_on_the_old_owner(urls: list[str], store: ShardedStore) -> None:
    """Its messages move as far as they are found. Those of the time before the switch are waited for."""
    keys = keys_of(store, "a", 60)
    await store.publish([message(keys[0])])
    (claim,) = await store.claim(["q"])
    misplace(urls, keys[1:2])
    written = settled = 0

    async def on_step(step: str) -> None:
        nonlocal written, settled
        if step == "copy":
            written += 1
            misplace(urls, [keys[1 + written]], created_at=4_000_000_000_000_000)
        if written == 3 and not settled:
            settled += 1
            await store.settle([millpond.Ack(claim.receipt)])

    async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
        moved = await Mover(stores, map_, on_step=on_step).run(FIRST)
    assert settled and 3 <= moved <= 6, "one in each pass, and the passes end"


async def test_an_id_that_plain_sql_writes_again_during_a_move_is_moved_or_stays(
    urls: list[str], store: ShardedStore
) -> None:
    """The record of its first move proves nothing about the second one, before which it is claimed."""
    held, key = keys_of(store, "a", 2)
    id_ = uuid4()
    await store.publish([message(held)])
    (other,) = await store.claim(["q"])
    misplace(urls, [key], id_)
    seen: Counter[str] = Counter()
    last: list[millpond.Claim] = []

    async def on_step(step: str) -> None:
        seen[step] += 1
        if step == "activate" and seen[step] == 1:
            seen["moved"] += 1
        elif step == "await ids" and seen["moved"] and not seen["again"]:
            seen["again"] += 1
            (claim,) = await store.claim(["q"])
            assert claim.receipt.shard == "b"
            assert await store.settle([millpond.Ack(claim.receipt)]) == []
            misplace(urls, [key], id_)
        elif step == "remove" and seen["again"] and not last:
            last.extend(await store.claim(["q"]))
        elif step == "await ids" and last and not seen["ended"]:
            seen["ended"] += 1
            assert await bodies(store) == {}, "one is claimed, and there is no other"
            assert await store.settle([millpond.Ack(one.receipt) for one in (other, *last)]) == []

    async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
        await Mover(stores, map_, on_step=on_step).run(FIRST)
    assert [claim.receipt.shard for claim in last] == ["a"]
    assert await bodies(store) == {}
