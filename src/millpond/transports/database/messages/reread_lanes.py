"""Lanes whose messages below the floors are found by reading there again: MySQL, MariaDB, SQLite."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.clock import monotonic
from millpond.transports.database.messages.lanes import READ_BELOW_EVERY, Lanes, LaneSearch, Takes
from millpond.transports.database.sql.columns import SUSPECT_LANE
from millpond.transports.database.sql.dialect import Dialect, Floor
from millpond.transports.database.sql.statement import Steps

_QUICK = 0.005


class RereadLanes(Lanes):
    """A claim drops the floors to read below them.

    After a claim that was not full it does so at once if such a read was quick before. A long one means many dead rows,
    and waits for its second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._floors: dict[int, Floor] = {}
        self._fell = True
        self._read_at = 0.0
        self._took = 0.0

    def search(self, d: Dialect, queue: str, now: int | None) -> Steps[LaneSearch]:
        read_below = not self._floors_count()
        dropped: dict[int, Floor] = {}
        if read_below:
            self._fell = False  # a message that falls from now on is for the next claim
            dropped, self._floors = self._floors, {}
        began = monotonic()
        due = yield from self.probe(d, queue, now, self._floors)
        took = monotonic() - began
        if read_below:
            self._read_at, self._took = began, took
            # In lanes without a due message they count again.
            self._floors.update((lane, floor) for lane, floor in dropped.items() if lane not in due)
        return LaneSearch(due, read_below, dropped, took)

    def take(self, found: LaneSearch, lane: int, wanted: int, takes: Takes) -> Steps[int]:
        if lane >= SUSPECT_LANE:
            return (yield from takes.lane(lane, wanted, None)).messages
        took = yield from takes.lane(lane, wanted, self._floors.get(lane))
        if took.last is not None:
            # A claim that was not full left nothing below the older floor.
            older = found.dropped.get(lane) if took.messages < wanted else None
            self._floors[lane] = max(took.last, older or took.last)
        return took.messages

    def read_again(self, found: LaneSearch, taken: int) -> bool:
        # Compared with the probe above the floors too: on a busy machine every query takes long.
        return not found.read_below and self._took < max(_QUICK, 5 * found.seconds)

    def fall(self) -> None:
        self._fell = True

    def published(self, priority: int) -> None:
        """The next probe finds its lane."""

    def places(self, d: Dialect, queue: str, now: int | None) -> Steps[Sequence[tuple[int, Floor | None]]]:
        floors = self._floors if self._floors_count() else {}
        due = yield from self.probe(d, queue, now, floors)
        return [(lane, floors.get(lane)) for lane in due]

    def _floors_count(self) -> bool:
        return bool(self._floors) and not self._fell and monotonic() - self._read_at < READ_BELOW_EVERY
