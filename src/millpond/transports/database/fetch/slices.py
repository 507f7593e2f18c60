"""How a large read is cut into parts that can be read side by side, each row in exactly one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.transports.database.fetch.conditions import Condition

SLICE_BYTES = 256 << 20
"""A task reads so much in about a second."""


@dataclass(frozen=True)
class Piece:
    """One statement's part of a read."""

    rest: str
    """What follows the columns."""
    params: Mapping[str, Any] = field(default_factory=dict)
    blocks: str | None = None
    """A table `b` whose rows `rest` refers to: what it finds for each of them may travel as one."""
    unmoved: str | None = None
    """Asked after the rows and in their transaction; an answer other than 0 says that rows were moved meanwhile."""


Slice = Sequence[Piece]
"""What one task reads, one piece after the other."""


@dataclass(frozen=True)
class Read:
    """What is to be read of a table, `messages` or `archive`."""

    table: str
    conditions: Sequence[Condition] = ()
    at_least: int = 1
    """Slices, where there is enough to cut."""
    snapshot: bool = True
    """All slices show one moment of the database: fewer slices where only one statement can do that."""

    @property
    def source(self) -> str:
        return "{archive}" if self.table == "archive" else "{message}"


def count(size: int, at_least: int) -> int:
    """How many slices: a multiple of what was asked for, so that as many cores share them evenly."""
    return at_least * max(1, -(-size // (at_least * SLICE_BYTES)))


def ranges(low: int, high: int, parts: int) -> list[tuple[int | None, int | None]]:
    """Bounds (from, below) that cover everything: the first has no lower one, the last no upper one."""
    step = max(1, -(-(high - low + 1) // parts))
    inner = list(range(low + step, high + 1, step))
    return list(zip([None, *inner], [*inner, None], strict=True))
