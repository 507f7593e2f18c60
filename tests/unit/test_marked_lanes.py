"""Lanes with marks: which queries a claim makes, and where it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from millpond.clock import SECOND
from millpond.transports.database.messages.lanes import LaneSearch, Takes, Took
from millpond.transports.database.messages.marked_lanes import MarkedLanes
from millpond.transports.database.sql.dialect import Floor
from millpond.transports.database.sql.transaction_marks import Appeared, Below, FirstDue
from tests.unit.lanes import DIALECT, Watch, run, takes, watch

__all__ = ["watch"]

LOWEST = (-(2**63), "")
NOW = 1_000 * SECOND
BEHIND = (NOW - SECOND // 10, "")
OLD, OLDER = (NOW - 60 * SECOND, "m"), (NOW - 90 * SECOND, "k")


class Asked:
    """Marks whose questions a test answers."""

    def snapshot(self) -> Any:
        return (yield "snapshot")

    def first_due(self, queue: str, floors: Mapping[int, Floor], now: int | None) -> Any:
        return (yield "first due", dict(floors))

    def below(self, queue: str, asked: Below, now: int | None) -> Any:
        return (yield asked)


def first(**places: Floor) -> FirstDue:
    """`l50` is lane 50."""
    return FirstDue(NOW, {int(lane[1:]): place for lane, place in places.items()})


def appeared(*messages: tuple[int, Floor], snapshot: str = "9:9:", **places: Floor) -> Appeared:
    return Appeared(snapshot, first(**places), messages, is_complete=True)


def search(lanes: MarkedLanes, *answers: Any) -> tuple[LaneSearch, list[Any]]:
    found: tuple[LaneSearch, list[Any]] = run(lanes.search(DIALECT, "q", None), answers)
    return found


def take(lanes: MarkedLanes, found: LaneSearch, result: Took, ids: set[Any] | None = frozenset()) -> Sequence[Any]:  # type: ignore[assignment]
    how, calls = takes(result, ids=ids)
    run(lanes.take(found, 50, 10, how), [])
    return calls


@pytest.fixture
def lanes(watch: Watch) -> MarkedLanes:
    """Lanes after a claim that was full."""
    lanes = MarkedLanes(Asked(), LOWEST)
    lanes.add(50)
    found, queries = search(lanes, "7:7:", [(50,)], first(l50=OLDER))
    assert queries[0] == "snapshot"
    assert found.due == [50]
    assert take(lanes, found, Took(10, OLD, NOW)) == [(50, 10, OLDER)]
    return lanes


def test_the_next_claim_from_the_only_lane_needs_no_query_before_it(lanes: MarkedLanes) -> None:
    found, queries = search(lanes)
    assert not queries
    assert take(lanes, found, Took(10, OLD, NOW)) == [(50, 10, OLD)]


def test_a_claim_that_was_not_full_leaves_the_floor_behind_the_time(lanes: MarkedLanes) -> None:
    take(lanes, search(lanes)[0], Took(3, OLD, NOW))
    assert take(lanes, search(lanes)[0], Took(0, None)) == [(50, 10, BEHIND)]


def test_a_floor_stays_behind_the_time(lanes: MarkedLanes) -> None:
    take(lanes, search(lanes)[0], Took(10, (NOW - 5, "x"), NOW))
    assert take(lanes, search(lanes)[0], Took(0, None)) == [(50, 10, BEHIND)]


def test_a_claim_that_got_nothing_leaves_the_floor(lanes: MarkedLanes) -> None:
    """The queue may be paused."""
    take(lanes, search(lanes)[0], Took(0, None))
    assert take(lanes, search(lanes)[0], Took(0, None)) == [(50, 10, OLD)]


@pytest.mark.parametrize("why", ["a second has passed", "it fell"])
def test_a_look_asks_for_what_was_written_since_the_last_one(lanes: MarkedLanes, watch: Watch, why: str) -> None:
    if why == "it fell":
        lanes.fall()
    else:
        watch.now += 1
    found, (asked,) = search(lanes, appeared((50, OLDER), snapshot="8:9:8", l50=OLD))
    assert (asked.since, asked.floors) == ("7:7:", {50: OLD})
    assert found.read_below
    calls = take(lanes, found, Took(9, OLD, NOW), ids={OLDER[1]})
    assert calls == [([OLDER[1]], 10), (50, 9, OLD)]
    lanes.fall()
    _, (asked,) = search(lanes, appeared())
    assert (asked.since, asked.ids) == ("8:9:8", [])


def test_a_look_that_failed_is_made_again(lanes: MarkedLanes) -> None:
    """The connection may end in it."""
    lanes.fall()
    steps = lanes.search(DIALECT, "q", None)
    next(steps)
    steps.close()
    _, (asked,) = search(lanes, appeared())
    assert asked.since == "7:7:"


def test_messages_of_a_claim_that_failed_are_asked_for_again(lanes: MarkedLanes) -> None:
    lanes.fall()
    found, _ = search(lanes, appeared((50, OLDER)))

    def fails(ids: Sequence[Any], wanted: int) -> Any:
        raise ConnectionError
        yield

    with pytest.raises(ConnectionError):
        run(lanes.take(found, 50, 10, Takes(takes(Took(0, None))[0].lane, fails)), [])
    lanes.fall()
    _, (asked,) = search(lanes, appeared())
    assert asked.ids == [OLDER[1]]


def test_messages_that_a_claim_did_not_get_are_asked_for_again(lanes: MarkedLanes) -> None:
    lanes.fall()
    found, _ = search(lanes, appeared((50, OLDER)))
    assert take(lanes, found, Took(0, None), ids=set()) == [([OLDER[1]], 10), (50, 10, BEHIND)]
    found, queries = search(lanes)
    assert not queries
    assert take(lanes, found, Took(0, None)) == [(50, 10, BEHIND)], "not by each claim"
    lanes.fall()
    found, (asked,) = search(lanes, appeared((50, OLDER)))
    assert asked.ids == [OLDER[1]]
    assert take(lanes, found, Took(0, None), ids={OLDER[1]})[0] == ([OLDER[1]], 10)


def test_a_stream_begins_at_the_message_that_appeared(lanes: MarkedLanes) -> None:
    lanes.fall()
    found, _ = search(lanes, appeared((50, OLDER), l50=OLD))
    assert take(lanes, found, Took(3, OLD), ids=None) == [(50, 10, OLDER)]
    assert take(lanes, search(lanes)[0], Took(0, None)) == [(50, 10, OLD)]


def test_an_empty_lane_is_raised_by_a_look(lanes: MarkedLanes) -> None:
    lanes.fall()
    found, _ = search(lanes, appeared())
    assert found.due == []
    assert take(lanes, search(lanes)[0], Took(0, None)) == [(50, 10, BEHIND)]


def test_a_new_lane_begins_at_its_first_message(lanes: MarkedLanes) -> None:
    lanes.published(10)
    found, _ = search(lanes, appeared((10, OLD), l50=OLD))
    assert found.due == [10, 50]
    _, queries = search(lanes, first())
    assert queries == [("first due", {50: OLD, 10: OLD})]


def test_a_new_lane_without_a_due_message_is_known(lanes: MarkedLanes) -> None:
    lanes.fall()
    found, _ = search(lanes, appeared((10, (NOW + SECOND, "f"))))
    assert found.due == []
    assert lanes.known == [10, 50]


def test_a_claim_without_a_result_looks_once(lanes: MarkedLanes) -> None:
    found, _ = search(lanes)
    assert lanes.read_again(found, 0)
    assert not lanes.read_again(found, 3)
    lanes.fall()
    assert not lanes.read_again(search(lanes, appeared())[0], 0)


WITHOUT_ANSWER = {
    "more than a look returns": Appeared("9:9:", first(), [], is_complete=False),
    "time went back": Appeared("9:9:", FirstDue(NOW - 1, {}), [], is_complete=True),
}


@pytest.mark.parametrize("answer", WITHOUT_ANSWER.values(), ids=WITHOUT_ANSWER)
def test_all_lanes_are_read_again(lanes: MarkedLanes, answer: Appeared) -> None:
    lanes.fall()
    found, queries = search(lanes, answer, "9:9:", [(50,)], first(l50=OLDER))
    assert queries[-1] == ("first due", {50: LOWEST})
    assert take(lanes, found, Took(0, None)) == [(50, 10, OLDER)]


def test_a_claim_that_began_before_all_lanes_were_read_raises_no_floor(lanes: MarkedLanes) -> None:
    before, _ = search(lanes)
    slow = Takes(lambda *_: (yield "claim"))  # type: ignore[misc,return-value]
    steps = lanes.take(before, 50, 10, slow)
    next(steps)
    lanes.fall()
    search(lanes, WITHOUT_ANSWER["time went back"], "9:9:", [(50,)], first(l50=OLDER))
    with pytest.raises(StopIteration):
        steps.send(Took(10, OLD, NOW))  # type: ignore[arg-type]
    assert take(lanes, search(lanes)[0], Took(0, None)) == [(50, 10, OLDER)]
