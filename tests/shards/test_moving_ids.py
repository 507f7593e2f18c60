"""An id that was published longer than the window ago stays known while its message moves, and after it was settled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

import millpond
from millpond import Ack, Message, transports
from millpond.transports.database.sql.statement import Query, Rows, Steps
from millpond.transports.sharded.connect import opened
from millpond.transports.sharded.mover import Mover
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.url import Url
from tests.shards.conftest import keys_of, message, three_shards
from tests.shards.test_moves import FIRST, Killed, bodies, connect_one, run
from tests.waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("patient")]

# Long after the window of each publisher.
PURGED = ("DELETE FROM {dedupe}", "UPDATE {archive} SET created_at = 0")
AWAITED = "SELECT count(*) FROM {dedupe} WHERE publisher < 0 OR expires_at > 4000000000000000000"


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return three_shards(request, tmp_path)


@pytest.fixture
async def store(urls: list[str]) -> AsyncIterator[ShardedStore]:
    opened = await millpond.connect(urls)
    assert isinstance(opened, ShardedStore)
    yield opened
    await opened.close()


async def on(store: ShardedStore, shard: str, *texts: str) -> Rows:
    """Run statements on one shard; returns the rows of the last one."""
    inner: Any = await store.members[shard].connect()

    def steps() -> Steps[Rows]:
        rows: Rows = ()
        for text in texts:
            rows = yield Query(inner.dialect.sql(text), {})
        return rows

    return await inner.runner.write(steps)


async def awaited(store: ShardedStore) -> int:
    return sum([int((await on(store, name, AWAITED))[0][0]) for name in "abc"])


async def test_an_id_is_known_wherever_its_message_is(urls: list[str], store: ShardedStore) -> None:
    settled, claimed, waiting, scheduled = (message(key, key.encode(), id=uuid4()) for key in keys_of(store, "a", 4))
    scheduled = Message(queue="q", payload=b"later", key=scheduled.key, id=scheduled.id, delay=86_400)
    await store.publish([settled])
    await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"])])
    await store.publish([claimed])
    (claim,) = await store.claim(["q"])
    await store.publish([waiting, scheduled])
    await on(store, "a", *PURGED)

    async def again() -> list[bool]:
        return [one.new for one in await store.publish([settled, claimed, waiting, scheduled])]

    assert not any(await again())
    await on(store, "a", *PURGED)
    with pytest.raises(Killed):
        await run(urls, ("copy archived ids", 1))
    for step in ("copy", "activate", "collect"):
        with pytest.raises(Killed):
            await run(urls, (step, 1))
        assert not any(await again())
    moving = asyncio.ensure_future(run(urls, ("await no more", 1)))
    assert waiting.key is not None
    found = {b"": 0}

    async def handled() -> bool:
        found.update(await bodies(store))
        return waiting.payload in found

    await until(handled)
    await store.settle([Ack(claim.receipt)])
    with pytest.raises(Killed):
        await moving
    assert not any(await again())
    await run(urls)
    assert not any(await again())
    assert found[waiting.payload] == 1 and await bodies(store) == {}
    assert await awaited(store) == 0


@pytest.mark.slow_on_servers
async def test_a_window_that_has_not_ended_stays_as_it_was(urls: list[str], store: ShardedStore) -> None:
    (key,) = keys_of(store, "a", 1)
    given = message(key, id=uuid4())
    await store.publish([given])
    row = "SELECT expires_at FROM {dedupe}"
    before = await on(store, "a", row)
    with pytest.raises(Killed):
        await run(urls, ("copy", 1))
    assert await awaited(store) == 1
    await run(urls)
    assert [*map(tuple, await on(store, "b", row))] == [*map(tuple, before)]


@pytest.mark.slow_on_servers
async def test_an_abort_leaves_no_id_behind(urls: list[str], store: ShardedStore) -> None:
    """A message is published again once its window is over, also on a shard that awaited it in vain."""
    (key,) = keys_of(store, "a", 1)
    given = message(key, id=uuid4())
    await store.publish([given])
    await on(store, "a", *PURGED)
    with pytest.raises(Killed):
        await run(urls, ("switch source", 1))
    assert await awaited(store) == 1
    await transports.abort_move(urls)
    assert await awaited(store) == 0
    await bodies(store)
    await on(store, "a", "DELETE FROM {archive}")
    await transports.move_range(urls, "-55", "b")
    assert (await store.publish([given]))[0].new


@pytest.mark.parametrize("settled_at", ["a", "b"])
async def test_an_id_that_is_published_while_others_are_awaited_stays_known(
    urls: list[str], store: ShardedStore, settled_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is awaited before its dedupe row is copied. No archive keeps its message."""
    monkeypatch.setattr("millpond.transports.sharded.mover.PAGE", 1)
    key, other = keys_of(store, "a", 2)
    late = message(key, b"late", id=UUID(int=(1 << 128) - 1))
    await store.publish([message(other, id=UUID(int=1))])
    published: list[Any] = []

    async def on_step(step: str) -> None:
        if step == "await ids" and not published:
            published.extend(await store.publish([late]))
            if settled_at == "a":
                published.extend(await store.claim(["q"], ids=[published[0].id]))
        elif step == "await no more" and settled_at == "b":
            await bodies(store)

    async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
        moving = asyncio.ensure_future(Mover(stores, map_, on_step=on_step).run(FIRST))
        if settled_at == "a":
            await until(lambda: len(published) == 2)
            await store.settle([Ack(published[1].receipt)])
            await on(store, "a", "DELETE FROM {archive}")
        await moving
    await bodies(store)
    for name in "ab":
        await on(store, name, "DELETE FROM {archive}")
    assert published[0].new and not (await store.publish([late]))[0].new


async def test_the_longer_of_two_windows_counts(urls: list[str], store: ShardedStore) -> None:
    """The clock of the new owner is behind: an old row there has not ended."""
    (key,) = keys_of(store, "a", 1)
    given = message(key, id=uuid4())
    await store.publish([given])
    row = "SELECT expires_at FROM {dedupe}"
    (before,) = await on(store, "a", row)
    assert given.id is not None
    old: Any = await store.members["b"].connect()
    end = await old.moving.clock() + 60_000_000
    await old.moving.fence(0)
    await old.moving.keep_dedupe(0, [(given.id, 7, end)])
    await run(urls)
    assert [*map(tuple, await on(store, "b", row))] == [tuple(before)]
