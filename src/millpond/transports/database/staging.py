"""Bulk writes, as steps: tasks load lots into a staging table, then one transaction publishes a whole batch.

A lot is what one transaction loads; its rows and its entry appear together, so that no rows are without an owner.
Publishing moves exactly the lots it is told and notes the batch in the same transaction: a batch that comes again,
also cut into other parts, finds itself published. What nobody published is an orphan and is collected.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from millpond.clock import SECOND, SystemClock
from millpond.errors import BatchChanged, StagingLost
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.reschedule import announce
from millpond.transports.database.statement import Copy, Many, Query, Steps

WHOLE = -1
"""The part that stands for a whole batch."""
KEEP_LOTS = 86_400 * SECOND
"""An orphan whose writer never came back is collected after a day."""
KEEP_WRITERS = 90 * 86_400 * SECOND
"""A writer is forgotten so long after its last batch."""

COLUMNS = ("lot", "id", "due_at", "priority", "queue", "key", "headers", "payload")
_COLLECT_AT_ONCE = 8

ENTER_LOT = "INSERT INTO {lot} (lot, batch, at, writer) VALUES (:lot, :batch, {now}, :writer)"
_LOAD = """
INSERT INTO {staging} (lot, id, due_at, priority, queue, {key}, headers, payload)
VALUES (:lot, :id, :due_at, :priority, :queue, :key, :headers, :payload)
"""

_TAKE_PART = """
INSERT INTO {written} (writer, part, batch, size, at) VALUES (:writer, :part, -1, 0, {now}) {or_leave}
"""
_PART = "SELECT batch, size FROM {written} WHERE writer = :writer AND part = :part"
_LOCK_PART = _PART + " {lock}"
_NOTE = "UPDATE {written} SET batch = :batch, size = :size, at = {now} WHERE writer = :writer AND part = :part"

# Held until the move is done: a collector that deletes them meanwhile would leave half a batch.
_LOCK_LOTS = "SELECT lot FROM {lot} WHERE lot {lots} {lock}"
_COUNT = "SELECT count(*) FROM {staging} WHERE lot {lots}"
_MOVE = """
INSERT INTO {message} (id, queue, {key}, priority, lane, due_at, state, headers, payload, created_at)
SELECT s.id, s.queue, s.{key}, s.priority, s.priority, coalesce(s.due_at, :at), 'PENDING', s.headers, s.payload, :at
FROM {staging} s WHERE s.lot = :lot
"""

# Ids that callers gave are entered in the dedupe table, as by an ordinary publish, also those whose time there is
# over; what was published before is dropped.
REMEMBER = """
INSERT INTO {dedupe} AS d (id, publisher, expires_at)
SELECT n.staged, :publisher, :expires_at FROM (SELECT DISTINCT s.id AS staged FROM {staging} s WHERE s.lot {lots}) n
ORDER BY n.staged
ON CONFLICT (id) DO UPDATE SET publisher = excluded.publisher, expires_at = excluded.expires_at
WHERE d.expires_at <= :at
"""
_DROP_KNOWN = """
DELETE FROM {staging} WHERE lot {lots} AND NOT EXISTS
(SELECT 1 FROM {dedupe} d WHERE d.id = {staging}.id AND d.publisher = :publisher)
"""
_DROP_LIVE = "DELETE FROM {staging} WHERE lot {lots} AND EXISTS (SELECT 1 FROM {message} m WHERE m.id = {staging}.id)"
_DROP_ARCHIVED = """
DELETE FROM {staging} WHERE lot {lots} AND EXISTS
(SELECT 1 FROM {archive} a WHERE a.id = {staging}.id AND a.archived_at > :since)
"""
_COPIES = "SELECT count(*) - count(DISTINCT id) FROM {staging} WHERE lot {lots}"
# An id stands once in a lot, so that (lot, id) is one row.
DROP_COPIES = """
DELETE FROM {staging} WHERE lot {lots} AND (lot, id) IN (SELECT c.lot, c.id FROM
(SELECT s.lot, s.id, row_number() OVER (PARTITION BY s.id ORDER BY s.lot) AS copy FROM {staging} s WHERE s.lot {lots})
c WHERE c.copy > 1)
"""

_LOTS_OF = "SELECT lot FROM {lot} WHERE writer = :writer AND batch <= :batch ORDER BY lot LIMIT :limit {locked}"
_ORPHANS = """
SELECT l.lot FROM {lot} l WHERE l.at <= :until OR EXISTS
(SELECT 1 FROM {written} w WHERE w.writer = l.writer AND w.part = -1 AND w.batch >= l.batch)
ORDER BY l.lot LIMIT :limit {locked}
"""
_EMPTY_LOTS = "DELETE FROM {staging} WHERE lot {lots}"
_REMOVE_LOTS = "DELETE FROM {lot} WHERE lot {lots}"
_FORGET_WRITERS = "DELETE FROM {written} WHERE at <= :until"


class Batch(msgspec.Struct, frozen=True):
    """What is published once: batch number `number` of a writer."""

    writer: str
    number: int = 0


class Written(msgspec.Struct, frozen=True):
    """What came of publishing a batch."""

    rows: int
    """How many it has, with those whose ids were published before."""
    new: int
    """How many were published now."""
    again: bool = False
    """It had been published before; nothing was written."""


# --- once -----------------------------------------------------------------------------------------------


def take_turn(d: Dialect, batch: Batch, part: int, now: int | None) -> Steps[int | None]:
    """Wait until nobody else publishes this part; returns how many rows it had if it was published before.

    `WHOLE` stands for a number that nobody knows: the batch is published, and its parts need no comparing.
    """
    mine = {"writer": batch.writer, "part": part}
    rows: Sequence[Sequence[Any]] = ()
    while not rows:  # forgotten in the very moment between these two
        yield Query(d.sql(_TAKE_PART), {**mine, "now": now})
        rows = yield Query(d.sql(_LOCK_PART), mine)
    # Looked at after the lock was had: whoever published the whole batch had all its parts.
    if part != WHOLE and (yield from published(d, batch, WHOLE)) is not None:
        return WHOLE
    noted, size = rows[0]
    return int(size) if _is_done(batch, part, noted) else None


def check_same(batch: Batch, part: int, before: int, size: int) -> None:
    """A part that comes again must have the rows it had, as far as counting tells."""
    if part != WHOLE and before not in (WHOLE, size):
        raise BatchChanged(
            f"part {part} of batch {batch.number} was published with {before:,} rows and came again with {size:,}: "
            "atomic=false needs the same rows in the same partitions when a batch is repeated; nothing was published "
            "now. Repeat it with the partitions it had, and use atomic=true where these may change"
        )


def note(d: Dialect, batch: Batch, part: int, size: int, now: int | None) -> Steps[None]:
    """The part is published, in the transaction that does it."""
    yield Query(d.sql(_NOTE), {"writer": batch.writer, "part": part, "batch": batch.number, "size": size, "now": now})


def published(d: Dialect, batch: Batch, part: int) -> Steps[int | None]:
    """How many rows the batch, or this part of it, was published with; None: not yet."""
    for some in (WHOLE, part):
        rows = yield Query(d.sql(_PART), {"writer": batch.writer, "part": some})
        if rows and _is_done(batch, some, rows[0][0]):
            return int(rows[0][1])
    return None


def _is_done(batch: Batch, part: int, noted: int) -> bool:
    # Batches of a writer come in order, so that the last one of it stands for all before.
    return bool(noted >= batch.number if part == WHOLE else noted == batch.number)


# --- lots -----------------------------------------------------------------------------------------------


def new_lot() -> int:
    """A number for a lot: later ones are greater, of whatever process, and no two are the same."""
    return SystemClock().now() // 1000 << 21 | secrets.randbits(21)


def load(d: Dialect, batch: Batch, lot: int, rows: Sequence[Sequence[Any]], now: int | None) -> Steps[None]:
    """Stage rows of `COLUMNS` without their lot."""
    yield Query(d.sql(ENTER_LOT), {"lot": lot, "batch": batch.number, "writer": batch.writer, "now": now})
    records = [(lot, *row) for row in rows]
    if d.fused is not None:
        yield Copy(d.table("staging"), d.schema, COLUMNS, records)
    else:
        yield Many(d.sql(_LOAD), COLUMNS, records)


def publish_lots(
    d: Dialect,
    batch: Batch,
    lots: Mapping[int, int],
    *,
    part: int,
    given: bool,
    copies: int,
    queues: Collection[str],
    now: int | None,
    dedupe_for: int,
    notify: bool,
) -> Steps[Written]:
    """Publish lots (number -> rows in it) as the batch or as one part of it, unless that was done before.

    `given`: callers chose the ids; `copies`: how many rows were left out since their ids stand in a lot already.
    `queues` are told to whoever waits for them.
    """
    size = sum(lots.values()) + copies
    if (before := (yield from take_turn(d, batch, part, now))) is not None:
        check_same(batch, part, before, size)
        return Written(size, 0, again=True)
    new = 0
    if lots:
        at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
        chosen = {"lots": sorted(lots)}
        yield from _check(d, batch, lots, chosen)
        new = sum(lots.values())
        if given:
            yield from _sift(d, chosen, at, dedupe_for)
            new = yield from _count(d, chosen)
        # Lot by lot, in the order of their making: ids and index entries then come in order, a quarter faster.
        yield Many(d.sql(_MOVE), ("lot", "at"), [(lot, at) for lot in chosen["lots"]])
        if notify and new:
            yield from announce(d, queues)
    yield from note(d, batch, part, size, now)
    return Written(size, new)


def _check(d: Dialect, batch: Batch, lots: Mapping[int, int], chosen: Mapping[str, Any]) -> Steps[None]:
    there = yield Query(d.sql(_LOCK_LOTS), chosen)
    found = yield from _count(d, chosen)
    if len(there) != len(lots) or found != sum(lots.values()):
        raise StagingLost(
            f"batch {batch.number} has {sum(lots.values()):,} rows, and {found:,} are in the staging table: the "
            "server was restarted after a crash, or somebody collected them; nothing was published, write the "
            "batch again"
        )


def _count(d: Dialect, chosen: Mapping[str, Any]) -> Steps[int]:
    return sum(row[0] for row in (yield Query(d.sql(_COUNT), chosen)))


def _sift(d: Dialect, chosen: Mapping[str, Any], at: int, dedupe_for: int) -> Steps[None]:
    """Remove from the lots what was published before, and all copies of an id but one."""
    mine = {**chosen, "publisher": secrets.randbits(62)}
    yield Query(d.sql(REMEMBER), {**mine, "at": at, "expires_at": at + dedupe_for})
    yield Query(d.sql(_DROP_KNOWN), mine)
    yield Query(d.sql(_DROP_LIVE), chosen)
    yield Query(d.sql(_DROP_ARCHIVED), {**chosen, "since": at - dedupe_for})
    if any(row[0] for row in (yield Query(d.sql(_COPIES), chosen))):
        yield Query(d.sql(DROP_COPIES), chosen)


# --- what is no longer needed ---------------------------------------------------------------------------


def collect(d: Dialect, batch: Batch) -> Steps[int]:
    """Delete some lots of a writer up to this batch, also those of attempts that came to nothing; returns how many."""
    params = {"writer": batch.writer, "batch": batch.number, "limit": _COLLECT_AT_ONCE}
    return (yield from _remove(d, (yield Query(d.sql(_LOTS_OF), params))))


def collect_orphans(d: Dialect, now: int | None) -> Steps[int]:
    """Delete some lots that nobody will publish; returns how many."""
    at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
    rows = yield Query(d.sql(_ORPHANS), {"until": at - KEEP_LOTS, "limit": _COLLECT_AT_ONCE})
    return (yield from _remove(d, rows))


def forget_writers(d: Dialect, now: int | None) -> Steps[None]:
    at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
    yield Query(d.sql(_FORGET_WRITERS), {"until": at - KEEP_WRITERS})


def _remove(d: Dialect, rows: Sequence[Sequence[Any]]) -> Steps[int]:
    if rows:
        chosen = {"lots": [row[0] for row in rows]}
        yield Query(d.sql(_EMPTY_LOTS), chosen)
        yield Query(d.sql(_REMOVE_LOTS), chosen)
    return len(rows)
