"""The bulk room: tasks load lots into a staging table, then one transaction publishes a whole batch.

A lot is loaded by one transaction; its rows and its entry appear together, and no rows are without an owner.
Publishing moves exactly the given lots and records the batch in the same transaction: a repeated batch, also one cut
into other parts, is recognised as published. A lot that was never published is an orphan and is collected.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from millpond.clock import SECOND, SystemClock
from millpond.errors import BatchChanged, StagingLost, StreamBehind
from millpond.seam.bulk import WHOLE, Batch, Written
from millpond.transports.database.messages.publish import enter_staged
from millpond.transports.database.runner import Mode, Room, read, write
from millpond.transports.database.shards import check_routed
from millpond.transports.database.sql.columns import STAGED, new_message
from millpond.transports.database.sql.dialect import NOW, Dialect, Named
from millpond.transports.database.sql.statement import Many, Query, Steps
from millpond.transports.shard_map import ShardRecord

KEEP_LOTS = 86_400 * SECOND
"""An orphan whose writer never came back is collected after a day."""
KEEP_WRITERS = 90 * 86_400 * SECOND
"""A writer is forgotten this long after its last batch."""

_COLLECT_AT_ONCE = 8

ENTER_LOT = "INSERT INTO {lot} (lot, batch, at, writer) VALUES (:lot, :batch, {now}, :writer)"

_TAKE_PART = """
INSERT INTO {written} (writer, part, batch, size, at) VALUES (:writer, :part, -1, 0, {now}) {or_leave}
"""
_PART = "SELECT batch, size FROM {written} WHERE writer = :writer AND part = :part"
_LOCK_PART = _PART + " {lock}"
_RECORD = "UPDATE {written} SET batch = :batch, size = :size, at = {now} WHERE writer = :writer AND part = :part"

# Locked until the move is done: a collector that deletes them meanwhile would leave half a batch.
_LOCK_LOTS = "SELECT lot FROM {lot} WHERE lot {lots} {lock}"
_COUNT = "SELECT count(*) FROM {staging} WHERE lot {lots}"
_COLUMNS, _VALUES = new_message("s.", STAGED, due_at="coalesce(s.due_at, :at)", created_at=":at")
_MOVE = f"INSERT INTO {{message}} ({_COLUMNS}) SELECT {_VALUES} FROM {{staging}} s WHERE s.lot = :lot"

# Rows published before are dropped.
_DROP_PUBLISHED = """
DELETE FROM {staging} WHERE lot {lots} AND NOT EXISTS
(SELECT 1 FROM {dedupe} d WHERE d.id = {staging}.id AND d.publisher = :publisher)
"""
_DROP_LIVE = "DELETE FROM {staging} WHERE lot {lots} AND EXISTS (SELECT 1 FROM {message} m WHERE m.id = {staging}.id)"
_DROP_ARCHIVED = """
DELETE FROM {staging} WHERE lot {lots} AND EXISTS
(SELECT 1 FROM {archive} a WHERE a.id = {staging}.id AND a.archived_at > :since)
"""
_COPIES = "SELECT count(*) - count(DISTINCT id) FROM {staging} WHERE lot {lots}"
# An id is once in a lot: (lot, id) is one row.
_DROP_COPIES = Named(
    "drop copies",
    """
