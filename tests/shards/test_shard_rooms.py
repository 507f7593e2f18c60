"""Unique and periodic messages, tokens, order and priority over shards."""

from __future__ import annotations

from typing import Any

import pytest

import millpond
from millpond import Ack, Capability, Message, Unique
from millpond.control import Control
from millpond.control.lag import with_lag
from millpond.errors import ShardUnavailable, UnknownStream, Unsupported, WrongShard
from millpond.message import id_of
from millpond.schedule import Periodic
from millpond.seam.access import Action
from millpond.server.grants import Role
from millpond.server.tokens import new_token
from millpond.transports.sharded.store import ShardedStore
from tests.shards.conftest import NAMES, keys_of, message
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("patient")


def away(store: ShardedStore, shard: str, patch: pytest.MonkeyPatch) -> None:
    """Let a shard count as missing."""
    breaker = store.members[shard].breaker
    patch.setattr(breaker, "allows", lambda: False)
    breaker.failed()


async def rows_by_shard(store: ShardedStore, queue: str = "q") -> dict[str, list[Any]]:
    found = {}
    for shard in store.members.shards:
        assert shard.store is not None
        found[shard.name] = await shard.store.operations.browse(queue, limit=1000)
    return found


def is_placed(store: ShardedStore, by_shard: dict[str, list[Any]]) -> bool:
    place = store.members.map.place
    return all(place(row.key, row.id.bytes) == name for name, rows in by_shard.items() for row in rows)


# --- unique ---------------------------------------------------------------------------------------------


async def test_a_unique_value_without_a_key_is_unique_over_all_shards(store: ShardedStore) -> None:
    assert Capability.UNIQUE in store.capabilities
    values = [f"value-{n}" for n in range(20)]
    first = await store.publish([message(unique=Unique(value)) for value in values])
    again = await store.publish([message(unique=Unique(value)) for value in reversed(values)])
    assert all(one.new for one in first) and not any(one.new for one in again)
    assert [one.id for one in again] == [one.id for one in reversed(first)]
    by_shard = await rows_by_shard(store)
    assert is_placed(store, by_shard) and all(by_shard.values())
    assert {row.key for rows in by_shard.values() for row in rows} == set(values)


async def test_with_a_key_a_unique_value_belongs_to_the_key(store: ShardedStore) -> None:
    (a,), (b,) = keys_of(store, "a", 1), keys_of(store, "b", 1)
    done = [(await store.publish([message(key, unique=Unique("v"))]))[0].new for key in (a, b, a, b)]
    assert done == [True, True, False, False]


# --- periodic -------------------------------------------------------------------------------------------


def periodic(name: str) -> Periodic:
    return Periodic(name=name, queue="q", schedule="every 1", payload=b"{}")


async def test_a_schedule_is_on_the_shard_of_its_name_and_so_are_its_messages(store: ShardedStore) -> None:
    names = [f"report {n}" for n in range(12)]
    await store.periodic.declare([periodic(name) for name in names])
    assert [row.periodic.name for row in await store.periodic.all()] == sorted(names)

    async def published() -> bool:
        await store.periodic.publish_due()
        return {row.key for row in await store.operations.browse("q", limit=1000)} == set(names)

    await until(published)
    by_shard = await rows_by_shard(store)
    assert is_placed(store, by_shard) and all(by_shard.values())
    assert await store.periodic.change(names[0], paused=True)
    assert [row.paused for row in await store.periodic.all()].count(True) == 1
    assert await store.periodic.remove(names[0]) and not await store.periodic.remove(names[0])
    assert len(await store.periodic.all()) == len(names) - 1


async def test_a_schedule_that_a_changed_map_left_behind_publishes_nothing(store: ShardedStore) -> None:
    (name,) = keys_of(store, "a", 1)
    await store.periodic.declare([periodic(name)])
    rows = await store.members["a"].call(lambda one: one.moving.schedules())
    await store.members["b"].call(lambda one: one.moving.keep_schedules(0, rows, []))
    await store.periodic.remove(name)
    assert await store.periodic.all() == []
    await store.periodic.declare([periodic(*keys_of(store, "b", 1))])

    async def published() -> bool:
        await store.periodic.publish_due()
        return bool(await store.operations.browse("q"))

    await until(published)
    assert name not in {row.key for row in await store.operations.browse("q", limit=1000)}


async def test_a_schedule_of_a_missing_shard_is_declared_when_it_is_back(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,), (b,) = keys_of(store, "a", 1), keys_of(store, "b", 1)
    with monkeypatch.context() as patched:
        away(store, "b", patched)
        await store.periodic.declare([periodic(b), periodic(a)])
        assert [row.periodic.name for row in await store.periodic.all()] == [a]

    async def declared() -> bool:
        await store.periodic.publish_due()
        return {row.periodic.name for row in await store.periodic.all()} == {a, b}

    await until(declared)


