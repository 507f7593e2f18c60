"""Reap, as steps: give back messages whose own lease has lapsed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from millpond.clock import SECOND, monotonic
from millpond.seam.transport import NEVER_US
from millpond.transports.database.messages.refused_rows import RefusedRows
from millpond.transports.database.sql.columns import BACK_FROM_REAPER
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Query, Rows, Steps
from millpond.transports.database.sql.writes import DETACHED

REAP_BATCH = 1000
_ALL_LEASES_EVERY = 10.0
_ALL_LEASES_REST = 100
"""A search without a floor reads every dead entry. It rests for this many times its duration."""
_COMMIT_WITHIN_US = 5 * SECOND

# Read first, then locked by id: no other rows are touched on the way, and nothing is written when there is nothing to
# do. InnoDB's locking reads would step over every dead entry, also past the end of the range.
_LAPSED = """
SELECT id FROM {message} {lease_index} WHERE state = 'PROCESSING' AND lease_until >= :floor AND lease_until <= {now}
ORDER BY lease_until LIMIT :limit
"""
_LOCK_LAPSED = "SELECT id FROM {message} WHERE id {ids} AND state = 'PROCESSING' AND lease_until <= {now} {locked}"
# From the last end on down. Messages that workers or streams hold are not among them.
_LONGEST = """
SELECT id, lease_until, lease, {now} FROM {message} {lease_index}
WHERE state = 'PROCESSING' AND lease_until > {now} AND lease_until < :below ORDER BY lease_until DESC LIMIT :limit
"""
_LOCK_TOO_LONG = (
    "SELECT id FROM {message} WHERE id {ids} AND state = 'PROCESSING' AND lease_until > {now} + lease {locked}"
)
_SHORTEN = f"UPDATE {{message}} SET {DETACHED} WHERE id {{ids}}"
_RELEASE = f"UPDATE {{message}} SET {BACK_FROM_REAPER} WHERE id {{ids}}"


class LeaseRows:
    """The place where a reaper searches for lapsed leases: a hint that skips the dead index entries of past ones.

    After a search without result, older leases can only come from transactions that committed late or had their rows
    locked. The floor leaves those five seconds, and the search has none every ten seconds, or later if it takes long.
    """

    def __init__(self) -> None:
        self.floor = 0
        self.below = NEVER_US
        """The next search for leases that are too long begins below this end."""
        self._next_full = 0.0

    def refresh(self) -> None:
        if monotonic() >= self._next_full:
            self.floor = 0

    def none_before(self, at: int, took: float) -> None:
        """A search without a floor found nothing. `took`: its duration in seconds."""
        self.floor = at - _COMMIT_WITHIN_US
        self._next_full = monotonic() + max(_ALL_LEASES_EVERY, _ALL_LEASES_REST * took)


def lapsed_ids(d: Dialect, leases: LeaseRows, now: int | None, limit: int) -> Steps[list[Any]]:
    """The ids of messages whose lease has lapsed."""
    leases.refresh()
    at = None if leases.floor or now is not None else (yield Query(d.sql(NOW), {"now": None}))[0][0]
    began = monotonic()
    rows = yield Query(d.sql(_LAPSED), {"floor": leases.floor, "now": now, "limit": limit})
    if at is not None and not rows:
        leases.none_before(at, monotonic() - began)
    return [row[0] for row in rows]


def release_lapsed(d: Dialect, ids: Sequence[Any], now: int | None) -> Steps[int]:
    """Give back those whose lease is still lapsed; returns their number."""
    return (yield from release_rows(d, (yield Query(d.sql(_LOCK_LAPSED), {"ids": ids, "now": now})), now))


def too_long_ids(d: Dialect, leases: LeaseRows, now: int | None) -> Steps[list[Any]]:
    """The ids of messages whose lease ends later than a whole lease from now: the clock was set back.

    Each search reads one batch, and the next one continues below it.
    """
    rows = yield Query(d.sql(_LONGEST), {"below": leases.below, "limit": REAP_BATCH, "now": now})
    found = [id_ for id_, until, lease, at in rows if lease is not None and until > at + lease]
    if len(rows) < REAP_BATCH:
        leases.below = NEVER_US
    elif not found:
        leases.below = rows[-1][1]
    return found


def shorten_leases(d: Dialect, ids: Sequence[Any], now: int | None) -> Steps[int]:
    """Let leases that are too long end a whole lease from now; returns their number."""
    rows = yield Query(d.sql(_LOCK_TOO_LONG), {"ids": ids, "now": now})
    if rows:
        yield Query(d.sql(_SHORTEN), {"ids": [row[0] for row in rows], "now": now})
    return len(rows)


def release_rows(d: Dialect, rows: Rows, now: int | None) -> Steps[int]:
    """Give back locked rows, and count a crash of those whose worker died or hung."""
    if rows:
        yield Query(d.sql(_RELEASE), {"ids": [row[0] for row in rows], "now": now})
    return len(rows)


async def release_all(
    refused: RefusedRows,
    find: Callable[[int], Awaitable[Sequence[Any]]],
    release: Callable[[Sequence[Any]], Awaitable[int]],
) -> tuple[int, bool]:
    """Find messages, up to a limit, and release them until none is left; returns their number.

    The second value is true if some are left: other transactions have locked them, or the database refuses them.
    """
    total, limit = 0, REAP_BATCH
    while ids := await find(limit):
        count = sum(await refused.write(release, ids))
        total += count
        if len(ids) < limit:
            return total, count < len(ids)
        if not count:
            limit *= 2  # there may be more behind the first ones
    return total, False
