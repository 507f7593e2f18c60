"""The archive in partitions, one for each day, where the database drops one in a moment (PostgreSQL).

Days are made ahead, by `migrate` and by every purge. The default partition takes what no day was made for: a
day that already has rows there is left to it. Nothing here waits for more than a moment, nor makes others wait:
what cannot be had at once is left to the next purge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from millpond.clock import SECOND
from millpond.message import State
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Steps

T = TypeVar("T")

DAY = 86_400 * SECOND
DAYS_AHEAD = 7

Cutoffs = Mapping[tuple[str, State], int]
"""Of each queue and state, up to when the archive is purged."""

_RANGES = """
SELECT c.oid::regclass::text, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = '{archive}'::regclass
"""
_BOUNDS = re.compile(r"FOR VALUES FROM \('(\d+)'\) TO \('(\d+)'\)")

_TURN = "SELECT pg_try_advisory_xact_lock(hashtext('{archive}.partitions'))"
# Settles queue behind whoever waits for a table: 50 ms at most. To attach a day, the default partition is looked
# through; one so large that it takes longer keeps the day.
_BRIEFLY = "SELECT set_config('lock_timeout', '50ms', true), set_config('statement_timeout', '500ms', true)"
# Not to be had now: the lock, the time, a way out of a deadlock, the right to change tables, the table itself.
_LATER = {"55P03", "57014", "40P01", "42501", "42P01"}
# The day is taken: by rows in the default partition, by another partition or table.
_TAKEN = {"23514", "42P17", "42P07"}

# From pair to pair by the index.
_PAIRS = """
WITH RECURSIVE step AS (
(SELECT p.queue, p.state FROM {} p ORDER BY p.queue, p.state LIMIT 1)
UNION ALL
SELECT n.queue, n.state FROM step, LATERAL (SELECT p.queue, p.state FROM {} p
WHERE (p.queue, p.state) > (step.queue, step.state) ORDER BY p.queue, p.state LIMIT 1) n)
SELECT queue, state FROM step
"""


class Partition(msgspec.Struct, frozen=True):
    """A table of the archive for times from `start` up to, not including, `end`. Its name is quoted."""

    name: str
    start: int
    end: int


def partitions(d: Dialect) -> Steps[list[Partition]]:
    """Those with bounds, so not the default one."""
    if not d.day_partitions:
        return []
    rows = yield Query(d.sql(_RANGES), {})
    found = [(name, _BOUNDS.fullmatch(bounds or "")) for name, bounds in rows]  # none: dropped meanwhile
    return [Partition(name, int(match[1]), int(match[2])) for name, match in found if match]


def make_partitions(d: Dialect, now: int | None) -> Steps[int]:
    """Make those of today and of a week ahead; returns how many. Safe for any number of processes at once."""
    wanted = yield from _missing_days(d, now)
    if not wanted or not (yield Query(d.sql(_TURN), {}))[0][0]:
        return 0
    made = 0
    for start in (yield from _missing_days(d, now)):
        name = f"{d.table('archive')}_{datetime.fromtimestamp(start // SECOND, UTC):%Y%m%d}"
        try:
            yield from _briefly(d, _make(d, Partition(d.qualified(name), start, start + DAY)))
        except Exception as e:
            if _code(e) in _TAKEN:
                continue
            if _code(e) in _LATER:
                break
            raise
        made += 1
    return made


def _missing_days(d: Dialect, now: int | None) -> Steps[list[int]]:
    if not d.day_partitions:
        return []
    today = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0] // DAY
    have = yield from partitions(d)
    starts = [(today + n) * DAY for n in range(DAYS_AHEAD + 1)]
    return [start for start in starts if not any(p.start < start + DAY and start < p.end for p in have)]


def _make(d: Dialect, new: Partition) -> Steps[None]:
    # Attached, not created in place: that would take the whole archive from everybody.
    yield _ddl(d, f"CREATE TABLE {new.name} (LIKE {{archive}} INCLUDING ALL)")
    yield _ddl(
        d, f"ALTER TABLE {{archive}} ATTACH PARTITION {new.name} FOR VALUES FROM ('{new.start}') TO ('{new.end}')"
    )


def gone_by(d: Dialect, now: int | None) -> Steps[list[Partition]]:
    """Those whose time is over."""
    parts = yield from partitions(d)
    if not parts:
        return []
    at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
    return [part for part in parts if part.end <= at]


def expendable(d: Dialect, part: Partition, cutoffs: Cutoffs) -> Steps[int | None]:
    """How many rows are in it, if a purge may delete all of them. Counted here, where nobody is kept waiting."""

    def steps() -> Steps[int | None]:
        if (yield from _kept(d, part, cutoffs)):
            return None
        return int((yield Query(d.sql(f"SELECT count(*) FROM {part.name}"), {}))[0][0])

    return (yield from _if_free(d, _undoable(d, steps())))


def clear(d: Dialect, part: Partition, cutoffs: Cutoffs) -> Steps[bool]:
    """Delete everything in it if that is still allowed, in a moment that nobody is in it; says whether it did."""

    def steps() -> Steps[bool]:
        # Needs this partition only, where to drop it needs the whole archive.
        yield _ddl(d, f"LOCK TABLE {part.name} IN ACCESS EXCLUSIVE MODE")
        if (yield from _kept(d, part, cutoffs)) or not (yield from _any(d, part)):
            return False
        yield _ddl(d, f"TRUNCATE {part.name}")
        return True

    return (yield from _if_free(d, _briefly(d, steps()))) or False


def drop_if_empty(d: Dialect, part: Partition) -> Steps[None]:
    def steps() -> Steps[None]:
        # From the top down, as everybody locks these.
        yield _ddl(d, "LOCK TABLE ONLY {archive} IN ACCESS EXCLUSIVE MODE")
        yield _ddl(d, f"LOCK TABLE {part.name} IN ACCESS EXCLUSIVE MODE")
        if not (yield from _any(d, part)):
            yield _ddl(d, f"DROP TABLE {part.name}")

    yield from _if_free(d, _briefly(d, steps()))


def _kept(d: Dialect, part: Partition, cutoffs: Cutoffs) -> Steps[bool]:
    """Whether a queue and state that has rows in it must keep some."""
    pairs = yield Query(d.sql(_PAIRS.format(part.name, part.name)), {})
    return any(cutoffs.get((queue, State(state)), -1) < part.end - 1 for queue, state in pairs)


def _any(d: Dialect, part: Partition) -> Steps[bool]:
    return bool((yield Query(d.sql(f"SELECT 1 FROM {part.name} LIMIT 1"), {})))


# --- for a moment only ----------------------------------------------------------------------------------


def _if_free(d: Dialect, steps: Steps[T]) -> Steps[T | None]:
    try:
        return (yield from steps)
    except Exception as e:
        if _code(e) in _LATER:
            return None
        raise


def _briefly(d: Dialect, steps: Steps[T]) -> Steps[T]:
    """Steps that wait for no lock longer than a moment."""

    def limited() -> Steps[T]:
        yield Query(d.sql(_BRIEFLY), {})
        return (yield from steps)

    return (yield from _undoable(d, limited()))


def _undoable(d: Dialect, steps: Steps[T]) -> Steps[T]:
    """An error undoes these steps and leaves the transaction usable."""
    yield _ddl(d, "SAVEPOINT undoable")
    try:
        result = yield from steps
    except Exception as e:
        if _code(e):
            yield _ddl(d, "ROLLBACK TO SAVEPOINT undoable")
        raise
    yield _ddl(d, "RELEASE SAVEPOINT undoable")
    return result


def _code(error: Exception) -> str | None:
    """The SQLSTATE of a server's error."""
    return getattr(error, "sqlstate", None)


def _ddl(d: Dialect, text: str) -> Query:
    return Query(d.sql(text), {})
