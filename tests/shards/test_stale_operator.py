"""An operator whose view of the map is old when it begins changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond import transports
from millpond.errors import ShardMapMismatch
from millpond.seam.shards import MapChange
from millpond.transports.database.move_steps import DatabaseMoving
from millpond.transports.sharded.connect import opened
from millpond.transports.sharded.mover import Mover
from millpond.transports.url import Url
from tests.shards.test_moves import Killed, connect_one, run


async def versions(urls: list[str]) -> set[tuple[int | None, str | None]]:
    return {(one.version, one.change) for one in await transports.shard_status(urls)}


async def test_a_range_that_went_elsewhere_meanwhile_does_not_move(urls: list[str]) -> None:
    async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
        await transports.move_range(urls, "-55", "c")
        with pytest.raises(ShardMapMismatch, match="'a' no longer has -55"):
            await Mover(stores, map_).run(MapChange("-55", "a", "b"))
    assert await versions(urls) == {(2, None)}


@pytest.mark.parametrize("kill", [None, ("switch target", 1)], ids=["ended", "pending"])
async def test_a_shard_is_not_added_beside_a_move(
    urls: list[str], tmp_path: Path, kill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move begins after the maps were read."""
    begin = DatabaseMoving.begin
    moved: list[bool] = []

    async def late(self: DatabaseMoving, change: MapChange | None) -> Any:
        if change is None and not moved:
            moved.append(True)
            if kill is None:
                await run(urls)
            else:
                with pytest.raises(Killed):
                    await run(urls, kill)
        return await begin(self, change)

    monkeypatch.setattr(DatabaseMoving, "begin", late)
    more = [*urls, f"sqlite:///{tmp_path / 'd'}.db"]
    with pytest.raises(ShardMapMismatch, match="nothing was added"):
        await transports.add_shard(more, "d", migrate=True)
    await transports.move_range(urls, "-55", "b")
    assert await versions(urls) == {(2, None)}
    map_ = await transports.add_shard(more, "d")
    assert (map_.version, map_.ranges_of("b")) == (3, ["-aa"])
