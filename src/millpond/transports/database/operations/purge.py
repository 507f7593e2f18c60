"""Purge the archive, as steps.

Purge deletes in small transactions, and claims and settles run between them. Where the archive has a partition for each
day, whole days go first (`Dialect.purge_partitions`).

With a lake, a transaction deletes rows of one exported range (`exports.ranges`). It chooses rows, then counts those of
the range, then deletes: a row that the count did not see is not among the chosen ones. A range that is not as it was
exported is left out, and the others are purged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from millpond.clock import monotonic
from millpond.errors import LakeIncomplete
from millpond.message import SETTLED, State
from millpond.transports.database.exports.exports import exported_until
from millpond.transports.database.exports.ranges import NOTHING, Part, PurgeCheck
from millpond.transports.database.operations.browse import SETTINGS, archived_queues
from millpond.transports.database.sql.dialect import NOW, Cutoffs, Dialect, Pair, RunSteps
from millpond.transports.database.sql.statement import Query, Steps

_PAIRS_AT_ONCE = 200
"""Queues and states in one transaction."""
_LONGEST_REST = 0.2

# One purge deletes at a time: two would count the same rows or wait for each other.
_PURGE_TURN = "SELECT version FROM {migration} WHERE version = 1 {lock}"
_PURGEABLE = """
SELECT a.archived_at, a.id FROM {archive} a {archive_index}
WHERE a.queue = :queue AND a.state = :state AND a.archived_at >= :since AND a.archived_at <= :until
ORDER BY a.archived_at, a.id LIMIT :limit
"""
_PURGE = """
{delete_a} {archive} AS a {archive_index}
WHERE a.queue = :queue AND a.state = :state AND a.archived_at >= :since AND a.archived_at <= :at
AND (a.archived_at < :at OR a.id <= :id)
"""
# Of messages that are no longer live: a message of the same id may be published again after that time.
_OLD_ONCE = """
SELECT DISTINCT o.id FROM {once} o WHERE o.at <= {now} - :age
AND NOT EXISTS (SELECT 1 FROM {message} m {id_index} WHERE m.id = o.id) LIMIT :limit
"""
_FORGET_ONCE = "DELETE FROM {once} WHERE id {ids} AND at <= {now} - :age"


def forget_once(d: Dialect, age: int, now: int | None, limit: int) -> Steps[int]:
    """Delete entries of `once` that are older than `age` microseconds; returns the number of their messages."""
    rows = yield Query(d.sql(_OLD_ONCE), {"age": age, "now": now, "limit": limit})
    if rows:
        yield Query(d.sql(_FORGET_ONCE), {"ids": [row[0] for row in rows], "age": age, "now": now})
    return len(rows)


def cutoffs(
    d: Dialect,
    queue: str | None,
    *,
    older_than: int | None,
    until: int | None,
    states: Sequence[State],
    now: int | None,
) -> Steps[Cutoffs]:
    """Times up to which a purge may delete: by age, before `until`, or by each queue's retention.

    Never rows that a lake lacks.
    """
    found = yield from _allowed_cutoffs(d, queue, older_than=older_than, until=until, states=states, now=now)
    exported = yield from exported_until(d)
    return found if exported is None else {pair: min(until, exported) for pair, until in found.items()}


def _allowed_cutoffs(
    d: Dialect,
    queue: str | None,
    *,
    older_than: int | None,
    until: int | None,
    states: Sequence[State],
    now: int | None,
) -> Steps[dict[tuple[str, State], int]]:
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    last = at - older_than if older_than is not None else None if until is None else until - 1
    if last is not None:
        names = [queue] if queue is not None else (yield from archived_queues(d))
        return {(name, state): last for name in names for state in states}
    found = {}
    for name, _, completed, failed in (yield Query(d.sql(SETTINGS), {})):
        for state, keep in zip(SETTLED, (completed, failed), strict=True):
            if keep is not None and state in states and queue in (None, name):
                found[name, state] = at - keep
    return found


class PurgedRows(msgspec.Struct, frozen=True):
    """Result of one transaction."""

    rows: int
    places: Mapping[Pair, int | None]
    """Queue and state -> time of the next row that may be deleted; None: none is left. Others are where they were."""
    part: Part
    error: LakeIncomplete | None = None


class RowAppeared(Exception):
    """Another transaction committed a row among the chosen ones; this one is rolled back and runs again."""


async def purge_rows(d: Dialect, run: RunSteps, cutoffs: Cutoffs, limit: int, check: PurgeCheck) -> int:
    """Delete the rows that `cutoffs` allow, oldest first; returns their number. Each step is a transaction."""
    places: dict[Pair, int] = {}
    pairs = iter(cutoffs)
    while some := list(islice(pairs, _PAIRS_AT_ONCE)):
        places |= _known(await run(partial(next_rows, d, dict.fromkeys(some), cutoffs)))
    total = 0
    while places:
        started = monotonic()
        try:
            done: PurgedRows = await run(partial(purge_some, d, places, cutoffs, limit, check))
        except RowAppeared:
            continue
        if done.error is not None:
            check.postpone(done.part, done.error)
        total += done.rows
        places = _known({**places, **done.places})
        await rest(started)
    return total


async def rest(started: float) -> None:
    """Rest as long as a transaction took: a purge takes at most half of a database's time."""
    await asyncio.sleep(min(monotonic() - started, _LONGEST_REST))