DELETE FROM {staging} WHERE lot {lots} AND (lot, id) IN (SELECT c.lot, c.id FROM
(SELECT s.lot, s.id, row_number() OVER (PARTITION BY s.id ORDER BY s.lot) AS copy FROM {staging} s WHERE s.lot {lots})
c WHERE c.copy > 1)
""",
)

_LOTS_OF = "SELECT lot FROM {lot} WHERE writer = :writer AND batch <= :batch ORDER BY lot LIMIT :limit {locked}"
_ORPHANS = """
SELECT l.lot FROM {lot} l WHERE l.at <= :until OR EXISTS
(SELECT 1 FROM {written} w WHERE w.writer = l.writer AND w.part = -1 AND w.batch >= l.batch)
ORDER BY l.lot LIMIT :limit {locked}
"""
_EMPTY_LOTS = "DELETE FROM {staging} WHERE lot {lots}"
_REMOVE_LOTS = "DELETE FROM {lot} WHERE lot {lots}"
_FORGET_WRITERS = "DELETE FROM {written} WHERE at <= :until"


class DatabaseBulk(Room):
    async def load(self, batch: Batch, rows: Sequence[Sequence[Any]]) -> int:
        numbers: list[int] = []

        def steps(again: bool) -> Steps[None]:
            # Each try has its own lot: one that was committed although its reply was lost is an orphan.
            numbers.append(new_lot())
            return _load(self.d, batch, numbers[-1], rows, self.now)

        await self.runner.run(steps, Mode.WRITE)
        return numbers[-1]

    @read
    def published(self, batch: Batch, part: int = WHOLE) -> Steps[int | None]:
        return (yield from _published_size(self.d, batch, part))

    @write
    def publish(
        self,
        batch: Batch,
        lots: Mapping[int, int],
        *,
        part: int = WHOLE,
        given: bool = False,
        others: int = 0,
        queues: Collection[str] = (),
        routed: ShardRecord | None = None,
    ) -> Steps[Written]:
        d, now = self.d, self.now
        size = sum(lots.values()) + others
        if (before := (yield from lock_part(d, batch, part, now))) is not None:
            if part == WHOLE:
                yield from _refuse_old(d, batch)
            check_same(batch, part, before, size)
            return Written(size, 0, again=True)
        yield from check_routed(d, routed, f"the database at {self.runner.url}")
        new = 0
        if lots:
            at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
            chosen = {"lots": sorted(lots)}
            yield from _check(d, batch, lots, chosen)
            new = sum(lots.values())
            if given:
                yield from _drop_known(d, chosen, at, self.runner.dedupe_for)
                new = yield from _count(d, chosen)
            # Lot by lot, in the order of their making: ids and index entries then come in order, a quarter faster.
            yield Many(d.sql(_MOVE), ("lot", "at"), [(lot, at) for lot in chosen["lots"]])
            if self.runner.options.notify and new:
                yield from d.writes.notify(queues)
        yield from record_part(d, batch, part, size, now)
        return Written(size, new)

    async def collect(self, batch: Batch) -> int:
        params = {"writer": batch.writer, "batch": batch.number, "limit": _COLLECT_AT_ONCE}
        return await self._until_none(lambda: _remove(self.d, _LOTS_OF, params))

    async def collect_orphans(self) -> int:
        at = await self._forget_writers()
        params = {"until": at - KEEP_LOTS, "limit": _COLLECT_AT_ONCE}
        return await self._until_none(lambda: _remove(self.d, _ORPHANS, params))

    @write
    def _forget_writers(self) -> Steps[int]:
        """Returns the database's time."""
        at = int((yield Query(self.d.sql(NOW), {"now": self.now}))[0][0])
        yield Query(self.d.sql(_FORGET_WRITERS), {"until": at - KEEP_WRITERS})
        return at

    async def _until_none(self, steps: Callable[[], Steps[int]]) -> int:
        """Repeat small transactions until one returns 0; returns their sum."""
        total = 0
        while count := await self.runner.write(steps):
            total += count
        return total


# --- once -----------------------------------------------------------------------------------------------


def lock_part(d: Dialect, batch: Batch, part: int, now: int | None) -> Steps[int | None]:
    """Wait until no other transaction publishes this part; returns its number of rows if it was published before.

    `WHOLE` instead of a number: the whole batch is published, and its parts need no comparing.
    """
    mine = {"writer": batch.writer, "part": part}
    rows: Sequence[Sequence[Any]] = ()
    while not rows:  # forgotten between these two statements
        yield Query(d.sql(_TAKE_PART), {**mine, "now": now})
        rows = yield Query(d.sql(_LOCK_PART), mine)
    # Read after the lock is held, because publishing a whole batch locks all its parts.
    if part != WHOLE and (yield from _published_size(d, batch, WHOLE)) is not None:
        return WHOLE
    recorded, size = rows[0]
    return int(size) if _is_done(batch, part, recorded) else None


def check_same(batch: Batch, part: int, before: int, size: int) -> None:
    """Refuse a repeated batch, or part of one, whose number of rows has changed."""
    if before in (WHOLE, size):
        return
    if part == WHOLE:
        raise BatchChanged(
            f"batch {batch.number} of {batch.writer} was published with {before:,} rows and came again with {size:,}: "
            "the checkpoint is an old copy, the name is used twice, or the query computes other rows when it is "
            "repeated. Nothing was published now. Continue with the newest checkpoint; to publish these rows as well, "
            "use a new checkpoint or another txn"
        )
    raise BatchChanged(
        f"part {part} of batch {batch.number} was published with {before:,} rows and came again with {size:,}: "
        "atomic=false needs the same rows in the same partitions when a batch is repeated; nothing was published "
        "now. Repeat it with the partitions it had, and use atomic=true where these may change"
    )


