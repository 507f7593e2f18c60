"""The commands that change the shard map: they find the moves that are needed, and continue one that is pending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.errors import InvalidOption
from millpond.seam.shards import MapChange, MoveProgress
from millpond.transports.key_range import KeyRange
from millpond.transports.shard_map import ShardMap
from millpond.transports.sharded.connect import ConnectOne, opened
from millpond.transports.sharded.mover import Mover, OnProgress, changes
from millpond.transports.url import Url


async def move(
    urls: Sequence[Url],
    connect_one: ConnectOne,
    options: dict[str, Any],
    *,
    wanted: str,
    target: str,
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> list[MoveProgress]:
    """Move a key range, or all ranges of a shard, to the target. Returns the result of each part, in their order."""
    async with opened(urls, connect_one, options) as (stores, map_):
        ranges = _ranges(map_, wanted)
        coordinator = stores[map_.shards[0]].moving
        pending = (await coordinator.pending()).change
        planned = [change for part in ranges for change in changes(map_, part, target)]
        if dry_run:
            return [await Mover(stores, map_).count(change) for change in planned]
        done: list[MoveProgress] = []
        if pending is not None and pending not in planned and _is_part(pending, wanted, ranges, target):
            planned.insert(0, pending)
        elif pending in planned:
            planned.sort(key=lambda change: change != pending)
        if not planned and pending is None and await (mover := Mover(stores, map_)).with_old_map():
            await mover.renew_maps()
        for change in planned:
            mover = Mover(stores, map_, on_progress=on_progress)
            done.append(MoveProgress(change, "done", await mover.run(change)))
            map_ = mover.map
        return done


def _ranges(map_: ShardMap, wanted: str) -> list[KeyRange]:
    """The key ranges of a shard's name, or a key range itself."""
    if wanted in map_.shards:
        return [KeyRange.parse(text) for text in map_.ranges_of(wanted)]
    if "-" not in wanted:
        raise InvalidOption(f"there is no shard {wanted!r}; there are {', '.join(map_.shards)}")
    return [KeyRange.parse(wanted)]


def _is_part(pending: MapChange, wanted: str, ranges: Sequence[KeyRange], target: str) -> bool:
    """Whether the pending change is a part of the wanted one whose map is switched already."""
    part = KeyRange.parse(pending.range)
    inside = any(one.start <= part.start and part.stop <= one.stop for one in ranges)
    return pending.target == target and (inside or pending.source == wanted)


async def abort(urls: Sequence[Url], connect_one: ConnectOne, options: dict[str, Any]) -> MapChange | None:
    """Undo a pending change before its point of no return. Returns it; None: there is none."""
    async with opened(urls, connect_one, options) as (stores, map_):
        return await Mover(stores, map_).abort()


async def sweep(
    urls: Sequence[Url], connect_one: ConnectOne, options: dict[str, Any], *, dry_run: bool = False
) -> list[MoveProgress]:
    """Move messages to their owners that wait elsewhere. Returns the numbers of each pair of shards that has some."""
    async with opened(urls, connect_one, options) as (stores, map_):
        return await Mover(stores, map_).sweep(dry_run=dry_run)
