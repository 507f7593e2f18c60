"""Change the shard map of a running pond: a key range moves from one shard to another one.

The steps and their order are those of the model in `tests/shards/model`. A mover may be killed after any of them; the
next one raises the epoch on all shards, completes or deletes the copies that are left, and continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from millpond.errors import InvalidOption, ShardMapMismatch
from millpond.loop import Backoff
from millpond.seam.shards import MapChange, MoveProgress
from millpond.transports.database.moves.common_rows import CommonRows
from millpond.transports.database.moves.move_steps import LiveMessage, Pending, become_mover
from millpond.transports.database.sql.columns import WAITING
from millpond.transports.database.store import DatabaseStore
from millpond.transports.key_range import KeyRange
from millpond.transports.routing import ring_point
from millpond.transports.shard_map import ShardMap
from millpond.transports.sharded.dedupe_copy import DedupeCopy
from millpond.transports.sharded.known_ids import KnownIds

PAGE = 5_000
"""Messages whose place is computed at once."""
BATCH = 500
"""Messages that move in one transaction of each shard."""
BATCH_BYTES = 2 * 1024 * 1024
"""Maximum size of their bodies; a single one may be larger. A server ends a transaction that is silent for seconds, as
while a busy machine prepares a large statement."""
_FEW = 32
"""Messages that are read first, before their size is known."""

MISPLACED = "misplaced messages"

_FIRST = UUID(int=0)
_BODY = WAITING.index("payload")


OnProgress = Callable[[MoveProgress], None]
OnStep = Callable[[str], Awaitable[None]]


async def _go_on(step: str) -> None:
    """No pause between steps."""


def changes(map_: ShardMap, wanted: KeyRange, target: str) -> list[MapChange]:
    """The moves that give a range to the target: one for each part that another shard owns."""
    if target not in map_.shards:
        raise InvalidOption(
            f"there is no shard {target!r}; there are {', '.join(map_.shards)}. Add one with millpond shards add"
        )
    return [MapChange(str(part), owner, target) for part, owner in map_.parts_of(wanted) if owner != target]


class Mover:
    """One operator's attempt to make changes, on stores of all shards."""

    def __init__(
        self,
        stores: Mapping[str, DatabaseStore],
        map_: ShardMap,
        *,
        on_progress: OnProgress | None = None,
        on_step: OnStep = _go_on,
    ) -> None:
        self.stores = stores
        self.map = map_
        """The newest version that a shard has."""
        self._on_progress = on_progress
        self._on_step = on_step
        self._moved = 0
        self._at_once = _FEW
        """Messages that are read at once, so that their bodies are about as large as a batch may be."""

    @property
    def _coordinator(self) -> DatabaseStore:
        return self.stores[self.map.shards[0]]

    async def run(self, change: MapChange) -> int:
        """Make one change, or continue it. Returns the number of messages that this mover moved."""
        await self._on_step("begin")
        epoch = (await self._begin(change)).epoch
        self._report(change, "fence")
        await self._take_over(epoch, change.source)
        await self._switch(epoch, change)
        await self._drain(epoch, change)
        await self._known_ids(epoch, change).end()
        await self._on_step("end")
        await self._coordinator.moving.end(epoch)
        # A copy that still waits for its id is known to be the only one by the record of its move.
        if not any([await store.moving.count_incoming() for store in self.stores.values()]):
            await self.stores[change.source].moving.forget_moved()
        self._report(change, "done")
        return self._moved

    async def abort(self) -> MapChange | None:
        """Undo the pending change if no shard has the new map yet. Returns the change."""
        change = (await self._coordinator.moving.pending()).change
        if change is None:
            return None
        if self._is_switched(change):
            raise ShardMapMismatch(
                f"the change ({change}) is past the point of no return: version {self.map.version} of the map is in "
                "use. Finish it with the same command; then move the range back"
            )
        epoch = (await self._begin(change, undo=True)).epoch
        await self._take_over(epoch, change.source)
        record = await self.stores[change.source].shards.record()
        if record is not None and record.map.version > self.map.version:
            raise ShardMapMismatch("another operator went past the point of no return meanwhile; finish the change")
        await self._known_ids(epoch, change).end()
        await self._coordinator.moving.end(epoch)
        return change

    async def _begin(self, change: MapChange | None, *, undo: bool = False) -> Pending:
        rooms = [store.moving for store in self.stores.values()]
        return await become_mover(self._coordinator.moving, rooms, change, undo=undo)

    async def _take_over(self, epoch: int, source: str) -> None:
        """Fence earlier movers on all shards, the old owner first; then complete or delete their copies."""
        for name in sorted(self.stores, key=lambda one: one != source):
            await self._on_step("fence")
            await self.stores[name].moving.fence(epoch)
        for name in self.stores:
            await self._collect(epoch, name)

    async def _collect(self, epoch: int, name: str) -> None:
        room = self.stores[name].moving
        after = _FIRST
        while copies := await room.incoming(after, BATCH):
            after = copies[-1][0]
            moved: list[UUID] = []
            for source in {source for _, source, _ in copies}:
                if source not in self.stores:
                    raise ShardMapMismatch(f"shard {name!r} has copies of an unknown shard {source!r}; give its URL")
                mine = {id_: by for id_, owner, by in copies if owner == source}
                recorded = await self.stores[source].moving.moved(list(mine))
                moved += [id_ for id_, by in mine.items() if recorded.get(id_) == by]
            others = [id_ for id_, _, _ in copies if id_ not in set(moved)]
            await self._on_step("collect")
            await room.activate(epoch, moved, others)

    # --- the map ------------------------------------------------------------------------------------

    def _is_switched(self, change: MapChange) -> bool:
        wanted = KeyRange.parse(change.range)
        return self.map.parts_of(wanted) == [(wanted, change.target)]

    async def _switch(self, epoch: int, change: MapChange) -> None:
        """The old owner stops to accept the range; the new one gets its dedupe rows, and only then accepts it."""
        source, target = self.stores[change.source].moving, self.stores[change.target].moving
        # Read again: an earlier mover may have switched after the maps were read, and before it was fenced.
        for store in self.stores.values():
            record = await store.shards.record()
            if record is not None and record.map.version > self.map.version:
                self.map = record.map
        dedupe = DedupeCopy(source, target, epoch, self._on_step)
        if not self._is_switched(change):
            wanted = KeyRange.parse(change.range)
            if self.map.parts_of(wanted) != [(wanted, change.source)]:
                await self._coordinator.moving.end(epoch)
                raise ShardMapMismatch(
                    f"another operator changed the shard map meanwhile, and {change.source!r} no longer has "
                    f"{change.range}; nothing was changed. Run the command again"
                )
            self._report(change, "copy dedupe")
            await dedupe.most()
            known = self._known_ids(epoch, change)
            async for page in self._pages(change):
                await known.await_live([one.id for one in page])
            await known.copy_archived(wanted)
            self.map = self.map.moved(KeyRange.parse(change.range), change.target)
        self._report(change, "switch")
        await self._on_step("switch source")
        await source.switch(epoch, self.map)
        record = await self.stores[change.target].shards.record()
        if record is None or record.map.version < self.map.version:
            # Later the new owner accepts the range, and its rows are newer.
            await dedupe.rest()
            await self._on_step("add settings")
            rows = await CommonRows(self.stores[change.source].runner).settings()
            await CommonRows(self.stores[change.target].runner).add_settings(epoch, rows)
            await self._copy_unique(epoch, change)
            await self._copy_schedules(epoch, change)
        await self._on_step("switch target")
        await target.switch(epoch, self.map)
        await self._on_step("drop schedules")
        await source.drop_schedules(epoch, [row[0] for row in await self._schedules(change.source, change)])
        for name, store in self.stores.items():
            if name not in (change.source, change.target):
                await self._on_step("switch other")
                await store.moving.switch(epoch, self.map)

    def _known_ids(self, epoch: int, change: MapChange) -> KnownIds:
        return KnownIds(self.stores[change.source], self.stores[change.target], epoch, self._on_step)

    async def _copy_unique(self, epoch: int, change: MapChange) -> None:
        """Copy the unique values of the range, while neither owner accepts it."""
        source, target = self.stores[change.source].moving, self.stores[change.target].moving
        wanted = KeyRange.parse(change.range)
        after = _FIRST
        while rows := await source.unique_page(after, PAGE):
            after = rows[-1].id
            mine = [row for row in rows if not row.keyed or wanted.contains(ring_point(row.key, row.message.bytes))]
            for start in range(0, len(mine), BATCH):
                await self._on_step("copy unique")
                await target.keep_unique(epoch, change.source, mine[start : start + BATCH])

    async def _copy_schedules(self, epoch: int, change: MapChange) -> None:
        """Copy the schedules of periodic messages whose names are in the range, while no shard publishes them."""
        rows = await self._schedules(change.source, change)
        old = await self._schedules(change.target, change)  # of an earlier time, when the range was there
        await self._on_step("copy schedules")
        await self.stores[change.target].moving.keep_schedules(epoch, rows, [row[0] for row in old])

    async def _schedules(self, shard: str, change: MapChange) -> list[list[Any]]:
        wanted = KeyRange.parse(change.range)
        rows = await self.stores[shard].moving.schedules()
        return [row for row in rows if wanted.contains(ring_point(row[0], b""))]

    async def _note_arrivals(self, epoch: int, change: MapChange) -> int:
        """Let publishers no longer wait for messages of unique values that have come, or were settled.

        Returns the number of values that still wait.
        """
        source, target = self.stores[change.source].moving, self.stores[change.target].moving
        after, waiting = _FIRST, 0
        while rows := await target.awaited(change.source, after, BATCH):
            after = rows[-1][0]
            left = await source.present([message for _, message in rows])
            copies = await target.copies([message for _, message in rows])
            if done := [id_ for id_, message in rows if message not in left | copies]:
                await self._on_step("note arrivals")
                await target.arrived(epoch, done)
            waiting += len(rows) - len(done)
        return waiting

    # --- the messages -------------------------------------------------------------------------------

    async def _drain(self, epoch: int, change: MapChange) -> None:
        """Move messages that wait until the old owner has none of the range.

        Later ones are moved too, but not waited for: only plain SQL still writes them, perhaps for ever.
        """
        backoff = Backoff(0.05, 1.0)
        # A message keeps its time when it moves: it may come from a shard whose clock is ahead.
        switched_at = max([await store.moving.clock() for store in self.stores.values()])
        # A clock may also have been set back: messages of the first pass count, whatever their time.
        known: set[UUID] = set()
        is_first = True
        while True:
            before = self._moved
            left = claimed = found = 0
            async for page in self._pages(change):
                later = {one.id for one in page if one.created_at > switched_at}
                if is_first:
                    known |= later
                found += len(page) - len(later - known)
                waiting, running = _by_state(page)
                claimed += len(running)
                # Some may have been published after the ids were read.
                await self._known_ids(epoch, change).await_live(running)
                for part in self._parts(waiting):
                    left += len(part) - await self._move(epoch, change, part)
                    self._report(change, "move", left, claimed)
            is_first = False
            await self._collect(epoch, change.target)  # copies whose id was taken there for a while
            unique = await self._note_arrivals(epoch, change)
            copies = await self.stores[change.target].moving.count_incoming()
            self._report(change, "move", left + copies, claimed)
            if not found and not copies and not unique:
                return  # a whole pass found nothing
            if claimed:
                # Perhaps no worker runs here any more that would notice a dead one, or the end of a lease.
                await self.stores[change.source].workers.reap_if_due(may_wait=True)
            if self._moved == before:
                await asyncio.sleep(backoff.next())

    async def _pages(self, change: MapChange) -> AsyncIterator[list[LiveMessage]]:
        """Live messages of the range at the old owner."""
        wanted = KeyRange.parse(change.range)
        after = _FIRST
        while rows := await self.stores[change.source].moving.page(after, PAGE):
            after = rows[-1].id
            yield [one for one in rows if wanted.contains(ring_point(one.key, one.id.bytes))]

    async def sweep(self, *, dry_run: bool = False) -> list[MoveProgress]:
        """Move messages that wait on a shard that does not own them, as plain SQL may have written them.

        Claimed ones are counted and stay.
        """
        if dry_run:
            pending = await self._coordinator.moving.pending()
            _check_nothing_pending(pending)
            if old := await self.with_old_map():
                raise ShardMapMismatch(
                    f"the shards {', '.join(old)} have an older version of the shard map, as after a restore; without "
                    "--dry-run the command gives them the newest one first"
                )
        else:
            pending = await self.renew_maps()
        done: list[MoveProgress] = []
        for source, store in self.stores.items():
            after = _FIRST
            counts: dict[str, list[int]] = {}
            while rows := await store.moving.page(after, PAGE):
                after = rows[-1].id
                waiting: dict[str, list[UUID]] = {}
                for one in rows:
                    owner = self.map.place(one.key, one.id.bytes)
                    if owner != source:
                        counts.setdefault(owner, [0, 0, 0])[2] += not one.waits
                        waiting.setdefault(owner, []).extend([one.id] if one.waits else [])
                for owner, ids in waiting.items():
                    change = MapChange(MISPLACED, source, owner)
                    for part in self._parts(ids):
                        moved = 0 if dry_run else await self._move(pending.epoch, change, part)
                        counts[owner][0] += moved
                        counts[owner][1] += len(part) - moved
            done += [
                MoveProgress(MapChange(MISPLACED, source, owner), "done", *found) for owner, found in counts.items()
            ]
        return done

    async def renew_maps(self) -> Pending:
        """Give the newest map to shards that have an older one though no change is pending: they were restored."""
        _check_nothing_pending(await self._coordinator.moving.pending())
        pending = await self._begin(None)
        _check_nothing_pending(pending)
        await self._take_over(pending.epoch, self.map.shards[0])
        for name in await self.with_old_map():
            await self._on_step("renew map")
            await self.stores[name].moving.switch(pending.epoch, self.map)
        return pending

    async def with_old_map(self) -> list[str]:
        """Names of the shards that have an older version of the map."""
        old = []
        for name, store in self.stores.items():
            record = await store.shards.record()
            if record is None or (record.map != self.map and record.map.version >= self.map.version):
                raise ShardMapMismatch(
                    f"shard {name!r} has another version of the shard map now; run the command again"
                )
            if record.map != self.map:
                old.append(name)
        return old

    def _parts(self, ids: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
        start = 0
        while start < len(ids):
            yield (part := ids[start : start + min(self._at_once, BATCH)])
            start += len(part)

    async def _move(self, epoch: int, change: MapChange, ids: Sequence[UUID]) -> int:
        """Copy, remove, activate. Returns the number of messages that moved."""
        source, target = self.stores[change.source].moving, self.stores[change.target].moving
        # A copy that waits for its id is the only one of its message: no other message replaces it.
        copies = await target.copies(ids)
        if len(copies) == len(ids):
            return 0
        rows, once, steps = await source.waiting([id_ for id_ in ids if id_ not in copies])
        # Plain SQL wrote these again after this mover had moved them: the old record would prove a move of the new one.
        recorded = await source.moved([row[0] for row in rows]) if rows else {}
        if again := [id_ for id_, by in recorded.items() if by == epoch]:
            await source.forget(epoch, again)
        size = max(1, sum(len(row[_BODY]) for row in rows))
        self._at_once = max(1, min(BATCH, 2 * self._at_once, self._at_once * BATCH_BYTES // size))
        done = 0
        while rows:
            part = [rows.pop()]
            size = len(part[0][_BODY])
            while rows and size + len(rows[-1][_BODY]) < BATCH_BYTES:
                part.append(rows.pop())
                size += len(part[-1][_BODY])
            mine = {row[0] for row in part}
            await self._on_step("copy")
            taken = await target.copy(
                epoch,
                change.source,
                part,
                [row for row in once if row[0] in mine],
                [row for row in steps if row[0] in mine],
            )
            await self._on_step("remove")
            part = [row for row in part if row[0] not in taken]
            moved = await source.remove(epoch, change.target, part) if part else set()
            await self._on_step("activate")
            await target.activate(epoch, sorted(moved), sorted(mine - moved - taken))
            done += len(moved)
            self._moved += len(moved)
        return done

    async def count(self, change: MapChange) -> MoveProgress:
        """The messages that a change would move, for a dry run."""
        left = claimed = 0
        async for page in self._pages(change):
            waiting, running = _by_state(page)
            left, claimed = left + len(waiting), claimed + len(running)
        return MoveProgress(change, "dry run", 0, left, claimed)

    def _report(self, change: MapChange, step: str, left: int = 0, claimed: int = 0) -> None:
        if self._on_progress is not None:
            self._on_progress(MoveProgress(change, step, self._moved, left, claimed))


def _check_nothing_pending(pending: Pending) -> None:
    if pending.change is not None:
        raise ShardMapMismatch(f"a change of the shard map is pending ({pending.change}); finish it first")


def _by_state(page: Sequence[LiveMessage]) -> tuple[list[UUID], list[UUID]]:
    """The ids of messages that wait, and of claimed ones."""
    return [one.id for one in page if one.waits], [one.id for one in page if not one.waits]
