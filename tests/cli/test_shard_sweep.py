"""`millpond shards sweep` moves messages to the shards that own them."""

import asyncio
from pathlib import Path

import pytest

from millpond import transports
from millpond.transports.sharded.connect import opened
from millpond.transports.sharded.mover import Mover
from millpond.transports.url import Url
from tests.cli.conftest import Cli
from tests.shards.test_moves import Killed, connect_one


@pytest.fixture
def two(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two databases that became shards when one of them had 50 messages."""
    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    lines = "".join(f'{{"n": {n}}}\n' for n in range(50))
    cli.ok("migrate", "--url", urls[0])
    cli.ok("publish", "q", "--json-lines", "-", "--url", urls[0], stdin=lines.encode())
    monkeypatch.setenv("MILLPOND_URL", " ".join(urls))
    cli.ok("shards", "init", "--names", "a,b", "--with-messages")
    return urls


def test_messages_move_to_their_owners(cli: Cli, two: list[str]) -> None:
    (planned,) = cli.ok("shards", "sweep", "--dry-run", "--json").json["moves"]
    assert planned["change"] == "move misplaced messages from a to b" and planned["waiting"] > 0
    (moved,) = cli.ok("shards", "sweep", "--json").json["moves"]
    assert moved["moved"] == planned["waiting"]
    assert cli.ok("shards", "sweep").out.strip() == "none found"
    found = {one["name"]: one["live"] for one in cli.ok("shards", "status", "--json").json["shards"]}
    assert found == {"a": 50 - moved["moved"], "b": moved["moved"]}


def test_status_shows_a_sweep_that_was_interrupted(cli: Cli, two: list[str]) -> None:
    async def kill(step: str) -> None:
        if step == "activate":
            raise Killed(step)

    async def interrupted() -> None:
        async with opened([Url(url) for url in two], connect_one, {}) as (stores, map_):
            await Mover(stores, map_, on_step=kill).sweep()

    with pytest.raises(Killed):
        asyncio.run(interrupted())
    assert "finish it: millpond shards sweep" in cli("shards", "status").err
    cli.ok("shards", "sweep")
    assert cli("shards", "status").err == ""
    assert sum(one.live for one in asyncio.run(transports.shard_status(two))) == 50
