"""An operator whose view of the map is old when it begins changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millpond import transports
from millpond.errors import ShardMapMismatch
from millpond.seam.shards import MapChange
from millpond.transports.database.moves.move_steps import DatabaseMoving
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

    async def late(self: DatabaseMoving, change: MapChange | None, *args: Any, **options: Any) -> Any:
        if change is None and not moved:
            moved.append(True)
            if kill is None:
                await run(urls)
            else:
                with pytest.raises(Killed):
                    await run(urls, kill)
        return await begin(self, change, *args, **options)

    monkeypatch.setattr(DatabaseMoving, "begin", late)
    more = [*urls, f"sqlite:///{tmp_path / 'd'}.db"]
    with pytest.raises(ShardMapMismatch, match="nothing was added"):
        await transports.add_shard(more, "d", migrate=True)
    await transports.move_range(urls, "-55", "b")
    assert await versions(urls) == {(2, None)}
    map_ = await transports.add_shard(more, "d")
    assert (map_.version, map_.ranges_of("b")) == (3, ["-aa"])


async def test_an_abort_undoes_only_the_change_that_it_found(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another operator undid that one meanwhile, and began a change that is past its point of no return."""
    with pytest.raises(Killed):
        await run(urls, ("switch source", 1))
    read, raced = DatabaseMoving.pending, asyncio.Event()
    change = MapChange("55-aa", "b", "c")

    async def late(self: DatabaseMoving) -> Any:
        found = await read(self)
        if not raced.is_set() and found.change is not None:
            raced.set()
            await transports.abort_move(urls)
            with pytest.raises(Killed):
                await run(urls, ("switch target", 1), change=change)
        return found

    monkeypatch.setattr(DatabaseMoving, "pending", late)
    with pytest.raises(ShardMapMismatch, match="nothing was undone"):
        await transports.abort_move(urls)
    assert {one.change for one in await transports.shard_status(urls)} == {None, str(change)}
    await transports.move_range(urls, change.range, "c")
    assert await versions(urls) == {(2, None)}