def _refuse_old(d: Dialect, batch: Batch) -> Steps[None]:
    """Refuse a batch before the last one: Spark repeats only the last, so its checkpoint is an old copy."""
    ((recorded, _),) = yield Query(d.sql(_PART), {"writer": batch.writer, "part": WHOLE})
    if recorded > batch.number:
        raise StreamBehind(
            f"{batch.writer} has published batch {recorded}, and batch {batch.number} came again: the checkpoint is an "
            "old copy, or its former driver still runs. Nothing was published now. Continue with the newest "
            "checkpoint, or with a new one"
        )


def record_part(d: Dialect, batch: Batch, part: int, size: int, now: int | None) -> Steps[None]:
    """Record that the part is published, in the transaction that does it."""
    yield Query(d.sql(_RECORD), {"writer": batch.writer, "part": part, "batch": batch.number, "size": size, "now": now})


def _published_size(d: Dialect, batch: Batch, part: int) -> Steps[int | None]:
    """Number of rows that the batch, or this part of it, was published with; None: not published."""
    for some in (WHOLE, part):
        rows = yield Query(d.sql(_PART), {"writer": batch.writer, "part": some})
        if rows and _is_done(batch, some, rows[0][0]):
            return int(rows[0][1])
    return None


def _is_done(batch: Batch, part: int, recorded: int) -> bool:
    # Batches of a writer come in order: its last one stands for all before.
    return bool(recorded >= batch.number if part == WHOLE else recorded == batch.number)


# --- lots -----------------------------------------------------------------------------------------------


def new_lot() -> int:
    """A unique number for a lot; later ones are greater, over all processes."""
    return SystemClock().now() // 1000 << 21 | secrets.randbits(21)


def _load(d: Dialect, batch: Batch, lot: int, rows: Sequence[Sequence[Any]], now: int | None) -> Steps[None]:
    """Stage rows of `STAGED` without their lot."""
    yield Query(d.sql(ENTER_LOT), {"lot": lot, "batch": batch.number, "writer": batch.writer, "now": now})
    records = [(lot, *row) for row in rows]
    yield from d.writes.load("staging", STAGED, records)


def _check(d: Dialect, batch: Batch, lots: Mapping[int, int], chosen: Mapping[str, Any]) -> Steps[None]:
    there = yield Query(d.sql(_LOCK_LOTS), chosen)
    found = yield from _count(d, chosen)
    if len(there) != len(lots) or found != sum(lots.values()):
        raise StagingLost(
            f"batch {batch.number} has {sum(lots.values()):,} rows, and {found:,} are in the staging table: the "
            "server was restarted after a crash, or they were collected; nothing was published, write the "
            "batch again"
        )


def _count(d: Dialect, chosen: Mapping[str, Any]) -> Steps[int]:
    return sum(row[0] for row in (yield Query(d.sql(_COUNT), chosen)))


def _drop_known(d: Dialect, chosen: Mapping[str, Any], at: int, dedupe_for: int) -> Steps[None]:
    """Remove rows that were published before, and all copies of an id but one."""
    publisher = secrets.randbits(62)
    yield from enter_staged(d, chosen, publisher, at, dedupe_for)
    yield Query(d.sql(_DROP_PUBLISHED), {**chosen, "publisher": publisher})
    yield Query(d.sql(_DROP_LIVE), chosen)
    yield Query(d.sql(_DROP_ARCHIVED), {**chosen, "since": at - dedupe_for})
    if any(row[0] for row in (yield Query(d.sql(_COPIES), chosen))):
        yield Query(d.sql(_DROP_COPIES), chosen)


def _remove(d: Dialect, text: str, params: Mapping[str, Any]) -> Steps[int]:
    """Delete the lots that a query selects; returns their number."""
    rows = yield Query(d.sql(text), params)
    if rows:
        chosen = {"lots": [row[0] for row in rows]}
        yield Query(d.sql(_EMPTY_LOTS), chosen)
        yield Query(d.sql(_REMOVE_LOTS), chosen)
    return len(rows)
