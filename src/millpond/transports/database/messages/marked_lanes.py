"""Lanes whose messages below the floors are found by the transactions that wrote them: PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.clock import SECOND, monotonic
from millpond.transports.database.messages.lanes import READ_BELOW_EVERY, Lanes, LaneSearch, Takes
from millpond.transports.database.messages.passed_ranges import PassedRanges, Sweep
from millpond.transports.database.sql.dialect import Dialect, Floor
from millpond.transports.database.sql.statement import Steps
from millpond.transports.database.sql.transaction_marks import Appeared, Below, FirstDue, Marks

_BEHIND = SECOND // 10
"""Microseconds by which a floor stays behind the time. Most messages are committed sooner after they became due."""
_MOST_BELOW = 5000


class MarkedLanes(Lanes):
    """A read asks for messages below the floors that were written since the last one. A claim takes them by their ids.

    Both cost as much as there are new messages, however many dead rows there are. Only the first read, and one after
    more messages appeared than a process should keep, reads all lanes.
    """

    def __init__(self, marks: Marks, lowest: Floor) -> None:
        super().__init__()
        self._marks = marks
        self._lowest = lowest
        self._floors: dict[int, Floor] = {}
        self._below: dict[int, list[Floor]] = {}
        """Messages below the floor of their lane, in order."""
        self._tried: set[Any] = set()
        """Ids of messages below that a claim did not get: they are locked, or another claim has them."""
        self._since: str | None = None
        """The snapshot of the last read."""
        self._at = 0
        self._passed = PassedRanges()
        self._sweep = Sweep()
        self._falls = self._answered = 0
        """Number of times that a message fell below, and the number of them that a read has answered."""
        self._read_at = 0.0
        self._took = 0.0
        self._round = 0
        """Number of the last read of all lanes. A claim that began before it does not raise a floor."""

    # --- search -------------------------------------------------------------------------------------

    def search(self, d: Dialect, queue: str, now: int | None) -> Steps[LaneSearch]:
        if self._since is None or self._falls > self._answered or monotonic() - self._read_at >= READ_BELOW_EVERY:
            return LaneSearch((yield from self._read_below(d, queue, now)), read_below=True)
        if len(self.known) < 2:
            # The claim itself finds out whether a message is due.
            return LaneSearch(self.known.copy(), read_below=False)
        first = yield from self._marks.first_due(queue, self._floors, now)
        return LaneSearch(self._raise(first), read_below=False)

    def _read_below(self, d: Dialect, queue: str, now: int | None) -> Steps[Sequence[int]]:
        falls, began = self._falls, monotonic()  # a message that falls from now on is for the next read
        if (since := self._since) is None:
            return (yield from self._read_everywhere(d, queue, now))
        ranges, part, tried = self._passed.due(), self._sweep.part(self._at), set(self._tried)
        asked = Below(self._floors.copy(), since, list((ranges or {}).values()), part, list(tried))
        appeared = yield from self._marks.below(queue, asked, now)
        if not appeared.is_complete or appeared.first.at < self._at:
            return (yield from self._read_everywhere(d, queue, now))
        self._since, self._at, self._read_at = appeared.snapshot, appeared.first.at, began
        self._answered = falls
        self._tried -= tried
        self._passed.read(ranges)
        took = monotonic() - began
        if part is None:
            self._took = took
        else:
            self._sweep.read(part, took, self._took)
        return self._place(appeared)

    def _read_everywhere(self, d: Dialect, queue: str, now: int | None) -> Steps[Sequence[int]]:
        """Read all lanes from their beginning."""
        self._round += 1
        self._since = None
        falls, began = self._falls, monotonic()
        since = yield from self._marks.snapshot()  # before the lanes are read: what comes later has later marks
        self._floors, self._below, self._tried, self._passed = {}, {}, set(), PassedRanges()
        yield from self.probe(d, queue, now, {})
        first = yield from self._marks.first_due(queue, dict.fromkeys(self.known, self._lowest), now)
        self._since, self._at, self._read_at = since, first.at, began
        self._answered = falls
        return self._raise(first)

    def _place(self, appeared: Appeared) -> Sequence[int]:
        """Keep the messages that appeared; returns lanes with due messages."""
        first = dict(appeared.first.places)
        for lane, place in appeared.messages:
            if lane not in self._floors:
                # It was empty so far: everything in it has appeared.
                self.add(lane)
                self._floors[lane] = min(place, self._behind(appeared.first.at))
                if place[0] <= appeared.first.at:
                    first[lane] = place
            elif place < self._floors[lane] and place not in self._below.get(lane, ()):
                self._below.setdefault(lane, []).append(place)
        for places in self._below.values():
            places.sort()
        if sum(map(len, self._below.values())) > _MOST_BELOW:
            self._since = None  # the next claim reads all lanes
        return self._raise(FirstDue(appeared.first.at, first))

    def _raise(self, first: FirstDue) -> Sequence[int]:
        """Raise floors to the first due message; returns lanes with due messages."""
        behind = self._behind(first.at)
        for lane in self.known:
            place = min(first.places.get(lane, behind), behind)
            self._floors[lane] = max(self._floors.get(lane, self._lowest), place)
        return sorted({*first.places, *self._below})

    def _behind(self, at: int) -> Floor:
        return at - _BEHIND, self._lowest[1]

    # --- take ---------------------------------------------------------------------------------------

    def take(self, found: LaneSearch, lane: int, wanted: int, takes: Takes) -> Steps[int]:
        count = 0
        higher = floor = self._floors.get(lane, self._lowest)
        if places := self._below.get(lane):
            if takes.ids is None:
                floor = min(floor, places[0])
                self._floors[lane] = floor
                del self._below[lane]
            else:
                count = yield from self._take_below(lane, places, wanted, takes)
                if count == wanted:
                    return count
        round_ = self._round
        took = yield from takes.lane(lane, wanted - count, floor)
        if took.last is not None and round_ == self._round:
            is_full = count + took.messages == wanted
            self._claimed(lane, floor, took.last if is_full else max(took.last, higher), took.at, is_full=is_full)
        return count + took.messages

    def _take_below(self, lane: int, places: Sequence[Floor], wanted: int, takes: Takes) -> Steps[int]:
        assert takes.ids is not None
        self._below.pop(lane)
        self._tried.update(id_ for _, id_ in places)  # before the statement, which may fail
        got = yield from takes.ids([id_ for _, id_ in places], wanted)
        self._tried.difference_update(got)
        left = [place for place in places if place[1] not in got]
        if len(got) == wanted and left:
            self._tried.difference_update(id_ for _, id_ in left)
            self._below[lane] = sorted({*left, *self._below.get(lane, ())})
        return len(got)

    def _claimed(self, lane: int, floor: Floor, end: Floor, at: int | None, *, is_full: bool) -> None:
        """A claim from this floor on has ended here. One that was not full left nothing that is due."""
        if at is not None:
            behind = self._behind(at)
            end = min(end, behind) if is_full else max(behind, floor)
        if end > floor:
            self._passed.add(lane, floor, end)
            self._floors[lane] = max(end, self._floors.get(lane, end))

    def read_again(self, found: LaneSearch, taken: int) -> bool:
        return not found.read_below and not taken

    def fall(self) -> None:
        self._falls += 1

    def published(self, priority: int) -> None:
        if priority not in self.known:
            self._falls += 1

    def places(self, d: Dialect, queue: str, now: int | None) -> Steps[Sequence[tuple[int, Floor | None]]]:
        found = yield from self.search(d, queue, now)
        floors = {lane: self._floors.get(lane, self._lowest) for lane in found.due}
        return [(lane, min(floor, *self._below.get(lane, [floor]))) for lane, floor in floors.items()]
