"""Lanes without marks: when a claim reads below its floors."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.transports.database.messages.lanes import LaneSearch, Took
from millpond.transports.database.messages.reread_lanes import RereadLanes
from tests.unit.lanes import DIALECT, Watch, run, takes, watch

__all__ = ["watch"]

LOW, HIGH = (1, b"a"), (2, b"b")
QUICK, SLOW = 0.001, 0.5


def search(lanes: RereadLanes, watch: Watch, due: tuple[int, ...] = (50,), took: float = QUICK) -> LaneSearch:
    found: LaneSearch = run(lanes.search(DIALECT, "q", None), [[(lane,) for lane in due]], watch, took)[0]
    return found


def take(lanes: RereadLanes, found: LaneSearch, lane: int, result: Took, wanted: int = 10) -> Any:
    """The floor that the take began at."""
    how, calls = takes(result)
    run(lanes.take(found, lane, wanted, how), [])
    ((_, _, floor),) = calls
    return floor


FULL = Took(10, HIGH)


@pytest.fixture
def lanes(watch: Watch) -> RereadLanes:
    """Lanes after one claim from lane 50 has ended."""
    lanes = RereadLanes()
    lanes.add(50)
    take(lanes, search(lanes, watch), 50, FULL)
    return lanes


def test_the_first_claim_looks_everywhere(watch: Watch) -> None:
    lanes = RereadLanes()
    found, queries = run(lanes.search(DIALECT, "q", None), [[(50,)], [(50,)]])
    assert found.read_below
    assert queries[-1] == ("probe", [((0, 49), None), ((50, 50), None), ((51, 2000), None)])


def test_the_next_begins_where_the_last_ended(lanes: RereadLanes, watch: Watch) -> None:
    found = search(lanes, watch)
    assert not found.read_below
    assert take(lanes, found, 50, FULL) == HIGH


def test_once_a_second_a_claim_looks_below(lanes: RereadLanes, watch: Watch) -> None:
    watch.now += 0.9
    assert not search(lanes, watch).read_below
    watch.now += 0.1
    found = search(lanes, watch)
    assert found.read_below
    assert take(lanes, found, 50, FULL) is None


def test_what_falls_below_is_looked_for_at_once(lanes: RereadLanes, watch: Watch) -> None:
    lanes.fall()
    assert search(lanes, watch).read_below


def test_what_falls_during_a_look_is_looked_for_by_the_next(lanes: RereadLanes, watch: Watch) -> None:
    lanes.fall()
    found = search(lanes, watch)
    lanes.fall()
    take(lanes, found, 50, FULL)
    assert search(lanes, watch).read_below


def test_a_lane_that_was_not_reached_has_no_floor_until_it_is(lanes: RereadLanes, watch: Watch) -> None:
    lanes.add(70)
    take(lanes, search(lanes, watch, (50, 70)), 70, Took(10, LOW))
    lanes.fall()
    take(lanes, search(lanes, watch, (50, 70)), 50, FULL)  # lane 70 waits for the next claim
    found = search(lanes, watch, (50, 70))
    assert not found.read_below
    assert take(lanes, found, 70, FULL) is None


def test_where_nothing_is_due_the_floor_counts_again(lanes: RereadLanes, watch: Watch) -> None:
    lanes.fall()
    search(lanes, watch, ())
    found = search(lanes, watch)
    assert not found.read_below
    assert take(lanes, found, 50, FULL) == HIGH


def test_a_claim_that_left_nothing_below_keeps_the_higher_floor(lanes: RereadLanes, watch: Watch) -> None:
    lanes.fall()
    take(lanes, search(lanes, watch), 50, Took(3, LOW))
    assert take(lanes, search(lanes, watch), 50, FULL) == HIGH


def test_after_a_claim_that_was_not_full_it_looks_below_at_once_if_that_is_quick(
    lanes: RereadLanes, watch: Watch
) -> None:
    assert lanes.read_again(search(lanes, watch), 3)
    lanes.fall()
    slow = search(lanes, watch, took=SLOW)
    assert not lanes.read_again(slow, 0), "it has just read there"
    take(lanes, slow, 50, FULL)
    assert not lanes.read_again(search(lanes, watch), 3)


def test_on_a_machine_where_everything_is_slow_nothing_is(lanes: RereadLanes, watch: Watch) -> None:
    lanes.fall()
    take(lanes, search(lanes, watch, took=SLOW), 50, FULL)
    assert lanes.read_again(search(lanes, watch, took=0.2), 3)


def test_a_suspect_is_taken_without_a_floor(lanes: RereadLanes, watch: Watch) -> None:
    lanes.add(1050)
    for _ in range(2):
        assert take(lanes, search(lanes, watch, (1050,)), 1050, Took(1, HIGH), wanted=1) is None


def test_a_read_trusts_floors_as_long_as_a_claim_does(lanes: RereadLanes, watch: Watch) -> None:
    def places() -> Any:
        return run(lanes.places(DIALECT, "q", None), [[(50,)]])[0]

    assert places() == [(50, HIGH)]
    watch.now += 1
    assert places() == [(50, None)]
    assert search(lanes, watch).read_below, "which claims have still to do"