def _known(places: Mapping[Pair, int | None]) -> dict[Pair, int]:
    return {pair: place for pair, place in places.items() if place is not None}


def next_rows(d: Dialect, since: Mapping[Pair, int | None], cutoffs: Cutoffs) -> Steps[dict[Pair, int | None]]:
    """Queue and state -> time of its first row from a time on, None for the first of all."""
    found: dict[Pair, int | None] = {}
    for pair, place in since.items():
        rows = yield from _purgeable(d, pair, NOTHING if place is None else place, cutoffs[pair], 1)
        found[pair] = rows[0][0] if rows else None
    return found


def purge_some(
    d: Dialect, places: Mapping[Pair, int], cutoffs: Cutoffs, limit: int, check: PurgeCheck
) -> Steps[PurgedRows]:
    """Delete some of the oldest rows. `places`: queue and state -> time of its next row."""
    yield Query(d.sql(_PURGE_TURN), {})
    part = yield from check.part(min(places.values()))
    here = dict(islice(((pair, at) for pair, at in places.items() if at < part.end), _PAIRS_AT_ONCE))
    chosen: dict[Pair, Sequence[Sequence[Any]]] = {}
    number = 0
    if part.error is None:
        for pair, since in here.items():
            chosen[pair] = yield from _purgeable(d, pair, since, min(cutoffs[pair], part.end - 1), limit - number)
            number += len(chosen[pair])
            if number == limit:
                break
    error = part.error or (yield from check.count_as_purged(part, number))
    if error is not None:
        number, chosen = 0, {pair: [] for pair in here}
    next_places: dict[Pair, int | None] = {}
    for pair, rows in chosen.items():
        if rows:
            yield from _delete(d, pair, here[pair], rows)
    if number == limit:
        # The last one may have more rows here.
        pair, rows = chosen.popitem()
        next_places[pair] = rows[-1][0]
    next_places |= yield from next_rows(d, dict.fromkeys(chosen, part.end), cutoffs)
    return PurgedRows(number, next_places, part, error)


def _purgeable(d: Dialect, pair: Pair, since: int, until: int, limit: int) -> Steps[Sequence[Sequence[Any]]]:
    facts = {"queue": pair[0], "state": pair[1].value, "since": since, "until": until, "limit": limit}
    return (yield Query(d.sql(_PURGEABLE), facts))


def _delete(d: Dialect, pair: Pair, since: int, rows: Sequence[Sequence[Any]]) -> Steps[None]:
    at, id_ = rows[-1]
    facts = {"queue": pair[0], "state": pair[1].value, "since": since, "at": at, "id": id_}
    if (yield from d.delete(_PURGE, facts)) != len(rows):
        raise RowAppeared
