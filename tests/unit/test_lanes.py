"""What a process remembers of a queue's lanes, and when it looks below its floors."""

import pytest

from millpond.transports.database import claim
from millpond.transports.database.claim import Lanes

LOW, HIGH = (1, b"a"), (2, b"b")
QUICK, SLOW = 0.001, 0.5


class Watch:
    """A stopwatch that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(claim, "monotonic", watch)
    return watch


@pytest.fixture
def lanes(watch: Watch) -> Lanes:
    """Where one claim from lane 50 has just ended."""
    lanes = Lanes()
    lanes.add(50)
    look(lanes, watch, QUICK)
    lanes.claimed(50, HIGH, None)
    return lanes


def look(lanes: Lanes, watch: Watch, took: float, due: tuple[int, ...] = (50,)) -> None:
    before = lanes.begin()
    assert before is not None
    lanes.looked_below(before, due, watch.now, took)


def test_the_first_claim_looks_everywhere() -> None:
    assert Lanes().begin() == {}


def test_the_next_begins_where_the_last_ended(lanes: Lanes) -> None:
    assert lanes.begin() is None
    assert lanes.floor(50) == HIGH


def test_once_a_second_a_claim_looks_below(lanes: Lanes, watch: Watch) -> None:
    watch.now += 0.99
    assert lanes.begin() is None
    watch.now += 0.01
    assert lanes.begin() == {50: HIGH}
    assert lanes.floor(50) is None


def test_what_falls_below_is_looked_for_at_once(lanes: Lanes) -> None:
    lanes.fall()
    assert lanes.begin() == {50: HIGH}


def test_what_falls_during_a_look_is_looked_for_by_the_next(lanes: Lanes, watch: Watch) -> None:
    lanes.fall()
    before = lanes.begin()
    lanes.fall()
    assert before is not None
    lanes.looked_below(before, [50], watch.now, QUICK)
    lanes.claimed(50, HIGH, None)
    assert lanes.begin() is not None


def test_a_lane_that_was_not_reached_has_no_floor_until_it_is(lanes: Lanes, watch: Watch) -> None:
    lanes.claimed(70, LOW, None)
    lanes.fall()
    look(lanes, watch, QUICK, due=(50, 70))
    lanes.claimed(50, HIGH, None)  # and was full, so that lane 70 waits for the next claim
    assert lanes.begin() is None
    assert lanes.floor(70) is None


def test_where_nothing_is_due_the_floor_counts_again(lanes: Lanes, watch: Watch) -> None:
    lanes.fall()
    look(lanes, watch, SLOW, due=())
    assert lanes.begin() is None
    assert lanes.floor(50) == HIGH


def test_a_claim_that_left_nothing_below_keeps_the_higher_floor(lanes: Lanes, watch: Watch) -> None:
    lanes.fall()
    look(lanes, watch, QUICK)
    lanes.claimed(50, LOW, HIGH)
    assert lanes.floor(50) == HIGH


def test_after_a_claim_that_was_not_full_it_looks_below_at_once_if_that_is_quick(lanes: Lanes, watch: Watch) -> None:
    assert lanes.look_again(QUICK)
    lanes.fall()
    look(lanes, watch, SLOW)
    assert not lanes.look_again(QUICK)


def test_on_a_machine_where_everything_is_slow_nothing_is(lanes: Lanes, watch: Watch) -> None:
    lanes.fall()
    look(lanes, watch, SLOW)
    assert lanes.look_again(SLOW)


def test_the_only_lane_is_claimed_from_without_a_probe(lanes: Lanes) -> None:
    assert lanes.only() == (50, None)
    lanes.was_full = True
    assert lanes.only() == (50, HIGH), "there may be many dead rows below"


def test_where_a_look_below_is_long_the_only_lane_is_claimed_from_its_floor(lanes: Lanes, watch: Watch) -> None:
    lanes.fall()
    look(lanes, watch, SLOW)
    lanes.claimed(50, HIGH, None)
    assert lanes.only() == (50, HIGH)


def test_no_lane_is_the_only_one_while_a_look_below_is_due(lanes: Lanes, watch: Watch) -> None:
    lanes.fall()
    assert lanes.only() is None
    look(lanes, watch, QUICK)
    lanes.claimed(50, HIGH, None)
    watch.now += 1
    assert lanes.only() is None
    assert Lanes().only() is None


def test_with_a_second_lane_or_suspects_no_lane_is_the_only_one(lanes: Lanes) -> None:
    lanes.add(1050)
    assert lanes.only() is None


def test_a_look_that_is_no_claim_trusts_floors_as_long_as_a_claim_does(lanes: Lanes, watch: Watch) -> None:
    assert lanes.trusted().floor(50) == HIGH
    watch.now += 1
    assert lanes.trusted().floor(50) is None
    assert lanes.trusted().known == [50]
    assert lanes.floor(50) == HIGH, "which claims have still to look below"
