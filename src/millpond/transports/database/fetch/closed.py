"""Cutting a closed stretch of the archive: rows archived from one moment on and before another, which never change.

A stretch must not cost more on a larger archive. Where the table is kept in the order of archiving (MySQL), any part of
it is found at once. Elsewhere an index has that order within each queue and state, and the stretch is read queue by
queue; where days are partitions, more than a few hours are read as these lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millpond.clock import SECOND
from millpond.message import SETTLED
from millpond.transports.database import statements as sql
from millpond.transports.database.fetch.conditions import Condition, Operator, where
from millpond.transports.database.fetch.slices import Piece, Read, Slice, ranges

if TYPE_CHECKING:
    from millpond.transports.database.dialect import Dialect
    from millpond.transports.database.fetch import Fetcher

SHORT = 6 * 3600 * SECOND
"""A stretch that is read by the index although days are partitions: less than about a quarter of one."""
_MOST_QUEUES = 1000
"""Beyond, looking at each queue takes longer than reading the table."""


def slices(fetcher: Fetcher, since: int | None, until: int, at_least: int) -> Sequence[Slice]:
    d = fetcher.dialect
    if since is None:
        return fetcher.slices(Read("archive", _between(None, until), at_least, snapshot=d.sole_writer))
    parts = [(low or since, high or until) for low, high in ranges(since, until - 1, at_least)]
    if d.archive_by_time:
        return [[_piece(d, _between(low, high))] for low, high in parts]
    if not d.day_partitions or until - since < SHORT:
        queues = _queues(fetcher)
        if len(queues) <= _MOST_QUEUES:
            return [_by_queue(d, queues, _between(low, high)) for low, high in parts]
    return fetcher.slices(Read("archive", _between(since, until), at_least, snapshot=d.sole_writer))


def _between(low: int | None, high: int) -> list[Condition]:
    below = Condition("archived_at", Operator.BELOW, high)
    return [below] if low is None else [Condition("archived_at", Operator.AT_LEAST, low), below]


def _queues(fetcher: Fetcher) -> list[str]:
    rows = fetcher.rows(sql.FIRST_ARCHIVED_QUEUE, {})
    names: list[str] = []
    while (found := [name for (name,) in rows if name is not None]) and len(names) <= _MOST_QUEUES:
        names += found
        rows = fetcher.rows(sql.ARCHIVED_QUEUES, {"after": names[-1]})
    return names


def _by_queue(d: Dialect, queues: Sequence[str], bounds: Sequence[Condition]) -> list[Piece]:
    return [
        _piece(
            d,
            [Condition("queue", Operator.EQUAL, queue), Condition("state", Operator.EQUAL, state.value), *bounds],
        )
        for queue in queues
        for state in SETTLED
    ]


def _piece(d: Dialect, conditions: Sequence[Condition]) -> Piece:
    text, params = where(d, conditions)
    return Piece(f"FROM {{archive}} WHERE {text}", params)
