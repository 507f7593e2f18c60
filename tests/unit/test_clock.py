"""Time: integer microseconds; other values are refused."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.clock import DatabaseClock, ManualClock, SystemClock, as_datetime, micros, time_us
from millpond.errors import InvalidOption, InvalidTime


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (1, 1_000_000),
        (0.1, 100_000),
        (1e-6, 1),
        (timedelta(milliseconds=1), 1_000),
        (100 * 365 * 86_400, 3153600000000000),
    ],
)
def test_durations(value: float, expected: int) -> None:
    assert micros(value, "delay") == expected


@pytest.mark.parametrize(
    "value", [-1, -1e-9, math.nan, math.inf, -math.inf, 1e300, 10**400, timedelta(-1), timedelta.max]
)
def test_what_is_no_duration(value: float) -> None:
    with pytest.raises(InvalidTime, match="delay"):
        micros(value, "delay")


@pytest.mark.parametrize("value", ["1", None, True, b"1", [1], 1j])
def test_what_is_not_even_a_number(value: object) -> None:
    with pytest.raises(InvalidOption, match="delay"):
        micros(value, "delay")  # type: ignore[arg-type]


@given(st.datetimes(timezones=st.timezones()))
def test_moments_survive(value: datetime) -> None:
    assert as_datetime(time_us(value, "due_at")) == value.astimezone(UTC)


def test_a_time_outside_of_the_years_1_to_9999() -> None:
    assert as_datetime(-(2**63)) == datetime.min.replace(tzinfo=UTC)
    assert as_datetime(2**63 - 1) == datetime.max.replace(tzinfo=UTC)
    with pytest.raises(InvalidTime, match="years 1 to 9999"):
        time_us(datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))), "due_at")


def test_moments_need_a_time_zone() -> None:
    assert time_us(datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), "due_at") == 0
    with pytest.raises(InvalidTime, match="naive"):
        time_us(datetime(2026, 1, 1), "due_at")
    for other in ("2026-01-01", 7, None):
        with pytest.raises(InvalidTime, match="due_at"):
            time_us(other, "due_at")  # type: ignore[arg-type]


def test_a_manual_clock_stands_still() -> None:
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    before = clock.now()
    assert clock.now() == before
    clock.advance(timedelta(seconds=1))
    clock.advance(0.5)
    assert clock.now() - before == 1_500_000
    with pytest.raises(InvalidTime):
        clock.advance(-1)


def test_the_clocks_of_the_others() -> None:
    assert DatabaseClock().now() is None
    assert abs(SystemClock().now() - time.time() * 1e6) < 60e6
