"""Slices by the values of one column: for databases that show no pages, and for tables whose rows move.

Each slice sees the database at its own time. So a read that asks for a snapshot gets one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from millpond.seam.arrow import Read, Slice
from millpond.transports.database.arrow.conditions import between, piece
from millpond.transports.database.arrow.slices import count, ranges
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Rows


def slices(d: Dialect, rows: Callable[[str, Mapping[str, Any]], Rows], read: Read, size: int) -> Sequence[Slice]:
    """One slice, or, without a snapshot, as many as the table's `size` in bytes suggests."""
    parts = 1 if read.snapshot else count(size, read.at_least)
    everything = [[piece(d, read.source, read.conditions)]]
    if parts == 1:
        return everything
    column = "archived_at" if read.table == "archive" else "id"
    ((low, high),) = rows(
        # Not min() and max(): PostgreSQL has none for uuid. These are a step at each end of an index.
        f"SELECT (SELECT {column} FROM {read.source} ORDER BY {column} LIMIT 1), "
        f"(SELECT {column} FROM {read.source} ORDER BY {column} DESC LIMIT 1)",
        {},
    )
    if low is None:
        return everything
    bounds: Sequence[tuple[Any, Any]]
    if column == "id":
        numbers = ranges(d.id_out(low).int, d.id_out(high).int, parts)
        bounds = [(a and UUID(int=a), b and UUID(int=b)) for a, b in numbers]
    else:
        bounds = ranges(low, high, parts)
    return [[piece(d, read.source, [*read.conditions, *between(column, a, b)])] for a, b in bounds]
