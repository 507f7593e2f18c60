"""A store made of stores: placement, subsets, partial failures, callers' transactions."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import millpond
from millpond import Ack, Millpond, State, transports
from millpond.errors import (
    Closed,
    InvalidMessage,
    InvalidOption,
    PartlyPublished,
    ShardMapMismatch,
    Unsupported,
    WrongShard,
)
from millpond.message import Receipt
from millpond.transports.database.store import DatabaseStore
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.url import Url
from tests.shards.conftest import NAMES, keys_of, message
from tests.triggers import failing
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("patient")


async def rows_on(url: str) -> list[Any]:
    store = await millpond.connect(url)
    try:
        return await store.operations.browse("q", limit=1000)
    finally:
        await store.close()


async def test_the_order_of_urls_changes_nothing(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message(f"customer-{n}") for n in range(50)])
    other = await millpond.connect(urls[::-1])
    await other.publish([message(f"customer-{n}") for n in range(50)])
    await other.close()
    for name, url in zip(NAMES, urls, strict=True):
        found = await rows_on(url)
        assert found and len(found) % 2 == 0
        assert {store.members.map.place(row.key, row.id.bytes) for row in found} == {name}


async def test_messages_without_a_key_are_placed_by_their_id(urls: list[str], store: ShardedStore) -> None:
    given = uuid4()
    await store.publish([message() for _ in range(60)] + [message(id=given)])
    for name, url in zip(NAMES, urls, strict=True):
        assert {store.members.map.place(None, row.id.bytes) for row in await rows_on(url)} == {name}
    assert [p.new for p in await store.publish([message(id=given)])] == [False]


async def test_the_same_id_under_two_keys_may_be_published_twice(store: ShardedStore) -> None:
    """Ids are unique on each shard: the capability UNIQUE_IDS is absent."""
    assert millpond.Capability.UNIQUE_IDS not in store.capabilities
    (a,), (b,) = keys_of(store, "a", 1), keys_of(store, "b", 1)
    id_ = uuid4()
    assert [p.new for p in await store.publish([message(a, id=id_), message(b, id=id_), message(a, id=id_)])] == [
        True,
        True,
        False,
    ]


async def test_receipts_name_their_shard(store: ShardedStore) -> None:
    (key,) = keys_of(store, "b", 1)
    await store.publish([message(key)])
    (claim,) = await store.claim(["q"])
    assert claim.receipt.shard == "b"
    assert await store.extend([claim.receipt]) == []
    assert await store.settle([Ack(claim.receipt)]) == []


async def test_a_receipt_without_its_shard_finds_it(store: ShardedStore) -> None:
    """Another program may keep the id and the token only."""
    await store.publish([message() for _ in range(9)])
    claims = await store.claim(["q"], 9)
    bare = [Receipt(claim.receipt.id, claim.receipt.token) for claim in claims]
    stale = Receipt(bare[0].id, 5)
    assert await store.extend([*bare, stale]) == [stale]
    assert await store.settle([Ack(receipt) for receipt in [*bare, stale]]) == [stale]
    assert (await store.operations.count(["q"]))[0].counts[State.COMPLETED] == 9


async def test_pages_stay_correct(store: ShardedStore) -> None:
    await store.publish([message(body=str(n).encode(), priority=n % 5) for n in range(50)])
    whole = await store.operations.browse("q", limit=100)
    assert [row.position for row in whole] == sorted(row.position for row in whole) and len(whole) == 50
    paged: list[Any] = []
    while page := await store.operations.browse("q", limit=7, after=paged[-1].position if paged else None):
        paged += page
    assert [row.id for row in paged] == [row.id for row in whole]
    while claims := await store.claim(["q"], 20):
        await store.settle([Ack(claim.receipt) for claim in claims])
    done = await store.operations.archived("q", limit=100)
    paged = []
    while page := await store.operations.archived("q", limit=7, after=paged[-1].position if paged else None):
        paged += page
    assert [row.id for row in paged] == [row.id for row in done] and len(done) == 50


async def test_a_claim_takes_no_more_than_the_free_slots(store: ShardedStore) -> None:
    await store.publish([message() for _ in range(40)])
    for limit in (1, 2, 3, 7, 10):
        assert len(await store.claim(["q"], limit)) == limit
    (stats,) = await store.operations.count(["q"])
    assert (stats.counts[State.PROCESSING], stats.counts[State.PENDING]) == (23, 17)


async def test_all_slots_go_to_the_shard_that_has_messages(store: ShardedStore) -> None:
    await store.publish([message(key) for key in keys_of(store, "c", 20)])
    assert len(await store.claim(["q"], 15)) == 15


async def test_a_bulk_publish_that_fails_on_one_shard_names_the_written_ids(
    urls: list[str], store: ShardedStore
) -> None:
    ids = [uuid4() for _ in range(100)]
    with failing(urls[1], "INSERT", "millpond_message"), pytest.raises(PartlyPublished, match="shards b refused") as e:
        await store.publish([message(id=id_) for id_ in ids])
    expected = {id_ for id_ in ids if store.members.map.place(None, id_.bytes) != "b"}
    assert set(e.value.published) == expected == {row.id for row in await store.operations.find(ids)}
    published = await store.publish([message(id=id_) for id_ in ids])
    assert {p.id for p in published if p.new} == set(ids) - expected


async def test_nothing_is_written_if_one_message_is_invalid(store: ShardedStore) -> None:
    with pytest.raises(InvalidMessage):
        await store.publish([*(message() for _ in range(10)), message("k" * 300)])
    assert await store.operations.browse("q") == []


async def test_within_a_transaction_only_keys_of_its_shard(urls: list[str], store: ShardedStore) -> None:
    mine, other = keys_of(store, "b", 2), keys_of(store, "c", 1)
    pond = Millpond(urls)
    connection = sqlite3.connect(urls[1].removeprefix("sqlite:///"))
    try:
        connection.execute("BEGIN")
        pond.publish_sync("q", 1, key=mine[0], unique="v", within=connection)
        with pytest.raises(WrongShard, match="belongs to shard 'c'"):
            pond.publish_sync("q", 1, unique=other[0], within=connection)  # the value is the key
        pond.publish_sync("q", 1, key=mine[0], within=connection)
        await pond.publish("q", 2, key=mine[1], within=connection)
        for publish in (pond.publish_sync, None):
            with pytest.raises(WrongShard, match="belongs to shard 'c', and this connection is to shard 'b'"):
                if publish is None:
                    await pond.publish("q", 3, key=other[0], within=connection)
                else:
                    publish("q", 3, key=other[0], within=connection)
        connection.commit()
        (claim, *_) = await store.claim(["q"], 2)
        connection.execute("BEGIN")
        assert await store.settle([Ack(claim.receipt)], within=connection) == []
        connection.commit()
    finally:
        connection.close()
        await pond.close()
    assert {row.key for row in await rows_on(urls[1])} <= set(mine)


async def test_a_database_without_a_map_is_refused(urls: list[str], tmp_path: Path) -> None:
    await (await millpond.connect(f"sqlite:///{tmp_path}/new.db", migrate=True)).close()
    with pytest.raises(ShardMapMismatch, match="has no shard map; run once"):
        await millpond.connect([*urls[:2], f"sqlite:///{tmp_path}/new.db"])


async def test_a_missing_url_is_an_error(urls: list[str]) -> None:
    with pytest.raises(ShardMapMismatch, match="2 URLs were given, and the shard map has 3 shards: a, b, c"):
        await millpond.connect(urls[:2])


async def test_a_foreign_map_is_refused(urls: list[str], tmp_path: Path) -> None:
    others = [f"sqlite:///{tmp_path / name}-other.db" for name in NAMES]
    await transports.init_shards(others, names=NAMES, migrate=True)
    with pytest.raises(ShardMapMismatch, match="another shard map"):
        await millpond.connect([*urls[:2], others[2]])


async def test_an_init_may_be_repeated_but_not_changed(urls: list[str], tmp_path: Path) -> None:
    first = await transports.init_shards(urls, names=NAMES)
    assert await transports.init_shards(urls, names=NAMES) == first
    with pytest.raises(ShardMapMismatch):
        await transports.init_shards(urls[::-1], names=NAMES)
    with pytest.raises(ShardMapMismatch):
        await transports.init_shards([*urls, f"sqlite:///{tmp_path}/d.db"], names=[*NAMES, "d"], migrate=True)


async def test_an_interrupted_init_is_finished(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path / name}.db" for name in NAMES]
    await transports.init_shards(urls, names=NAMES, migrate=True)
    connection = sqlite3.connect(urls[2].removeprefix("sqlite:///"))
    connection.execute("DELETE FROM millpond_shard")
    connection.commit()
    connection.close()
    with pytest.raises(ShardMapMismatch):
        await millpond.connect(urls)
    await transports.init_shards(urls, names=NAMES)
    await (await millpond.connect(urls)).close()


async def test_a_database_with_messages_becomes_a_shard_only_if_asked(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path / name}.db" for name in NAMES]
    old = await millpond.connect(urls[0], migrate=True)
    await old.publish([message() for _ in range(9)])
    await old.close()
    with pytest.raises(ShardMapMismatch, match="has messages"):
        await transports.init_shards(urls, migrate=True)
    await transports.init_shards(urls, migrate=True, with_messages=True)
    store = await millpond.connect(urls)
    assert len(await store.claim(["q"], 20)) == 9
    await store.close()


async def test_one_shard_alone_takes_no_message(urls: list[str]) -> None:
    alone = await millpond.connect(urls[0])
    with pytest.raises(WrongShard, match="is shard 'a' of 3"):
        await alone.publish([message()])
    assert await alone.operations.browse("q") == []
    await alone.close()


async def test_a_subset_claims_from_its_shards_only(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message() for _ in range(60)])
    some = await millpond.connect(urls, shards=["a", "aa-"])
    claims = await some.claim(["q"], 100)
    assert {claim.receipt.shard for claim in claims} == {"a", "c"}
    await some.publish([message(key) for key in keys_of(store, "b", 1)])
    await some.close()
    for wrong in (["d"], ["-80"]):
        with pytest.raises(InvalidOption):
            await millpond.connect(urls, shards=wrong)


async def test_a_pond_works_over_shards(urls: list[str]) -> None:
    pond = Millpond(" ".join(urls))
    seen: list[int] = []

    @pond.subscriber("q", max_workers=4)
    async def handle(body: int) -> None:
        seen.append(body)

    await pond.publish_many("q", range(50))
    await pond.run(until_idle=True, signals=False)
    assert sorted(seen) == list(range(50))
    transport = await pond.transport
    (stats,) = await transport.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == 50 and stats.missing == ()
    await pond.close()


async def test_a_pond_claims_from_chosen_shards(urls: list[str]) -> None:
    pond = Millpond(urls)
    pond.claim_from(["a"])
    seen: list[int] = []

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        seen.append(body)

    await pond.publish_many("q", range(100))
    with pytest.raises(millpond.MillpondError, match="connected already"):
        pond.claim_from(["b"])
    await pond.run(until_idle=True, signals=False)
    assert 0 < len(seen) < 100
    await pond.close()


async def test_closed(urls: list[str]) -> None:
    store = await millpond.connect(urls)
    await store.close()
    await store.close()
    with pytest.raises(Closed):
        await store.publish([message()])
    with pytest.raises(Closed):
        await store.claim(["q"])


@pytest.mark.parametrize(
    ("urls", "options"),
    [
        ([], {}),
        (["sqlite:///a.db", "sqlite:///a.db"], {}),
        (["sqlite:///a.db", "memory://"], {}),
        (["sqlite:///a.db", "amqp://localhost"], {}),
        (["sqlite:///a.db", "sqlite:///b.db"], {"shards": "a"}),
        (["sqlite:///a.db", "sqlite:///b.db"], {"reroute": "yes"}),
        (["sqlite:///a.db", "sqlite:///b.db"], {"pool": object()}),
        (["sqlite:///a.db", "sqlite:///b.db"], {"no_such": 1}),
    ],
)
def test_wrong_urls_and_options_raise_at_once(urls: list[str], options: dict[str, Any]) -> None:
    with pytest.raises((InvalidOption, Unsupported)):
        Millpond(urls, **options)


async def test_a_cancelled_close_closes_all_shards(urls: list[str]) -> None:
    for steps in range(0, 24, 2):
        store = await millpond.connect(urls)
        assert isinstance(store, ShardedStore)
        await store.workers.join()
        await store.publish([message() for _ in range(9)])
        stores = [shard.store for shard in store.members.shards if shard.store is not None]
        assert len(stores) == len(NAMES)
        claiming = asyncio.create_task(store.claim(["empty"]))  # the close waits for its parts
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await asyncio.gather(claiming, return_exceptions=True)
        await store.close()
        await until(lambda stores=stores: all(one.runner.closed for one in stores), "the end of all shards")


async def test_a_cancelled_close_closes_a_shard_that_is_still_connecting(urls: list[str]) -> None:
    store = await millpond.connect(urls)
    assert isinstance(store, ShardedStore)
    shard = store.members.shards[0]
    await shard.rest()
    connect, opened = shard._connect, asyncio.Event()
    stores: list[DatabaseStore] = []

    async def slowly(url: Url) -> DatabaseStore:
        await opened.wait()
        stores.append(await connect(url))
        return stores[0]

    shard._connect = slowly
    counting = asyncio.create_task(shard.call(lambda one: one.operations.count()))
    await asyncio.sleep(0)
    closing = asyncio.create_task(store.close())
    await until(lambda: bool(shard._connecting._waiters), "the close waits for the connection")
    closing.cancel()
    await asyncio.wait([closing])
    opened.set()
    with pytest.raises(Closed):
        await counting
    with pytest.raises(Closed):
        await stores[0].claim(["q"])
