"""No message is placed on a shard that does not own it: one shard's URL alone, replays, retries."""

from __future__ import annotations

import sqlite3

import pytest

import millpond
from millpond import Ack, Message, Millpond, Reject
from millpond.control import Control
from millpond.errors import WrongShard
from millpond.message import replayed_id
from millpond.transports.sharded.store import ShardedStore
from tests.shards.conftest import NAMES, keys_of, message

pytestmark = pytest.mark.usefixtures("patient")


async def test_a_synchronous_publish_by_the_url_of_one_shard_is_refused(urls: list[str], store: ShardedStore) -> None:
    (other,) = keys_of(store, "c", 1)
    pond = Millpond(urls[0])
    connection = sqlite3.connect(urls[0].removeprefix("sqlite:///"))
    try:
        connection.execute("BEGIN")
        with pytest.raises(WrongShard, match="is shard 'a' of 3"):
            pond.publish_sync("q", 1, key=other, within=connection)
        connection.commit()
    finally:
        connection.close()
        await pond.close()
    assert await store.operations.browse("q") == []


async def test_a_replay_by_the_url_of_one_shard_is_refused(urls: list[str], store: ShardedStore) -> None:
    (done,) = await store.publish([message(*keys_of(store, "a", 1))])
    await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], 1)])
    alone = await millpond.connect(urls[0])
    with pytest.raises(WrongShard, match="is shard 'a' of 3"):
        await alone.operations.replay([done.id], name="again")
    await alone.close()


async def settled(store: ShardedStore, *, failed: bool = False, count: int = 30) -> list[millpond.Published]:
    """Archived messages, half of them without a key."""
    found = await store.publish(
        [
            Message(queue="q", payload=b"x%d" % n, key=f"k{n}" if n % 2 else None, priority=n, headers={"n": n})
            for n in range(count)
        ]
    )
    claims = await store.claim(["q"], count)
    await store.settle([Reject(c.receipt, "no") if failed else Ack(c.receipt) for c in claims])
    return found


async def test_replayed_messages_are_on_the_shard_of_their_new_id(urls: list[str], store: ShardedStore) -> None:
    old = await settled(store)
    published = await store.operations.replay([one.id for one in old], name="n", queue="again")
    assert [one.id for one in published] == [replayed_id(one.id, "n") for one in old]
    assert all(one.new for one in published)
    for name, url in zip(NAMES, urls, strict=True):
        alone = await millpond.connect(url)
        rows = await alone.operations.browse("again")
        assert {store.members.map.place(row.key, row.id.bytes) for row in rows} <= {name}
        await alone.close()
    before = {row.id: row for row in await store.operations.find([one.id for one in old])}
    after = {row.id: row for row in await store.operations.browse("again")}
    for one in old:
        row, again = before[one.id], after[replayed_id(one.id, "n")]
        assert (again.key, again.priority, again.payload) == (row.key, row.priority, row.payload)
        assert again.headers == {**row.headers, "replay-of": str(one.id)}


async def test_a_replay_again_or_by_another_way_publishes_nothing_twice(store: ShardedStore) -> None:
    """Another way is the replay of a lake: it sends the same id by the map."""
    old = await settled(store)
    ids = [one.id for one in old]
    await store.operations.replay(ids, name="n")
    assert not any(one.new for one in await store.operations.replay(ids, name="n"))
    rows = await store.operations.find(ids)
    by_lake = [Message(queue="q", payload=row.payload, key=row.key, id=replayed_id(row.id, "n")) for row in rows]
    assert not any(one.new for one in await store.publish(by_lake))
    assert len(await store.operations.browse("q")) == len(ids)


async def test_retried_failures_are_closed_on_their_own_shard(store: ShardedStore) -> None:
    old = await settled(store, failed=True)
    assert await store.operations.failures("q")
    await Control(store).retry([one.id for one in old])
    assert await store.operations.failures("q") == []
    rows = await store.operations.browse("q")
    assert len(rows) == len(old)
    for shard in store.members.shards:
        assert shard.store is not None
        mine = await shard.store.operations.browse("q")
        assert all(store.members.map.place(row.key, row.id.bytes) == shard.name for row in mine)
