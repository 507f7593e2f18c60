"""Ids that the old owner of a key range knows without a dedupe row become known to the new one.

Otherwise a message that was published longer than the window ago could be published again while its range moves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from millpond.clock import SECOND
from millpond.transports.database.moves.awaited_ids import AwaitedIds
from millpond.transports.database.moves.move_steps import MOVED_MARK
from millpond.transports.database.store import DatabaseStore
from millpond.transports.key_range import KeyRange
from millpond.transports.routing import ring_point

BATCH = 500
"""Ids that are stored in one transaction."""
SLICE = 900 * SECOND
PARTS = 1_000
"""One statement reads this part of the archive, by its time; more if there would be too many parts."""


class KnownIds:
    """The copy of one move."""

    def __init__(
        self, source: DatabaseStore, target: DatabaseStore, epoch: int, on_step: Callable[[str], Awaitable[None]]
    ) -> None:
        self._source = source
        self._target = target
        self._epoch = epoch
        self._on_step = on_step

    async def await_live(self, ids: Sequence[UUID]) -> None:
        """Let ids of live messages be known until `end`, because their dedupe rows may end while they move."""
        for start in range(0, len(ids), BATCH):
            await self._on_step("await ids")
            await AwaitedIds(self._target.runner).begin(self._epoch, ids[start : start + BATCH])

    async def copy_archived(self, wanted: KeyRange) -> None:
        """Let ids of archived messages be known that lived for longer than the window, so that their rows ended."""
        now, window = await self._source.moving.clock(), self._source.runner.dedupe_for
        step = max(SLICE, window // PARTS)
        for since in range(now - window, now, step):
            rows = await AwaitedIds(self._source.runner).archived(since, min(since + step, now), now - window)
            mine = [(id_, at) for id_, key, at in rows if wanted.contains(ring_point(key, id_.bytes))]
            known = [(id_, MOVED_MARK, at + window) for id_, at in mine]
            for start in range(0, len(known), BATCH):
                await self._on_step("copy archived ids")
                await self._target.moving.keep_dedupe(self._epoch, known[start : start + BATCH])

    async def end(self) -> None:
        """Let ids of messages that were settled at the old owner be known for the window after that."""
        window, awaited = self._source.runner.dedupe_for, AwaitedIds(self._target.runner)
        while ids := await awaited.some(BATCH):
            archived = await AwaitedIds(self._source.runner).last_archived(ids)
            until = [(id_, archived[id_] + window if id_ in archived else 0) for id_ in ids]
            await self._on_step("await no more")
            await awaited.end(self._epoch, until)
