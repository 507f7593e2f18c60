"""A shard that was restored from an old backup gets the newest map again, and its messages come to their owners."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

import millpond
from millpond import transports
from millpond.errors import ShardMapChanged, ShardMapMismatch
from millpond.transports.sharded.connect import opened
from millpond.transports.sharded.mover import Mover
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.url import Url
from tests.shards.conftest import NAMES, keys_of, message
from tests.shards.test_moves import Killed, bodies, connect_one, run

RANGE = "-55"


def path_of(urls: list[str], shard: str) -> str:
    return urls[NAMES.index(shard)].removeprefix("sqlite:///")


def back_up(urls: list[str], shard: str) -> None:
    shutil.copy(path_of(urls, shard), f"{path_of(urls, shard)}.backup")


def restore(urls: list[str], shard: str) -> None:
    shutil.copy(f"{path_of(urls, shard)}.backup", path_of(urls, shard))


async def versions(urls: list[str]) -> dict[str, int | None]:
    return {one.name: one.version for one in await transports.shard_status(urls)}


async def publish(urls: list[str], key: str, **options: float) -> None:
    pond = await millpond.connect(urls, **options)
    try:
        await pond.publish([message(key, key.encode())])
    finally:
        await pond.close()


@pytest.mark.parametrize("command", ["move", "sweep"])
async def test_the_new_owner_accepts_its_range_again(urls: list[str], command: str) -> None:
    back_up(urls, "b")
    key = await a_key(urls)
    await transports.move_range(urls, RANGE, "b")
    restore(urls, "b")
    with pytest.raises(ShardMapChanged, match="version 1 of the shard map"):
        await publish(urls, key, busy_timeout=0.05)
    with pytest.raises(ShardMapMismatch, match="b have an older version"):
        await transports.sweep_shards(urls, dry_run=True)
    if command == "move":
        assert await transports.move_range(urls, RANGE, "b") == []
    else:
        assert await transports.sweep_shards(urls) == []
    assert set((await versions(urls)).values()) == {2}
    await publish(urls, key)


async def a_key(urls: list[str]) -> str:
    store = await millpond.connect(urls)
    assert isinstance(store, ShardedStore)
    (key,) = keys_of(store, "a", 1)
    await store.close()
    return key


async def test_messages_of_a_restored_old_owner_come_to_the_new_one(urls: list[str]) -> None:
    key = await a_key(urls)
    await publish(urls, key)
    back_up(urls, "a")
    await transports.move_range(urls, RANGE, "b")
    store = await millpond.connect(urls)
    assert isinstance(store, ShardedStore)
    assert await bodies(store) == Counter([key.encode()])
    await store.close()
    restore(urls, "a")
    (done,) = await transports.sweep_shards(urls)
    assert (done.moved, done.left, done.claimed) == (1, 0, 0)
    assert await versions(urls) == {"a": 2, "b": 2, "c": 2}


async def test_a_restored_coordinator_has_an_epoch_above_all_others(urls: list[str]) -> None:
    back_up(urls, "a")
    for target in ("b", "c", "b"):
        await transports.move_range(urls, "aa-", target)
    restore(urls, "a")
    (done,) = await transports.move_range(urls, "aa-", "c")
    assert done.change.target == "c"
    assert set((await versions(urls)).values()) == {5}


@pytest.mark.parametrize("step", ["renew map"])
async def test_a_command_that_is_killed_is_continued(urls: list[str], step: str) -> None:
    back_up(urls, "b")
    back_up(urls, "c")
    await transports.move_range(urls, RANGE, "b")
    restore(urls, "b")
    restore(urls, "c")
    seen = 0

    async def kill(found: str) -> None:
        nonlocal seen
        seen += found == step
        if seen == 2:
            raise Killed(step)

    with pytest.raises(Killed):
        async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
            await Mover(stores, map_, on_step=kill).sweep()
    assert sorted((await versions(urls)).values()) == [1, 2, 2]  # type: ignore[type-var]
    await transports.sweep_shards(urls)
    assert set((await versions(urls)).values()) == {2}


async def test_a_pending_change_is_not_taken_for_a_restore(urls: list[str]) -> None:
    with pytest.raises(Killed):
        await run(urls, ("switch target", 1))
    with pytest.raises(ShardMapMismatch, match="pending"):
        await transports.sweep_shards(urls)
    await transports.move_range(urls, RANGE, "b")
    assert set((await versions(urls)).values()) == {2}
