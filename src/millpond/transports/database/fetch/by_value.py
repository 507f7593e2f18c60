"""Cutting a table by the values of one column: for databases that show no pages, and tables whose rows move.

Each slice sees its own moment, so that this is done only for readers who said that they do not mind, or else the
table is one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from millpond.transports.database.dialect import Dialect
from millpond.transports.database.fetch.conditions import Condition, Operator, where
from millpond.transports.database.fetch.slices import Piece, Read, Slice, count, ranges
from millpond.transports.database.statement import Rows


def slices(d: Dialect, rows: Callable[[str, Mapping[str, Any]], Rows], read: Read, size: int) -> Sequence[Slice]:
    """One slice, or, without a snapshot, one for each part of the table's `size` in bytes."""
    parts = 1 if read.snapshot else count(size, read.at_least)
    if parts == 1:
        return [[_piece(d, read, ())]]
    column = "archived_at" if read.table == "archive" else "id"
    ((low, high),) = rows(
        # Not min() and max(): PostgreSQL has none for uuid. These are a step at each end of an index.
        f"SELECT (SELECT {column} FROM {read.source} ORDER BY {column} LIMIT 1), "
        f"(SELECT {column} FROM {read.source} ORDER BY {column} DESC LIMIT 1)",
        {},
    )
    if low is None:
        return [[_piece(d, read, ())]]
    if column == "id":
        return [
            [_piece(d, read, _between(column, a and UUID(int=a), b and UUID(int=b)))]
            for a, b in ranges(d.id_out(low).int, d.id_out(high).int, parts)
        ]
    return [[_piece(d, read, _between(column, a, b))] for a, b in ranges(low, high, parts)]


def _between(column: str, low: Any, high: Any) -> list[Condition]:
    return [
        *([] if low is None else [Condition(column, Operator.AT_LEAST, low)]),
        *([] if high is None else [Condition(column, Operator.BELOW, high)]),
    ]


def _piece(d: Dialect, read: Read, bounds: Sequence[Condition]) -> Piece:
    text, params = where(d, [*read.conditions, *bounds])
    return Piece(f"FROM {read.source} WHERE {text}", params)
