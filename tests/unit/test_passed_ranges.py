"""Ranges that claims passed are read once more, and everything below them in parts."""

from __future__ import annotations

from itertools import pairwise

from millpond.clock import SECOND
from millpond.transports.database.messages.passed_ranges import PassedRanges, Sweep
from tests.unit.lanes import Watch, watch

__all__ = ["watch"]

A, B, C, D = (1, b"a"), (2, b"b"), (3, b"c"), (4, b"d")
NOW = 1_700_000_000 * SECOND
QUICK, SLOW, USUAL = 0.001, 0.1, 0.001


def read(passed: PassedRanges) -> list[tuple[int, object, object]]:
    ranges = passed.due()
    passed.read(ranges)
    return [tuple(r) for r in (ranges or {}).values()]


def test_a_range_is_read_a_second_after_it_was_passed(watch: Watch) -> None:
    passed = PassedRanges()
    passed.add(50, A, B)
    passed.add(50, B, C)
    passed.add(70, A, B)
    watch.now += 0.5
    assert passed.due() is None
    watch.now += 0.5
    assert read(passed) == []
    passed.add(50, C, D)
    watch.now += 1
    assert read(passed) == [(50, A, C), (70, A, B)]
    watch.now += 1
    assert read(passed) == [(50, C, D)]
    watch.now += 1
    assert read(passed) == []


def test_a_range_that_two_claims_read_at_once_counts_once(watch: Watch) -> None:
    passed = PassedRanges()
    passed.add(50, A, B)
    watch.now += 1
    one, other = passed.due(), passed.due()
    passed.read(one)
    passed.add(50, B, C)
    passed.read(other)
    watch.now += 1
    assert read(passed) == [(50, A, B)]
    watch.now += 1
    assert read(passed) == [(50, B, C)]


def test_a_range_that_was_not_read_is_not_forgotten(watch: Watch) -> None:
    passed = PassedRanges()
    passed.add(50, A, B)
    watch.now += 1
    read(passed)
    watch.now += 0.999
    early = passed.due()  # not yet
    watch.now += 0.001
    passed.read(early)
    assert read(passed) == [(50, A, B)]


def swept(sweep: Sweep, watch: Watch, took: float) -> list[tuple[int, int]]:
    """The parts of one whole sweep."""
    parts = []
    while True:
        watch.now += 5
        part = sweep.part(NOW)
        if part is None:
            return parts
        parts.append(part)
        sweep.read(part, took, USUAL)


def test_the_parts_of_a_sweep_join_and_reach_everything(watch: Watch) -> None:
    parts = swept(Sweep(), watch, QUICK)
    assert parts[0][1] == NOW
    assert all(later[1] == earlier[0] for earlier, later in pairwise(parts))
    assert parts[-1][0] == -(2**63)
    assert len(parts) < 25


def test_a_sweep_begins_again_after_a_minute(watch: Watch) -> None:
    sweep = Sweep()
    swept(sweep, watch, QUICK)
    assert sweep.part(NOW) is None
    watch.now += 60
    assert sweep.part(NOW) is not None


def test_parts_become_smaller_where_they_take_long(watch: Watch) -> None:
    sweep = Sweep()
    sizes = []
    for _ in range(5):
        watch.now += 5
        part = sweep.part(NOW)
        assert part is not None
        sizes.append((part[1] - part[0]) // SECOND)
        sweep.read(part, SLOW, USUAL)
    assert sizes == [60, 15, 3, 1, 1]


def test_where_every_query_takes_long_parts_do_not(watch: Watch) -> None:
    sweep = Sweep()
    watch.now += 5
    sweep.read(sweep.part(NOW) or (0, 0), SLOW, SLOW)
    watch.now += 5
    low, high = sweep.part(NOW) or (0, 0)
    assert high - low == 240 * SECOND


def test_there_is_a_part_every_five_seconds_only(watch: Watch) -> None:
    sweep = Sweep()
    assert sweep.part(NOW) is None
    watch.now += 5
    part = sweep.part(NOW)
    assert part is not None
    sweep.read(part, QUICK, USUAL)
    assert sweep.part(NOW) is None


def test_a_part_that_two_claims_read_at_once_counts_once(watch: Watch) -> None:
    sweep = Sweep()
    watch.now += 5
    first = sweep.part(NOW)
    assert first is not None
    sweep.read(first, QUICK, USUAL)
    watch.now += 5
    one, other = sweep.part(NOW), sweep.part(NOW)
    assert one is not None and other is not None
    sweep.read(one, QUICK, USUAL)
    sweep.read(other, QUICK, USUAL)
    watch.now += 5
    after = sweep.part(NOW)
    assert after is not None
    assert after[1] == one[0]
