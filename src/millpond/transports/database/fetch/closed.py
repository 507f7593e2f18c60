"""Cutting a closed stretch of the archive: rows archived from one moment on and before another, which never change.

A small stretch must not cost more on a large archive. Where the table is kept in the order of archiving (MySQL), any
part of it is found at once. Elsewhere an index has that order within each queue and state: a short stretch is read
queue by queue, and a long one, or everything, as the table lies.
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
    from millpond.transports.database.fetch import Fetcher

SHORT = 6 * 3600 * SECOND
"""A stretch that is found by the index: less than about a quarter of a day's partition."""
_MOST_QUEUES = 1000
"""Beyond, looking at each queue takes longer than reading the table."""


def slices(fetcher: Fetcher, since: int | None, until: int, at_least: int) -> Sequence[Slice]:
    d = fetcher.dialect
    bounds = [Condition("archived_at", Operator.BELOW, until)]
    if since is not None:
        bounds.insert(0, Condition("archived_at", Operator.AT_LEAST, since))
        if not d.archive_by_time and until - since < SHORT:
            queues = _queues(fetcher)
            if len(queues) <= _MOST_QUEUES:
                return _by_queue(fetcher, queues, since, until, at_least)
    return fetcher.slices(Read("archive", bounds, at_least, snapshot=d.sole_writer))


def _queues(fetcher: Fetcher) -> list[str]:
    rows = fetcher.rows(sql.FIRST_ARCHIVED_QUEUE, {})
    names: list[str] = []
    while (found := [name for (name,) in rows if name is not None]) and len(names) <= _MOST_QUEUES:
        names += found
        rows = fetcher.rows(sql.ARCHIVED_QUEUES, {"after": names[-1]})
    return names


def _by_queue(fetcher: Fetcher, queues: Sequence[str], since: int, until: int, at_least: int) -> list[Slice]:
    """Each slice a part of the time, of every queue and state."""
    found: list[Slice] = []
    for low, high in ranges(since, until - 1, at_least):
        pieces = []
        for queue in queues:
            for state in SETTLED:
                conditions = [
                    Condition("queue", Operator.EQUAL, queue),
                    Condition("state", Operator.EQUAL, state.value),
                    Condition("archived_at", Operator.AT_LEAST, since if low is None else low),
                    Condition("archived_at", Operator.BELOW, until if high is None else high),
                ]
                text, params = where(fetcher.dialect, conditions)
                pieces.append(Piece(f"FROM {{archive}} WHERE {text}", params))
        found.append(pieces)
    return found
