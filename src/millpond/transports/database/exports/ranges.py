"""Ranges of the archive that lakes hold, each with its number of messages: purge deletes nothing that a lake lacks.

An export records how many messages it brought of each range of time. A range is complete if the archive's rows and
those that were purged since are as many. A row more is one that no lake holds: it was committed too late, after a
failover to a clock that is behind, or by hand. Purge deletes from complete ranges only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from millpond.clock import SECOND, as_datetime
from millpond.errors import LakeIncomplete
from millpond.seam.exports import ExportedRange
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

NOTHING = -(2**63)
"""Before every message."""
LONGEST, MOST = 3600 * SECOND, 50_000
"""A range grows up to an hour of one day and this number of messages: a check reads all its rows."""
_AFTER_ALL = 2**63 - 1
_DAY = 86_400 * SECOND

_COLUMNS = "lake, since, until, messages, purged"
_LAST = f"SELECT {_COLUMNS} FROM {{export_range}} WHERE lake = :lake ORDER BY since DESC LIMIT 1 {{lock}}"
_INSERT = f"INSERT INTO {{export_range}} ({_COLUMNS}) VALUES (:lake, :since, :until, :messages, 0)"
_GROW = """
UPDATE {export_range} SET until = :until, messages = messages + :messages WHERE lake = :lake AND since = :since
"""
_OVERLAPPING = f"""
SELECT {_COLUMNS} FROM {{export_range}} WHERE since < :end AND until > :start ORDER BY since, lake {{lock}}
"""
_AT = f"SELECT {_COLUMNS} FROM {{export_range}} WHERE since <= :at AND until > :at ORDER BY lake {{lock}}"
_NEXT = "SELECT min(since) FROM {export_range} WHERE lake = :lake AND since > :at"
_COUNT = (
    "SELECT count(*) FROM {archive} a {archive_time_index} WHERE a.archived_at >= :since AND a.archived_at < :until"
)
_BY_HOUR = """
SELECT a.archived_at - a.archived_at % :hour AS hour, count(*) FROM {archive} a {archive_time_index}
WHERE a.archived_at < :until GROUP BY 1 ORDER BY 1
"""
_PURGED = "UPDATE {export_range} SET purged = purged + :purged WHERE lake = :lake AND since = :since"
_EMPTIED = "UPDATE {export_range} SET purged = messages WHERE since < :end AND until > :start"
_FORGET = "DELETE FROM {export_range} WHERE lake = :lake"
_LAKES = "SELECT lake FROM {export}"
# The first ranges of a lake, as long as none of their messages is left.
_FIRST_EMPTY = f"""
SELECT {_COLUMNS} FROM {{export_range}} r WHERE r.messages = r.purged AND NOT EXISTS (
SELECT 1 FROM {{export_range}} o WHERE o.lake = r.lake AND o.since < r.since AND o.messages <> o.purged)
ORDER BY r.lake, r.since
"""
_DROP = "DELETE FROM {export_range} WHERE lake = :lake AND since = :since"


class Range(msgspec.Struct, frozen=True):
    lake: str
    since: int
    until: int
    messages: int
    purged: int


def record_ranges(d: Dialect, lake: str, ranges: Sequence[ExportedRange]) -> Steps[None]:
    """Enter ranges that follow each other and the last recorded one."""
    rows = yield Query(d.sql(_LAST), {"lake": lake})
    last = Range(*rows[0]) if rows else None
    for new in ranges:
        facts = {"lake": lake, "until": new.until_us, "messages": new.messages}
        if last is not None and _is_short(last.since, new.until_us) and last.messages + new.messages <= MOST:
            yield Query(d.sql(_GROW), {**facts, "since": last.since})
            last = Range(lake, last.since, new.until_us, last.messages + new.messages, last.purged)
        else:
            last = Range(lake, NOTHING if new.since_us is None else new.since_us, new.until_us, new.messages, 0)
            yield Query(d.sql(_INSERT), {**facts, "since": last.since})


def _is_short(since: int, until: int) -> bool:
    """Within a day: where days are partitions, the messages of a range are in one of them."""
    return until - since <= LONGEST and since // _DAY == (until - 1) // _DAY


class Part(msgspec.Struct, frozen=True):
    """A time up to which the archive belongs to the same range of each lake."""

    end: int = _AFTER_ALL
    ranges: Sequence[Range] = ()
    error: LakeIncomplete | None = None
    """Set if a lake has no such range."""


class PurgeCheck:
    """Lets one purge delete rows of complete ranges only. Others are left out, and raised at its end."""

    def __init__(self, d: Dialect) -> None:
        self._d = d
        self._postponed: dict[int, LakeIncomplete] = {}
        """End of a part -> its error."""

    def postpone(self, part: Part, error: LakeIncomplete) -> None:
        self._postponed.setdefault(part.end, error)

    def raise_postponed(self, purged: int) -> None:
        """Raise the first error of this purge, if there is any."""
        if self._postponed:
            others = f", nor in {len(self._postponed) - 1:,} more ranges" if len(self._postponed) > 1 else ""
            raise LakeIncomplete(
                f"{next(iter(self._postponed.values()))}{others}. {purged:,} other messages were purged"
            )

    def part(self, at: int) -> Steps[Part]:
        """The part of the archive from a time on; its ranges are locked. All of it without a lake."""
        lakes = yield from self._lakes()
        found = [Range(*row) for row in (yield Query(self._d.sql(_AT), {"at": at}))] if lakes else []
        ranges = [one for one in found if one.lake in lakes]
        if missing := lakes - {one.lake for one in ranges}:
            (following,) = yield Query(self._d.sql(_NEXT), {"lake": min(missing), "at": at})
            return Part(_AFTER_ALL if following[0] is None else int(following[0]), (), _unrecorded(missing, at))
        return Part(min((one.until for one in ranges), default=_AFTER_ALL), ranges)

    def count_as_purged(self, part: Part, number: int) -> Steps[LakeIncomplete | None]:
        """Count rows that the caller has chosen as purged; if a range is incomplete, count none and return the error.

        The transaction of these steps must delete exactly those.
        """
        if part.end in self._postponed:
            return self._postponed[part.end]
        for one in part.ranges if number else ():
            error = yield from self.incomplete(one)
            if error is not None:
                return error
        for one in part.ranges if number else ():
            yield Query(self._d.sql(_PURGED), {"lake": one.lake, "since": one.since, "purged": number})
        return None

    def day(self, start: int, end: int) -> Steps[list[Range]]:
        """The ranges of [start, end), empty without a lake. Raise unless they cover it for every lake."""
        lakes = yield from self._lakes()
        if not lakes:
            return []
        found = [Range(*row) for row in (yield Query(self._d.sql(_OVERLAPPING), {"start": start, "end": end}))]
        recorded = _recorded_until(found, lakes, start)
        if min(recorded.values()) < end:
            raise _unrecorded([lake for lake in lakes if recorded[lake] < end], min(recorded.values()))
        return [one for one in found if one.lake in lakes]

    def range(self, one: Range) -> Steps[None]:
        """Raise unless the range is complete."""
        error = yield from self.incomplete(one)
        if error is not None:
            raise error

    def day_again(self, start: int, end: int) -> Steps[None]:
        """Raise if a row has appeared in [start, end) since its ranges were checked."""
        for one in (yield from self.day(start, end)):
            yield from self.range(one)

    def emptied(self, start: int, end: int) -> Steps[None]:
        """Count all messages in [start, end) as purged; the transaction of these steps must delete them."""
        yield Query(self._d.sql(_EMPTIED), {"start": start, "end": end})

    def incomplete(self, one: Range) -> Steps[LakeIncomplete | None]:
        """The error of a range whose rows, and those purged, are not as many as were exported."""
        yield from self._d.prefer_indexes()
        rows = int((yield Query(self._d.sql(_COUNT), {"since": one.since, "until": one.until}))[0][0])
        if rows + one.purged == one.messages:
            return None
        since = "the beginning" if one.since == NOTHING else str(as_datetime(one.since))
        return LakeIncomplete(
            f"the archive has {rows:,} messages from {since} to {as_datetime(one.until)}, and {one.purged:,} were "
            f"purged, but {one.messages:,} were exported to the lake {one.lake}; millpond lake check finds messages "
            "that the lake lacks. Nothing was purged there"
        )

    def _lakes(self) -> Steps[set[str]]:
        return {str(row[0]) for row in (yield Query(self._d.sql(_LAKES), {}))}


def _recorded_until(found: Sequence[Range], lakes: set[str], start: int) -> dict[str, int]:
    """Lake -> time up to which its ranges, in ascending order, cover the archive from `start` without a gap."""
    until = dict.fromkeys(lakes, start)
    for one in found:
        if one.lake in lakes and one.since <= until[one.lake]:
            until[one.lake] = max(until[one.lake], one.until)
    return until


def _unrecorded(lakes: Collection[str], at: int) -> LakeIncomplete:
    return LakeIncomplete(
        f"no export to {' and '.join(sorted(lakes))} has recorded messages archived at {as_datetime(at)}; millpond "
        "lake check --repair compares them and records those that the lake holds, and millpond lake exports --forget "
        "forgets a lake that is no longer used. Nothing was purged there"
    )


def recount_ranges(d: Dialect, lake: str, until: int, messages: int) -> Steps[None]:
    """Record the archive's rows before a time as those that the lake holds; raise if their number is another one."""
    yield from forget_ranges(d, lake)
    rows = yield Query(d.sql(_BY_HOUR), {"hour": LONGEST, "until": until})
    found: list[ExportedRange] = []
    start: int | None = None
    for first, number in ((int(hour), int(count)) for hour, count in rows):
        if start is None or start < first:
            found.append(ExportedRange(start, first, 0))
        start = min(first + LONGEST, until)
        found.append(ExportedRange(first, start, number))
    if start is None or start < until:
        found.append(ExportedRange(start, until, 0))
    if (total := sum(one.messages for one in found)) != messages:
        raise LakeIncomplete(
            f"the archive has {total:,} messages before {as_datetime(until)}, and {messages:,} of them were found in "
            f"the lake {lake}: some appeared or were purged meanwhile. Run millpond lake check --repair again"
        )
    yield from record_ranges(d, lake, found)


def forget_ranges(d: Dialect, lake: str) -> Steps[None]:
    yield Query(d.sql(_FORGET), {"lake": lake})


def fold_ranges(d: Dialect) -> Steps[None]:
    """Join the first ranges of each lake if all their messages are purged: their number stays small."""
    by_lake: dict[str, list[Range]] = {}
    for row in (yield Query(d.sql(_FIRST_EMPTY), {})):
        by_lake.setdefault(row[0], []).append(Range(*row))
    for first, *others in by_lake.values():
        if others:
            for one in others:
                yield Query(d.sql(_DROP), {"lake": one.lake, "since": one.since})
            messages = sum(one.messages for one in others)
            place = {"lake": first.lake, "since": first.since}
            yield Query(d.sql(_GROW), {**place, "until": others[-1].until, "messages": messages})
            yield Query(d.sql(_PURGED), {**place, "purged": messages})
