"""Unique values move with the key range of their messages. A value never has two messages, wherever the mover stops."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, Nack, Unique, transports
from millpond.errors import ShardMapChanged
from millpond.message import Published
from millpond.seam.shards import MapChange
from millpond.transports.sharded.store import ShardedStore
from tests.shards.conftest import keys_of, message, three_shards
from tests.shards.test_moves import Killed, bodies, run

pytestmark = pytest.mark.timeout(300)
BACK = MapChange("-55", "b", "a")


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return three_shards(request, tmp_path)


@pytest.fixture
async def store(urls: list[str]) -> AsyncIterator[ShardedStore]:
    opened = await millpond.connect(urls, busy_timeout=1)
    assert isinstance(opened, ShardedStore)
    yield opened
    await opened.close()


async def publish(store: ShardedStore, value: str, body: bytes = b"x", **rule: Any) -> Published:
    key = rule.pop("key", None)
    (found,) = await store.publish([message(key, body, unique=Unique(value, **rule))])
    return found


async def test_a_value_is_known_to_the_new_owner_and_after_the_way_back(urls: list[str], store: ShardedStore) -> None:
    kept, changed, handled, free = keys_of(store, "a", 4)
    first = [await publish(store, value) for value in (kept, changed)]
    window = {"while_": timedelta(hours=1)}
    await publish(store, handled, **window)
    await publish(store, free)
    for claim in await store.claim(["q"], 10):
        ended = claim.message.key in (handled, free)
        await store.settle([Ack(claim.receipt) if ended else Nack(claim.receipt, delay=0)])
    for change in (None, BACK):
        await run(urls, **({} if change is None else {"change": change}))
        again = await publish(store, kept)
        assert (again.new, again.id) == (False, first[0].id)
        replaced = await publish(store, changed, b"new", on_conflict="replace")
        assert (replaced.result, replaced.id) == ("replaced", first[1].id)
        assert not (await publish(store, handled, **window)).new
    assert (await publish(store, free)).new
    assert sorted((await bodies(store)).elements()) == [b"new", b"x", b"x"]
    assert (await publish(store, kept)).new, "its message was handled"


@pytest.mark.slow_on_servers
@pytest.mark.parametrize(
    ("step", "occurrence"),
    [
        *((step, 1) for step in ("switch source", "switch target", "end")),
        *itertools.product(("copy unique", "copy", "remove", "activate", "note arrivals"), (1, 2)),
    ],
)
async def test_a_mover_that_is_killed_leaves_one_message_of_a_value(
    urls: list[str], store: ShardedStore, step: str, occurrence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.transports.sharded.mover.BATCH", 10)
    values = keys_of(store, "a", 25)
    await store.publish([message(None, value.encode(), unique=Unique(value)) for value in values])
    with pytest.raises(Killed):
        await run(urls, (step, occurrence))

    async def again(value: str) -> bool:
        while True:
            try:
                return (await publish(store, value, b"second")).new
            except ShardMapChanged:
                await asyncio.sleep(0.02)

    publishing = [asyncio.ensure_future(again(value)) for value in values]
    await run(urls)
    assert not any(await asyncio.gather(*publishing))
    assert sorted((await bodies(store)).elements()) == sorted(value.encode() for value in values)
    assert all([(await publish(store, value)).new for value in values[:3]]), "no mark is left"


async def test_a_value_waits_for_its_message_that_is_claimed_at_the_old_owner(
    urls: list[str], store: ShardedStore
) -> None:
    value, other = keys_of(store, "a", 2)
    await publish(store, value, while_="unfinished")
    (claim,) = await store.claim(["q"])
    shown = asyncio.Event()
    moving = asyncio.ensure_future(
        transports.move_range(urls, "-55", "b", on_progress=lambda one: shown.set() if one.claimed else None)
    )
    await shown.wait()
    assert (await publish(store, other)).new, "other values of the range do not wait"
    with pytest.raises(ShardMapChanged, match="on its way from shard 'a'"):
        await publish(store, value, while_="unfinished")
    await store.settle([Ack(claim.receipt)])
    await moving
    assert (await publish(store, value, while_="unfinished")).new


async def test_values_of_the_new_owner_are_not_overwritten_by_a_later_mover(
    urls: list[str], store: ShardedStore
) -> None:
    """A mover is killed after the new owner has accepted the range, and the value got another message there."""
    (value,) = keys_of(store, "a", 1)
    await publish(store, value, b"first")
    with pytest.raises(Killed):
        await run(urls, ("end", 1))
    assert sorted(await bodies(store)) == [b"first"]
    second = await publish(store, value, b"second")
    assert second.new
    await run(urls)
    assert (await publish(store, value, b"third")).id == second.id


async def test_keys_on_one_shard_have_their_own_values(urls: list[str], store: ShardedStore) -> None:
    one, other = keys_of(store, "a", 2)
    found = [(await publish(store, "v", key=key)).new for key in (one, other, one, other)]
    assert found == [True, True, False, False]
    await run(urls)
    assert not any([(await publish(store, "v", key=key)).new for key in (one, other)])
