"""A database that joins a pond gets the tokens and the settings of queues that all shards have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Retry, transports
from millpond.errors import ShardMapMismatch, ShardUnavailable
from millpond.server.grants import Role
from millpond.server.tokens import new_token
from millpond.transports.sharded.store import ShardedStore
from tests import templates
from tests.shards.conftest import NAMES, keys_of, message
from tests.shared import empty_database


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def fourth(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database."""
    return empty_database(request, request.param)


async def test_a_new_shard_has_all_tokens_and_settings(urls: list[str], store: ShardedStore, fourth: str) -> None:
    _, kept = new_token("kept", [Role.CONSUME], ["*"])
    _, gone = new_token("gone", [Role.CONSUME], ["*"])
    for token in (kept, gone):
        await store.access.add_token(token)
    await store.access.remove_token("gone")
    await store.operations.pause("q")
    await store.operations.retain("q", completed=60, failed=None)
    await store.operations.configure("r", lease=30, retry=Retry(attempts=3, multiplier=1.5), max_crashes=2)
    await transports.add_shard([*urls, fourth], "d")
    new = await millpond.connect([*urls, fourth])
    assert isinstance(new, ShardedStore)
    assert [token.name for token in await new.access.tokens()] == ["kept"]
    joined = new.members["d"]
    assert await joined.call(lambda one: one.access.had_tokens())
    assert [token.name for token in await joined.call(lambda one: one.access.tokens())] == ["kept"]
    assert await joined.call(lambda one: one.operations.settings()) == await store.operations.settings()
    await new.close()


async def test_a_pond_without_tokens_has_none_afterwards(urls: list[str], fourth: str) -> None:
    fresh = await millpond.connect(fourth)
    await fresh.access.add_token(new_token("own", [Role.CONSUME], ["*"])[1])
    await fresh.close()
    await transports.add_shard([*urls, fourth], "d")
    new = await millpond.connect([*urls, fourth])
    assert await new.access.tokens() == [] and not await new.access.had_tokens()
    await new.close()


async def test_a_shard_that_takes_a_range_over_gets_settings_that_it_missed(
    urls: list[str], store: ShardedStore, fourth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.operations.configure("r", max_crashes=2)
    await transports.add_shard([*urls, fourth], "d")
    # A handle with the old URLs reaches the others only.
    await store.operations.pause("q")
    await store.operations.retain("s", completed=60, failed=60)
    await store.operations.pause("r")
    await transports.move_range([*urls, fourth], "-55", "d")
    new = await millpond.connect([*urls, fourth])
    assert isinstance(new, ShardedStore)
    assert await new.members["d"].call(lambda one: one.operations.settings()) == await store.operations.settings()
    await new.close()


# --- programs that do not have its URL ------------------------------------------------------------------


async def test_a_handle_without_its_url_goes_on_with_all_other_shards(
    urls: list[str], store: ShardedStore, tmp_path: Path
) -> None:
    """Connections that are opened anew show the newer map."""
    own = {name: keys_of(store, name, 2) for name in NAMES}
    more = [*urls, templates.migrated(tmp_path / "d.db")]
    await transports.add_shard(more, "d")
    for shard in store.members.shards:
        await shard.rest()
    await store.publish([message(key) for keys in own.values() for key in keys])
    assert store.members.map.shards == (*NAMES, "d")
    assert (await store.operations.count(["q"]))[0].missing == ("d",)
    with pytest.raises(ShardUnavailable, match="not done on the shards d"):
        await store.operations.pause("q")
    await transports.move_range(more, "a", "d")
    with pytest.raises(ShardMapMismatch, match="'d'"):
        await store.publish([message(own["a"][0])])
    await transports.move_range(more, "b", "c")
    await store.publish([message(own["b"][0])])
    claimed: list[Any] = await store.claim(["q"], 100)
    assert claimed == [], "paused"


async def test_no_message_is_rerouted_to_a_shard_without_a_range(urls: list[str], tmp_path: Path) -> None:
    more = [*urls, templates.migrated(tmp_path / "d.db")]
    await transports.add_shard(more, "d")
    store = await millpond.connect(more, reroute=True)
    assert isinstance(store, ShardedStore)
    for name in NAMES:
        store.members[name].breaker.failed()
    with pytest.raises(ShardUnavailable):
        await store.publish([message()])
    await store.close()
