"""The files of a lake, and the entries of the Delta log that add them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.clock import SystemClock, as_datetime

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

MILLISECOND = 1000
STATISTICS = ("queue", "state", "archived_at", "shard")
"""Columns whose least and greatest values the log has for each file."""


class Bounds(msgspec.Struct, frozen=True):
    """The least or the greatest values of a file."""

    queue: str
    state: str
    archived_us: int
    shard: int

    @classmethod
    def of(cls, choose: Callable[..., Any], *several: Bounds) -> Bounds:
        """The least (`min`) or greatest (`max`) values of several."""
        return cls(*(choose(values) for values in zip(*map(msgspec.structs.astuple, several), strict=True)))


class File(msgspec.Struct, frozen=True):
    """One Parquet file: messages that were archived on one day."""

    path: str
    """Relative to the lake."""
    day: str
    """UTC date of archiving: 2026-11-16."""
    rows: int
    size: int
    least: Bounds
    greatest: Bounds


class Progress(msgspec.Struct, frozen=True):
    """The range of a shard's archive that one commit adds, and its number of messages."""

    since: int | None
    until: int
    rows: int


def add_action(file: File, *, data_change: bool = True) -> AddAction:
    from deltalake.transaction import AddAction

    statistics = {
        "numRecords": file.rows,
        "minValues": _values(file.least, 0),
        "maxValues": _values(file.greatest, MILLISECOND - 1),
        "nullCount": dict.fromkeys(STATISTICS, 0),
    }
    now = SystemClock().now() // MILLISECOND
    return AddAction(file.path, file.size, {"day": file.day}, now, data_change, json.dumps(statistics))


def _values(bounds: Bounds, up: int) -> dict[str, Any]:
    """Delta has times in milliseconds. The least is rounded down and the greatest up: readers leave out files by them.

    >>> _values(Bounds("q", "FAILED", 1_700_000_000_123_456, 0), MILLISECOND - 1)["archived_at"]
    '2023-11-14T22:13:20.124Z'
    """
    at = (bounds.archived_us + up) // MILLISECOND * MILLISECOND
    text = as_datetime(at).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"queue": bounds.queue, "state": bounds.state, "archived_at": text, "shard": bounds.shard}
