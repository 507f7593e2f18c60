"""The bulk room: whole batches, loaded in parts by many tasks and published once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from millpond.transports.shard_map import ShardRecord

WHOLE = -1
"""The part number of a whole batch."""


class Batch(msgspec.Struct, frozen=True):
    """Batch `number` of a writer; it is published once."""

    writer: str
    number: int = 0


class Written(msgspec.Struct, frozen=True):
    """Result of publishing a batch."""

    rows: int
    """Number of rows, including those whose ids were published before."""
    new: int
    """Number of rows that were published now."""
    again: bool = False
    """True if it had been published before; nothing was written."""


class Bulk(Protocol):
    """Load lots of rows, publish them as one batch, collect the rest."""

    async def load(self, batch: Batch, rows: Sequence[Sequence[Any]]) -> int:
        """Stage rows (id, due_at, priority, queue, key, headers, payload); returns the number of their lot."""

    async def published(self, batch: Batch, part: int = WHOLE) -> int | None:
        """Number of rows that the batch, or this part of it, was published with; None: not published."""

    async def publish(
        self,
        batch: Batch,
        lots: Mapping[int, int],
        *,
        part: int = WHOLE,
        given: bool = False,
        others: int = 0,
        queues: Collection[str] = (),
        routed: ShardRecord | None = None,
    ) -> Written:
        """Publish lots (number -> rows in it) as the whole batch or one part of it, all or nothing, and once.

        `given`: callers chose the ids. `others`: number of rows of the batch that are in no lot, because their ids are
        in a lot already, or because parts of the batch were published alone. Workers that wait for `queues` are woken.
        A repeated batch raises `BatchChanged` if it has another number of rows, and `StreamBehind` if it is not the
        writer's last one. `routed`: the shard's name and the map that routed the rows; raises `ShardMapChanged` if some
        may belong to another shard meanwhile. None: raises `WrongShard` if the database is one of several shards.
        """

    async def collect(self, batch: Batch) -> int:
        """Delete the lots of a writer up to this batch, once it is published or given up; returns their number."""

    async def collect_orphans(self) -> int:
        """Delete lots that no writer will publish, and forget writers that have been silent for long."""
