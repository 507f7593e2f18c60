"""Hints about the lanes of a queue, kept in the process: a claim then needs few queries."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from millpond.transports.database.sql.columns import SUSPECT_LANE
from millpond.transports.database.sql.dialect import Dialect, Floor
from millpond.transports.database.sql.statement import Steps

_LAST_LANE = 2 * SUSPECT_LANE
READ_BELOW_EVERY = 1.0
"""Seconds after which a claim reads below the floors in any case."""


class Took(NamedTuple):
    """The part of a lane that a claim took."""

    messages: int
    last: Floor | None
    """The place of the last message."""
    at: int | None = None
    """The database's time of this claim, where it is known."""


class Takes(NamedTuple):
    """How a claim takes messages: from a lane (lane, limit, floor), and by their ids (ids, limit)."""

    lane: Callable[[int, int, Floor | None], Steps[Took]]
    ids: Callable[[Sequence[Any], int], Steps[set[Any]]] | None = None
    """Returns the ids that it took. None: it takes from lanes only."""


class LaneSearch(msgspec.Struct, frozen=True):
    """Where a claim finds messages."""

    due: Sequence[int]
    """Lanes to visit, in order."""
    read_below: bool
    """Below the floors too."""
    dropped: Mapping[int, Floor] = {}
    """Floors that do not count for this claim."""
    seconds: float = 0.0


class Lanes(ABC):
    """Hints of one process about one queue's lanes.

    `known`: lanes seen before. Each has a floor: the place where the last claim ended and the next one begins. It saves
    a claim the dead rows before it. Late commits, give-backs and reschedules can appear below any floor, so a claim
    also reads there: in any case once a second, and when this process put a message there.
    Suspects and other messages take turns at the front, and neither starves the other.
    """

    def __init__(self) -> None:
        self.known: list[int] = []
        self.claimed_at = math.inf
        """When the last claim began, by the clock of `monotonic`. Infinite: no caller claimed here."""
        self.suspects_turn = True

    @abstractmethod
    def search(self, d: Dialect, queue: str, now: int | None) -> Steps[LaneSearch]:
        """Find the lanes to visit. Read below the floors if it is time."""

    @abstractmethod
    def take(self, found: LaneSearch, lane: int, wanted: int, takes: Takes) -> Steps[int]:
        """Take messages of a lane; returns their number."""

    @abstractmethod
    def read_again(self, found: LaneSearch, taken: int) -> bool:
        """Whether to read below the floors at once, after a claim that was not full."""

    @abstractmethod
    def fall(self) -> None:
        """A message may have appeared below the floors."""

    @abstractmethod
    def places(self, d: Dialect, queue: str, now: int | None) -> Steps[Sequence[tuple[int, Floor | None]]]:
        """Lanes with due messages, and the floor of each, for a read."""

    @abstractmethod
    def published(self, priority: int) -> None:
        """This process published a message of this priority."""

    def add(self, lane: int) -> None:
        if lane not in self.known:
            self.known.append(lane)
            self.known.sort()

    def gaps(self) -> list[tuple[int, int]]:
        """The known lanes as (lane, lane), and the ranges between them."""
        gaps, low = [], 0
        for lane in self.known:
            if low < lane:
                gaps.append((low, lane - 1))
            gaps.append((lane, lane))
            low = lane + 1
        gaps.append((low, _LAST_LANE))
        return gaps

    def probe(self, d: Dialect, queue: str, now: int | None, floors: Mapping[int, Floor]) -> Steps[list[int]]:
        """Find lanes with due messages above these floors. Lanes that were not known are added."""
        while True:
            gaps = self.gaps()
            rows = yield d.probe({"queue": queue, "now": now}, gaps, [floors.get(low) for low, _ in gaps])
            found = {int(row[0]) for row in rows if row[0] is not None}
            new = found.difference(self.known)
            if not new:
                return sorted(found)
            for lane in new:
                self.add(lane)
