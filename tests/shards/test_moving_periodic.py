"""Schedules of periodic messages move with the key range of their names: each time is published once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from uuid import UUID

import pytest

import millpond
from millpond.clock import ManualClock
from millpond.errors import ShardMapChanged
from millpond.schedule import Periodic
from millpond.transports.sharded.store import ShardedStore
from tests import templates
from tests.shards.conftest import keys_of
from tests.shards.test_moves import Killed, run
from tests.shards.test_moving_unique import BACK
from tests.shared import empty_databases

pytestmark = pytest.mark.timeout(300)
Open = Callable[[], Awaitable[ShardedStore]]


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The shard `b` is of another kind than the others."""
    if request.param == "sqlite":
        return templates.shards(tmp_path)
    files = [templates.migrated(tmp_path / f"{name}.db") for name in "ac"]
    found = [files[0], *empty_databases(request, request.param, 1), files[1]]
    asyncio.run(millpond.transports.init_shards(found, names=["a", "b", "c"]))
    return found


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def connect(urls: list[str], clock: ManualClock) -> AsyncIterator[Open]:
    opened: list[ShardedStore] = []

    async def open_one() -> ShardedStore:
        store = await millpond.connect(urls, clock=clock, busy_timeout=0.5)
        assert isinstance(store, ShardedStore)
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        await store.close()


def hourly(name: str, body: bytes = b"{}") -> Periodic:
    return Periodic(name=name, queue="q", schedule="every 3600", payload=body)


async def ids_by_shard(store: ShardedStore) -> dict[str, list[UUID]]:
    return {
        shard.name: [row.id for row in await shard.call(lambda one: one.operations.browse("q", limit=1000))]
        for shard in store.members.shards
    }


async def published(store: ShardedStore) -> Counter[UUID]:
    return Counter(id_ for ids in (await ids_by_shard(store)).values() for id_ in ids)


async def test_each_time_is_published_once_by_handles_with_any_map(
    urls: list[str], connect: Open, clock: ManualClock
) -> None:
    old = await connect()
    (name,) = keys_of(old, "a", 1)
    await old.periodic.declare([hourly(name)])
    clock.advance(3600)
    await old.periodic.publish_due()
    await run(urls)
    new = await connect()
    await new.periodic.declare([hourly(name)])
    assert old.members.map.version < new.members.map.version
    for store in (old, new, old):
        clock.advance(3600)
        for _ in range(2):
            await old.periodic.publish_due()
            await store.periodic.publish_due()
            await new.periodic.publish_due()
    found = await ids_by_shard(new)
    assert len(found["b"]) == 4 and not found["a"], "a time of an hour each, on the shard that owns the name"


async def test_a_schedule_keeps_its_state_and_the_changes_of_an_operator(
    urls: list[str], connect: Open, clock: ManualClock
) -> None:
    store = await connect()
    paused, changed, plain, stays = *keys_of(store, "a", 3), *keys_of(store, "c", 1)
    all_ = [hourly(name, b"\x00\xff") for name in (paused, changed, plain, stays)]
    await store.periodic.declare(all_)
    await store.periodic.change(paused, paused=True)
    await store.periodic.change(changed, schedule="every 7200", missed="all")
    clock.advance(3600)
    await store.periodic.publish_due()
    before = await store.periodic.all()
    for change in ({}, {"change": BACK}):
        await run(urls, **change)  # type: ignore[arg-type]
        after = await connect()
        await after.periodic.declare(all_)
        assert await after.periodic.all() == await store.periodic.all() == before
    assert len(before) == 4


@pytest.mark.slow_on_servers
@pytest.mark.parametrize("step", ["switch source", "copy schedules", "switch target", "drop schedules", "switch other"])
async def test_a_mover_that_is_killed_leaves_one_schedule(
    urls: list[str], connect: Open, clock: ManualClock, step: str
) -> None:
    old = await connect()
    names = keys_of(old, "a", 3)
    await old.periodic.declare([hourly(name) for name in names])
    with pytest.raises(Killed):
        await run(urls, (step, 1))
    new = await connect()
    clock.advance(3600)
    for store in (old, new):
        await store.periodic.publish_due()
    await run(urls)
    for store in (old, new):
        await store.periodic.publish_due()
    found = await published(new)
    assert len(found) == 3 and set(found.values()) == {1}
    assert [row.periodic.name for row in await new.periodic.all()] == sorted(names)
    assert await new.members["a"].call(lambda one: one.moving.schedules()) == []


async def test_an_old_handle_declares_and_changes_at_the_new_owner(urls: list[str], connect: Open) -> None:
    old = await connect()
    name, other, gone = keys_of(old, "a", 3)
    await old.periodic.declare([hourly(name), hourly(gone)])
    changing, removing = await connect(), await connect()
    await run(urls)
    await old.periodic.declare([hourly(other)])
    assert await changing.periodic.change(name, paused=True)
    assert await removing.periodic.remove(gone)
    found = await old.members["b"].call(lambda one: one.periodic.all())
    assert [(row.periodic.name, row.paused) for row in found] == sorted([(name, True), (other, False)])
    assert all(store.members.map.version == 2 for store in (old, changing, removing))


async def test_while_no_shard_accepts_the_range_a_declaration_waits(
    urls: list[str], connect: Open, clock: ManualClock
) -> None:
    store = await connect()
    name, other = keys_of(store, "a", 2)
    with pytest.raises(Killed):
        await run(urls, ("switch target", 1))
    with pytest.raises(ShardMapChanged):
        await store.periodic.remove(other)
    await store.periodic.declare([hourly(name)])
    assert await store.periodic.all() == []
    await run(urls)
    await store.periodic.publish_due()
    assert [row.periodic.name for row in await store.periodic.all()] == [name]
