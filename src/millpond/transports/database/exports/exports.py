"""The exports room: lakes that the archive is exported to, and the time up to which a range of the archive is closed.

An export takes the rows archived before a time, and must know that no more will appear there. A message's
`archived_at` is the time of the statement that archived it; the row appears when its transaction commits, which may
be much later. So a time is closed when no open transaction has archived a row before it: each database answers
that in its own way (`Dialect.late`). A transaction that stays open holds the export back, and nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond.clock import Seconds, as_datetime, micros, monotonic, seconds
from millpond.errors import LakeDamaged, LakeIncomplete, StoreError, WrongLake
from millpond.seam.exports import ClosedUntil, Export, ExportedRange
from millpond.transports.database.exports.ranges import NOTHING, forget_ranges, record_ranges, recount_ranges
from millpond.transports.database.runner import Room, read, write
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Many, Query, Steps

_CHECK_EVERY = 0.05

_ENTER = "INSERT INTO {export} (lake, shard, until, at, path) VALUES (:lake, :shard, NULL, {now}, :path)"
_OF = "SELECT shard, until FROM {export} WHERE lake = :lake {lock}"
_MOVE = "UPDATE {export} SET path = :path WHERE lake = :lake"
_ADVANCE = "UPDATE {export} SET until = :until, at = {now} WHERE lake = :lake"
_REDATE = "UPDATE {archive} SET archived_at = {now} WHERE id = :id AND archived_at = :archived_at"
_ALL = "SELECT lake, shard, until, at, path FROM {export} ORDER BY at"
_FORGET = "DELETE FROM {export} WHERE lake = :lake"
_BOUND = "SELECT count(*), count(until), min(until) FROM {export}"

# Any row that is always there and that no other transaction locks.
RECORD_LOCK = "SELECT version FROM {migration} WHERE version = 2 {lock}"


class DatabaseExports(Room):
    patience = 5.0
    """Seconds to wait for transactions to end before an export proceeds with the rows archived before them."""

    @write
    def open(self, lake: str, *, shard: int, path: str, until: int | None) -> Steps[int | None]:
        rows: Sequence[Sequence[Any]] = yield Query(self.d.sql(_OF), {"lake": lake})
        if not rows:
            if until is not None:
                raise WrongLake(
                    f"the lake {path} holds exports of shard {shard} of another database, or this one has forgotten it "
                    "(millpond lake exports --forget): give the URLs that the lake was made with, in their order, or "
                    "a new folder"
                )
            yield Query(self.d.sql(_ENTER), {"lake": lake, "shard": shard, "path": path, "now": self.now})
            return None
        known, recorded = rows[0]
        if known != shard:
            raise WrongLake(
                f"this database is shard {known} of the lake {path}, not {shard}: keep the order of the URLs"
            )
        if recorded is not None and (until is None or until < recorded):
            raise LakeDamaged(
                f"the lake {path} held more of this database than it does now: it was restored from an older copy, or "
                "files of its log were removed. Its rows may have been purged since; restore the newest copy"
            )
        yield Query(self.d.sql(_MOVE), {"lake": lake, "path": path})
        return None if recorded is None else int(recorded)

    async def close_archive(self, since: int | None, *, margin: Seconds = 0) -> ClosedUntil:
        await asyncio.sleep(self.d.tick)
        now = await self._time_after_records()
        if since is not None and now < since:
            raise StoreError(
                f"the clock of the database at {self.runner.url} was set back, to before {as_datetime(since)}, the end "
                "of the last export: rows that it archives until then count as exported. Wait until the clock has "
                "passed that time; a purge deletes no row that the lake lacks"
            )
        at = now - micros(margin, "margin")
        if since is not None and at <= since:
            return ClosedUntil(since)
        await asyncio.sleep(max(self.d.least_grace, self.d.grace - seconds(margin)))
        give_up_at = monotonic() + self.patience
        held = await self._late(since, at)
        while held and monotonic() < give_up_at:
            await asyncio.sleep(_CHECK_EVERY)
            still = await self._late(since, at)
            # A transaction missing from the first query began after that time.
            held = {transaction: still[transaction] for transaction in held if transaction in still}
        # A transaction may have begun before `since` and archived after it.
        until = max(NOTHING if since is None else since, min((at, *held.values())))
        await self._index(since, until)
        return ClosedUntil(until, held=bool(held))

    @write
    def _index(self, since: int | None, until: int) -> Steps[None]:
        return self.d.index_archive(since, until)

    @write
    def _time_after_records(self) -> Steps[int]:
        """A database time after every finished `record()`. Those take their time before they write."""
        yield Query(self.d.sql(RECORD_LOCK), {})
        return int((yield Query(self.d.sql(NOW), {"now": self.now}))[0][0])

    @read
    def _late(self, since: int | None, at: int) -> Steps[dict[str, int]]:
        return (yield from self.d.late(NOTHING if since is None else since, at))

    @write
    def advance(self, lake: str, ranges: Sequence[ExportedRange]) -> Steps[None]:
        rows: Sequence[Sequence[Any]] = yield Query(self.d.sql(_OF), {"lake": lake})
        if not rows:
            raise WrongLake(f"this database does not know the lake {lake}, or has forgotten it; export again")
        recorded = None if rows[0][1] is None else int(rows[0][1])
        if recorded is not None and recorded >= ranges[-1].until_us:
            return  # by an earlier try, or by the next export
        if recorded != ranges[0].since_us:
            raise WrongLake(f"the ranges do not follow the last export of this database to the lake {lake}")
        yield from record_ranges(self.d, lake, ranges)
        yield Query(self.d.sql(_ADVANCE), {"lake": lake, "until": ranges[-1].until_us, "now": self.now})

    @write
    def redate(self, lake: str, rows: Sequence[tuple[UUID, int]]) -> Steps[None]:
        others = [str(row[0]) for row in (yield Query(self.d.sql(_ALL), {})) if row[0] != lake]
        if others:
            raise LakeIncomplete(
                f"{len(rows):,} messages are missing in the lake {lake}, and keep their time: {' and '.join(others)} "
                "may hold them, and would get them twice. Forget the other lakes (millpond lake exports --forget), or "
                "export to a new lake and forget this one"
            )
        yield from self.d.lock_archive()
        values = [(self.d.id_in(id_), at, self.now) for id_, at in rows]
        yield Many(self.d.sql(_REDATE), ("id", "archived_at", "now"), values)

    @write
    def recount(self, lake: str, until: int, messages: int, later: Sequence[ExportedRange]) -> Steps[bool]:
        known: Sequence[Sequence[Any]] = yield Query(self.d.sql(_OF), {"lake": lake})
        if not known:
            raise WrongLake(f"this database does not know the lake {lake}, or has forgotten it; export again")
        end = later[-1].until_us if later else until
        if known[0][1] is not None and int(known[0][1]) > end:
            return False
        yield from recount_ranges(self.d, lake, until, messages)
        yield from record_ranges(self.d, lake, later)
        yield Query(self.d.sql(_ADVANCE), {"lake": lake, "until": end, "now": self.now})
        return True

    @read
    def status(self) -> Steps[list[Export]]:
        return [Export(*row) for row in (yield Query(self.d.sql(_ALL), {}))]

    @write
    def forget(self, lake: str) -> Steps[bool]:
        known = yield Query(self.d.sql(_OF), {"lake": lake})
        if known:
            yield from forget_ranges(self.d, lake)
            yield Query(self.d.sql(_FORGET), {"lake": lake})
        return bool(known)


def exported_until(d: Dialect) -> Steps[int | None]:
    """Time up to which every lake holds the archive, inclusive; None without a lake."""
    ((lakes, begun, until),) = yield Query(d.sql(_BOUND), {})
    if not lakes:
        return None
    return NOTHING if begun < lakes else int(until) - 1