async def test_the_url_of_one_shard_declares_no_schedule(urls: list[str]) -> None:
    alone = await millpond.connect(urls[0])
    await alone.periodic.declare([])
    with pytest.raises(WrongShard):
        await alone.periodic.declare([periodic("report")])
    await alone.close()


# --- access ---------------------------------------------------------------------------------------------


async def test_tokens_are_on_every_shard(store: ShardedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kept = new_token("kept", [Role.CONSUME], ["*"])
    _, gone = new_token("gone", [Role.CONSUME], ["*"])
    for token in (kept, gone):
        await store.access.add_token(token)
    for shard in store.members.shards:
        assert shard.store is not None
        assert [token.name for token in await shard.store.access.tokens()] == ["gone", "kept"]
    with monkeypatch.context() as patched:
        away(store, "b", patched)
        assert [token.name for token in await store.access.tokens()] == ["gone", "kept"]
        with pytest.raises(ShardUnavailable, match="not done on the shards b"):
            await store.access.remove_token("gone")
    await until(lambda: store.members["b"].available)
    # It is still on the shard that was away, and counts no more.
    assert [token.name for token in await store.access.tokens()] == ["kept"]
    assert await store.access.remove_token("kept") and await store.access.had_tokens()
    await store.access.reset_tokens()
    assert not await store.access.had_tokens()


async def test_actions_are_recorded_once_also_without_a_shard(
    store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.access.record(Action(actor="ann", action="pause"))
    with monkeypatch.context() as patched:
        away(store, "a", patched)
        await store.access.record(Action(actor="ann", action="resume"))
    await until(lambda: store.members["a"].available)
    assert sorted(action.action for action in await store.access.actions()) == ["pause", "resume"]
    assert len(await store.access.actions(1)) == 1


# --- order and priority ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_order_is_exact_on_each_shard(store: ShardedStore, limit: int) -> None:
    keys = {name: keys_of(store, name, 1)[0] for name in NAMES}
    sent: dict[str, list[bytes]] = {name: [] for name in NAMES}
    for n in range(30):
        name = NAMES[n % 3]
        sent[name].append(b"%d" % n)
        await store.publish([message(keys[name], b"%d" % n)])
    assert await claimed(store, limit) == sent


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_priority_is_exact_on_each_shard(store: ShardedStore, limit: int) -> None:
    keys = {name: keys_of(store, name, 1)[0] for name in NAMES}
    numbers = [(n * 37) % 30 for n in range(30)]
    await store.publish(
        [
            Message(queue="q", payload=b"%d" % n, key=keys[NAMES[n % 3]], priority=n, id=id_of(n.to_bytes(16, "big")))
            for n in numbers
        ]
    )
    expected = {name: [b"%d" % n for n in sorted(numbers) if n % 3 == i] for i, name in enumerate(NAMES)}
    assert await claimed(store, limit) == expected


async def claimed(store: ShardedStore, limit: int) -> dict[str, list[bytes]]:
    """Bodies in the order of claims, by shard. Each round takes at most `limit` messages."""
    found: dict[str, list[bytes]] = {name: [] for name in NAMES}
    while claims := await store.claim(["q"], limit):
        for claim in claims:
            found[str(claim.receipt.shard)].append(claim.message.payload)
        await store.settle([Ack(claim.receipt) for claim in claims])
    return found


async def test_operators_see_and_release_a_stream_on_all_shards(store: ShardedStore) -> None:
    """Spark opens a stream of the same name on each database."""
    messages = [message(key) for name in NAMES for key in keys_of(store, name, 3)]
    await store.publish(messages)
    held = {"a": 2, "b": 3}
    for name, count in held.items():
        inner: Any = await store.members[name].connect()
        epoch, acked = await inner.streams.open("audit", above=0 if name == "a" else 6)
        assert (await inner.streams.claim("audit", epoch, acked + 1, ["q"], count)).messages == count
    (view,) = await with_lag(store.streams, store.operations)
    assert (view.status.name, view.status.held, view.status.epoch) == ("audit", 5, 7)
    assert (view.queues, view.waiting) == (("q",), 4)
    assert [one.text for one in await Control(store).doctor() if one.kind == "undriven-stream"] == []
    assert await store.streams.release("audit") == 5
    assert [one.held for one in await store.streams.status()] == [0]
    with pytest.raises(UnknownStream, match="audits"):
        await store.streams.release("audits")
    with pytest.raises(Unsupported, match="STREAMS"):
        await store.streams.open("audit")


@pytest.mark.parametrize("room", ["bulk", "exports"])
async def test_rooms_that_spark_opens_on_each_shard_are_named_as_missing(store: ShardedStore, room: str) -> None:
    with pytest.raises(Unsupported, match=room.upper()):
        getattr(store, room).anything  # noqa: B018
