"""Slices of a closed range of the archive: rows archived from one time on and before another, which never change.

The cost of a range must not grow with the archive or with the number of queues. MySQL keeps the table in the order of
archiving. SQLite has an index in that order, and PostgreSQL a BRIN index: the least and greatest time of each block of
pages, which costs a settle next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from millpond.seam.arrow import Read, Slice
from millpond.transports.database.arrow.conditions import between, piece
from millpond.transports.database.arrow.slices import ranges
from millpond.transports.database.sql.dialect import Dialect


def by_table(since: int | None, until: int, at_least: int) -> Read:
    """Read the table as any other read does. Closed rows never change, so slices need no common snapshot."""
    return Read("archive", between("archived_at", since, until), at_least, snapshot=False)


def by_time(d: Dialect, since: int, until: int, at_least: int) -> Sequence[Slice]:
    """Read parts of equal length by the index."""
    bounds = [(low or since, high or until) for low, high in ranges(since, until - 1, at_least)]
    return [[piece(d, "{archive}", between("archived_at", low, high), by_index=True)] for low, high in bounds]
