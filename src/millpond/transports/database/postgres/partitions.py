"""One partition of the archive for each day. PostgreSQL drops a partition at once, however large it is.

`migrate` and every purge make the days ahead. The default partition takes rows of a day that has no partition; a day
with rows there stays in it. No step waits, or makes others wait, for more than 50 ms: a partition that is locked is
left to the next purge.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from millpond.clock import SECOND
from millpond.errors import LakeIncomplete
from millpond.message import State
from millpond.transports.database.sql.dialect import NOW, Cutoffs, Dialect, RunSteps
from millpond.transports.database.sql.statement import Query, Steps

if TYPE_CHECKING:
    from millpond.transports.database.exports.ranges import PurgeCheck

T = TypeVar("T")

DAY = 86_400 * SECOND
DAYS_AHEAD = 7

_RANGES = """
SELECT c.oid::regclass::text, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i
JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = '{archive}'::regclass
"""
_SUMMARIZE = """
SELECT brin_summarize_new_values(i.indexrelid) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
JOIN pg_am a ON a.oid = x.relam JOIN pg_class t ON t.oid = i.indrelid
WHERE i.indrelid = :partition::text::regclass AND a.amname = 'brin' AND pg_has_role(t.relowner, 'USAGE')
"""
_BOUNDS = re.compile(r"FOR VALUES FROM \('(\d+)'\) TO \('(\d+)'\)")

_TURN = "SELECT pg_try_advisory_xact_lock(hashtext('{archive}.partitions'))"
# Settles queue behind a transaction that waits for a table: 50 ms at most. To attach a day, the server reads the
# default partition; if that takes longer than 500 ms, the day stays in it.
_BRIEFLY = "SELECT set_config('lock_timeout', '50ms', true), set_config('statement_timeout', '500ms', true)"
_UNHURRIED = "SELECT set_config('statement_timeout', '0', true)"
# Try again later: lock timeout, statement timeout, deadlock, no right to change tables, table dropped meanwhile.
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
    """The partitions with bounds, that is all but the default one."""
    rows = yield Query(d.sql(_RANGES), {})
    found = [(name, _BOUNDS.fullmatch(bounds or "")) for name, bounds in rows]  # no bounds: dropped meanwhile
    return [Partition(name, int(match[1]), int(match[2])) for name, match in found if match]


def make_partitions(d: Dialect, now: int | None) -> Steps[int]:
    """Make the partitions of today and of a week ahead; returns their number. Any number of processes may do it."""
    wanted = yield from missing_days(d, now)
    if not wanted or not (yield Query(d.sql(_TURN), {}))[0][0]:
        return 0
    made = 0
    for start in (yield from missing_days(d, now)):
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


def missing_days(d: Dialect, now: int | None) -> Steps[list[int]]:
    today = (yield Query(d.sql(NOW), {"now": now}))[0][0] // DAY
    have = yield from partitions(d)
    starts = [(today + n) * DAY for n in range(DAYS_AHEAD + 1)]
    return [start for start in starts if not any(p.start < start + DAY and start < p.end for p in have)]


def _make(d: Dialect, new: Partition) -> Steps[None]:
    # Attached, not created in place: that would lock the whole archive.
    yield _ddl(d, f"CREATE TABLE {new.name} (LIKE {{archive}} INCLUDING ALL)")
    yield _ddl(
        d, f"ALTER TABLE {{archive}} ATTACH PARTITION {new.name} FOR VALUES FROM ('{new.start}') TO ('{new.end}')"
    )


async def purge_partitions(d: Dialect, run: RunSteps, cutoffs: Cutoffs, now: int | None, check: PurgeCheck) -> int:
    """Make the days ahead, then empty and drop those of which `cutoffs` keep no row. Each step is a transaction."""
    total = 0
    await run(lambda: make_partitions(d, now))
    for part in await run(lambda: past_partitions(d, now)):
        size = await run(partial(count_if_deletable, d, part, cutoffs))
        if size is None:
            continue
        if size:
            try:
                total += await _empty_day(d, run, part, cutoffs, check, size)
            except LakeIncomplete:
                continue  # the purge row by row leaves out incomplete ranges only, and postpones their errors
        await run(partial(drop_if_empty, d, part))
    return total


async def _empty_day(d: Dialect, run: RunSteps, part: Partition, cutoffs: Cutoffs, check: PurgeCheck, size: int) -> int:
    ranges = await run(partial(check.day, part.start, part.end))
    for one in ranges:
        await run(partial(check.range, one))
    compared = size if ranges else None
    return size if await run(partial(truncate_if_allowed, d, part, cutoffs, check, compared)) else 0


def past_partitions(d: Dialect, now: int | None) -> Steps[list[Partition]]:
    """The partitions whose day is over."""
    parts = yield from partitions(d)
    if not parts:
        return []
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    return [part for part in parts if part.end <= at]


def count_if_deletable(d: Dialect, part: Partition, cutoffs: Cutoffs) -> Steps[int | None]:
    """The number of its rows if a purge may delete all of them. Counted before any lock is taken."""

    def steps() -> Steps[int | None]:
        if (yield from _must_keep(d, part, cutoffs)):
            return None
        return int((yield Query(d.statement(f"SELECT count(*) FROM {part.name}"), {}))[0][0])

    return (yield from _if_free(d, _undoable(d, steps())))


def truncate_if_allowed(
    d: Dialect, part: Partition, cutoffs: Cutoffs, check: PurgeCheck, compared: int | None
) -> Steps[bool]:
    """Delete all its rows if that is still allowed and no transaction uses it; returns whether it did.

    `compared` is the number of rows that were compared with the lakes; a row more is one that no lake holds. None
    without a lake.
    """

    def steps() -> Steps[bool]:
        if compared is not None:
            # Only writers of this day that is over wait for the count, and there should be none.
            yield _ddl(d, f"LOCK TABLE {part.name} IN SHARE ROW EXCLUSIVE MODE")
            yield Query(d.sql(_UNHURRIED), {})
            found = int((yield Query(d.statement(f"SELECT count(*) FROM {part.name}"), {}))[0][0])
            if found != compared:
                yield from check.day_again(part.start, part.end)
                return False
            yield Query(d.sql(_BRIEFLY), {})
        # Locks this partition only. To drop it needs a lock on the whole archive.
        yield _ddl(d, f"LOCK TABLE {part.name} IN ACCESS EXCLUSIVE MODE")
        if (yield from _must_keep(d, part, cutoffs)) or not (yield from _any(d, part)):
            return False
        yield _ddl(d, f"TRUNCATE {part.name}")
        yield from check.emptied(part.start, part.end)
        return True

    return (yield from _if_free(d, _briefly(d, steps()))) or False


def drop_if_empty(d: Dialect, part: Partition) -> Steps[None]:
    def steps() -> Steps[None]:
        # From the top down: all transactions lock in this order.
        yield _ddl(d, "LOCK TABLE ONLY {archive} IN ACCESS EXCLUSIVE MODE")
        yield _ddl(d, f"LOCK TABLE {part.name} IN ACCESS EXCLUSIVE MODE")
        if not (yield from _any(d, part)):
            yield _ddl(d, f"DROP TABLE {part.name}")

    yield from _if_free(d, _briefly(d, steps()))


def index_archive(d: Dialect, since: int | None, until: int) -> Steps[None]:
    """Add the pages that were filled since to the index of times; an insert does not do so.

    Only the owner may. VACUUM does it too, and until then the export reads these pages.
    """
    parts = yield from partitions(d)
    filled = [part.name for part in parts if part.start < until and (since is None or part.end > since)]
    for name in (d.fill("{archive_default}"), *filled):
        yield from _if_free(d, _briefly(d, _summarize(d, name)))


def _summarize(d: Dialect, name: str) -> Steps[None]:
    yield Query(d.sql(_SUMMARIZE), {"partition": name})


def _must_keep(d: Dialect, part: Partition, cutoffs: Cutoffs) -> Steps[bool]:
    """Whether a queue and state with rows in it must keep some of them."""
    pairs = yield Query(d.statement(_PAIRS.format(part.name, part.name)), {})
    return any(cutoffs.get((queue, State(state)), -1) < part.end - 1 for queue, state in pairs)


def _any(d: Dialect, part: Partition) -> Steps[bool]:
    return bool((yield Query(d.statement(f"SELECT 1 FROM {part.name} LIMIT 1"), {})))


# --- short locks ----------------------------------------------------------------------------------------


def _if_free(d: Dialect, steps: Steps[T]) -> Steps[T | None]:
    try:
        return (yield from steps)
    except Exception as e:
        if _code(e) in _LATER:
            return None
        raise


def _briefly(d: Dialect, steps: Steps[T]) -> Steps[T]:
    """Run steps that wait for each lock 50 ms at most."""

    def with_short_waits() -> Steps[T]:
        yield Query(d.sql(_BRIEFLY), {})
        return (yield from steps)

    return (yield from _undoable(d, with_short_waits()))


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
    return Query(d.statement(text), {})
