"""Reads whose bodies fit in memory: the size of the last bodies decides about the number of the next rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpond.seam.operations import Operations, Row

AT_ONCE, FIRST = 500, 50
"""Rows of one read, and of the first one, when the size of bodies is not known."""
BYTES_AT_ONCE = 8 * 1024 * 1024
"""Bytes of bodies of one read, as far as the last bodies tell."""

Read = Callable[[int, Sequence[Any] | None], Awaitable[list[Row]]]
"""Reads a number of rows after a position."""


def first() -> int:
    """Number of rows of the first read."""
    return min(FIRST, AT_ONCE)


def most_after(rows: Sequence[Row]) -> int:
    """Number of rows of the next read."""
    if not rows:
        return first()
    largest = max(len(row.payload) for row in rows)
    return max(1, min(AT_ONCE, BYTES_AT_ONCE // max(1, largest)))


async def pages(read: Read) -> AsyncIterator[list[Row]]:
    """All rows, page by page."""
    size, after = first(), None
    while True:
        rows = await read(size, after)
        if rows:
            yield rows
        if len(rows) < size:
            return
        size, after = most_after(rows), rows[-1].position


async def find_pages(operations: Operations, ids: Sequence[UUID]) -> AsyncIterator[tuple[Sequence[UUID], list[Row]]]:
    """Some of the ids and their messages, until all were read."""
    size, begin = first(), 0
    while begin < len(ids):
        some = ids[begin : begin + size]
        rows = await operations.find(some)
        yield some, rows
        begin, size = begin + size, most_after(rows)


def without_body(row: Row) -> Row:
    return msgspec.structs.replace(row, payload=b"", headers={}, history=None)
