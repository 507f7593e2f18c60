"""Clients with an old shard map: each publish checks the map until its commit, and no message is placed wrongly."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

import millpond
from millpond import Millpond, transports
from millpond.errors import Closed, ShardMapChanged, WrongShard
from millpond.transports.database import transactions
from millpond.transports.shard_map import ShardMap
from millpond.transports.sharded.store import ShardedStore
from tests.shards.conftest import NAMES, keys_of, message
from tests.waiting import until


def change(urls: list[str], map_: ShardMap, *names: str) -> None:
    """Give some shards a new version of the map, as a mover does."""
    for name in names or NAMES:
        path = urls[NAMES.index(name)].removeprefix("sqlite:///")
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE millpond_shard SET version = ?, map = ?", (map_.version, map_.encode()))
        connection.close()


def given_to(map_: ShardMap, old: str, new: str) -> ShardMap:
    """The next version of the map, in which one shard has the ranges of another one."""
    ranges = tuple((text, new if owner == old else owner) for text, owner in map_.ranges)
    return ShardMap(map_.pond, map_.version + 1, map_.shards, ranges).checked()


async def names_of(store: ShardedStore, key: str) -> list[str]:
    """The shards that hold a message with the key."""
    return [shard.name for shard in store.members.shards if await _keys(shard, key)]


async def _keys(shard: millpond.transports.sharded.shard.Shard, key: str) -> list[str]:
    rows = await shard.call(lambda one: one.operations.browse("q", limit=1000))
    return [row.key for row in rows if row.key == key]


async def test_an_old_client_reads_the_new_map_and_publishes_there(urls: list[str], store: ShardedStore) -> None:
    (key,), (other,) = keys_of(store, "a", 1), keys_of(store, "b", 1)
    change(urls, given_to(store.members.map, "a", "c"))
    await store.publish([message(key), message(other)])
    assert await names_of(store, key) == ["c"]
    assert await names_of(store, other) == ["b"]
    assert store.members.map.version == 2


async def test_concurrent_publishes_of_an_old_client_follow_the_map(urls: list[str], store: ShardedStore) -> None:
    keys = keys_of(store, "a", 40)
    change(urls, given_to(store.members.map, "a", "b"))
    await asyncio.gather(*(store.publish([message(key)]) for key in keys))
    rows = await store.members["b"].call(lambda one: one.operations.browse("q", limit=1000))
    assert sorted(str(row.key) for row in rows) == sorted(keys)


async def test_messages_of_unchanged_ranges_need_no_new_map(urls: list[str], store: ShardedStore) -> None:
    (key,) = keys_of(store, "b", 1)
    change(urls, given_to(store.members.map, "a", "c"))
    await store.publish([message(key)])
    assert store.members.map.version == 1


async def test_a_publish_waits_until_the_new_owner_accepts_it(urls: list[str], store: ShardedStore) -> None:
    (key,) = keys_of(store, "a", 1)
    new = given_to(store.members.map, "a", "c")
    change(urls, new, "a")
    publishing = asyncio.ensure_future(store.publish([message(key)]))
    await until(lambda: store.members.map.version == 2)
    assert not publishing.done()
    change(urls, new, "c")
    await publishing
    assert await names_of(store, key) == ["c"]


async def test_a_change_that_takes_too_long_is_an_error(urls: list[str]) -> None:
    store = await millpond.connect(urls, busy_timeout=0.01)
    assert isinstance(store, ShardedStore)
    (key,) = keys_of(store, "a", 1)
    change(urls, given_to(store.members.map, "a", "c"), "a")
    with pytest.raises(ShardMapChanged, match="belongs to shard"):
        await store.publish([message(key)])
    assert await names_of(store, key) == []
    await store.close()


async def test_connecting_while_the_map_is_changed(urls: list[str], store: ShardedStore) -> None:
    (key,) = keys_of(store, "a", 1)
    change(urls, given_to(store.members.map, "a", "c"), "a", "c")
    other = await millpond.connect(urls)
    await other.publish([message(key)])
    await other.close()
    assert await names_of(store, key) == ["c"]


async def test_a_handle_from_before_init_finds_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.transports.database.store.CHECK_MAP_EVERY", 0.0)
    urls = [f"sqlite:///{tmp_path / name}.db" for name in NAMES]
    old = await millpond.connect(urls[0], migrate=True)
    await transports.init_shards(urls, names=NAMES, migrate=True)
    with pytest.raises(WrongShard, match="Give the URLs of all shards"):
        await old.publish([message("x")])
    await old.close()


async def test_a_synchronous_publish_to_one_shard_is_refused(urls: list[str]) -> None:
    pond = Millpond(urls[0])
    connection = sqlite3.connect(urls[0].removeprefix("sqlite:///"))
    with pytest.raises(WrongShard, match="Give the URLs of all shards"):
        pond.publish_sync("q", b"x", within=connection)
    connection.close()


async def test_a_synchronous_publish_looks_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that is no shard pays for one small read in a second, not in each publish."""
    url = f"sqlite:///{tmp_path / 'one'}.db"
    await (await millpond.connect(url, migrate=True)).close()
    reads = 0
    real = transactions.read_record

    def counting(d: object) -> object:
        nonlocal reads
        reads += 1
        return real(d)  # type: ignore[arg-type]

    monkeypatch.setattr(transactions, "read_record", counting)
    room = transports.transactions(url)
    connection = sqlite3.connect(tmp_path / "one.db")
    for _ in range(20):
        room.publish_sync([message()], within=connection)
    connection.close()
    assert reads <= 2


async def test_a_replay_with_an_old_map_publishes_each_message_once(urls: list[str], store: ShardedStore) -> None:
    other = await millpond.connect(urls)
    assert isinstance(other, ShardedStore)
    keys = keys_of(store, "a", 20)
    ids = [one.id for one in await store.publish([message(key) for key in keys])]
    await store.operations.cancel(ids)
    await transports.move_range(urls, "-55", "b")
    assert (store.members.map.version, other.members.map.version) == (1, 1)
    first = await store.operations.replay(ids, name="r1")
    assert all(one.new for one in first)
    again = await other.operations.replay(ids, name="r1")
    assert not any(one.new for one in again) and [one.id for one in again] == [one.id for one in first]
    found = {
        shard.name: len(await shard.call(lambda one: one.operations.browse("q"))) for shard in store.members.shards
    }
    assert found == {"a": 0, "b": 20, "c": 0}
    await other.close()


async def test_a_call_that_outlives_the_pond_connects_no_more(urls: list[str]) -> None:
    """Such as that of a publish which waits for the new owner, to a shard whose connections were closed."""
    store = await millpond.connect(urls)
    assert isinstance(store, ShardedStore)
    shard = store.members["c"]
    await shard.rest()
    await store.close()
    with pytest.raises(Closed):
        await shard.call(lambda one: one.shards.record())
    assert shard.store is None


async def test_a_publish_that_waits_for_the_new_owner_ends_with_the_pond(urls: list[str]) -> None:
    store = await millpond.connect(urls)
    assert isinstance(store, ShardedStore)
    (key,) = keys_of(store, "a", 1)
    change(urls, given_to(store.members.map, "a", "c"), "a")
    publishing = asyncio.ensure_future(store.publish([message(key)]))
    await until(lambda: store.members.map.version == 2)
    await store.close()
    with pytest.raises(Closed):
        await publishing
