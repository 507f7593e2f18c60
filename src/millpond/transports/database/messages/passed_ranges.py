"""Places that claims passed, to be read once more, and parts of everything below."""

from __future__ import annotations

from collections.abc import Mapping

from millpond.clock import SECOND, monotonic
from millpond.transports.database.sql.dialect import Floor
from millpond.transports.database.sql.transaction_marks import MarkRange

_LATER = 1.0
"""Seconds until a range is read again: by then other claims that held its rows have ended."""


class PassedRanges:
    """The ranges that claims have passed.

    A claim skips rows that another transaction has locked. If that ends without a change, no mark shows them.
    """

    def __init__(self) -> None:
        self._old: dict[int, MarkRange] = {}
        self._young: dict[int, MarkRange] = {}
        self._since = monotonic()

    def add(self, lane: int, low: Floor, high: Floor) -> None:
        known = self._young.get(lane)
        if known is not None:
            low, high = min(low, known.low), max(high, known.high)
        self._young[lane] = MarkRange(lane, low, high)

    def due(self) -> Mapping[int, MarkRange] | None:
        """The ranges to read now, by lane; None if it is not time."""
        return self._old if monotonic() - self._since >= _LATER else None

    def read(self, ranges: Mapping[int, MarkRange] | None) -> None:
        """The ranges of `due` were read."""
        if ranges is self._old:  # and not meanwhile by another claim
            self._old, self._young = self._young, {}
            self._since = monotonic()


_LOWEST = -(2**63)
_PART = 60 * SECOND
_PART_EVERY, _SWEEP_EVERY = 5.0, 60.0
_QUICK = 0.003


class Sweep:
    """A search through all that is below the floors, a part every five seconds, from the newest to the oldest.

    It finds messages that no mark and no passed range shows: restored or replicated rows, which bring the marks of
    another server. A part that takes long is followed by a smaller one: a claim waits for it.
    """

    def __init__(self) -> None:
        self._to: int | None = None
        self._size = _PART
        self._next = monotonic() + _PART_EVERY

    def part(self, at: int) -> tuple[int, int] | None:
        """The next part, as due times; None if it is not time. `at`: the database's time."""
        if monotonic() < self._next:
            return None
        to = at if self._to is None else self._to
        return max(to - self._size, _LOWEST), to

    def read(self, part: tuple[int, int], took: float, usual: float) -> None:
        """A part was read. `took`: seconds; `usual`: seconds of a read without a part."""
        low, to = part
        if self._to is not None and to != self._to:
            return  # read by another claim meanwhile
        quick = max(_QUICK, 2 * usual)
        if took < quick:
            self._size *= 4
        elif took > 2 * quick:
            self._size = max(self._size // 4, SECOND)
        if low == _LOWEST:
            self._to, self._size = None, _PART
            self._next = monotonic() + _SWEEP_EVERY
        else:
            self._to = low
            self._next = monotonic() + _PART_EVERY
