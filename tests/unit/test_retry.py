"""Retry: the exact series of every policy, and where it ends."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond import Retry
from millpond.errors import InvalidOption, InvalidTime


def series(retry: Retry, count: int = 6, draw: float = 0.5) -> list[float]:
    return [round(retry.delay(n, lambda: draw), 6) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (Retry(initial=1, multiplier=2, maximum=60, jitter=0), [1, 2, 4, 8, 16, 32, 60, 60]),
        (Retry(initial=1, multiplier=2, maximum=60, jitter=0, first="immediate"), [0, 1, 2, 4, 8, 16, 32, 60]),
        (Retry(initial=2, multiplier=1.5, maximum=60, jitter=0, first="immediate"), [0, 2, 3, 4.5, 6.75]),
        (Retry(initial=5, multiplier=2, maximum=3, jitter=0), [3, 3, 3]),
        (Retry(initial=0, multiplier=2, maximum=60, jitter=0), [0, 0, 0]),
        (Retry(initial=1, multiplier=3, step=1, maximum=60, jitter=0), [1, 4, 11, 30, 60]),
        (Retry.constant(7), [7, 7, 7]),
        (Retry.constant(timedelta(minutes=1)), [60, 60]),
        (Retry.linear(1, 2), [1, 3, 5, 7, 9]),
        (Retry.linear(1, 2, maximum=6), [1, 3, 5, 6, 6]),
        (Retry.linear(0, 10), [0, 10, 20]),
    ],
)
def test_the_exact_series(retry: Retry, expected: list[float]) -> None:
    """The maximum bounds the first interval too."""
    assert series(retry, len(expected)) == expected


def test_jitter_is_a_band_around_the_wait() -> None:
    retry = Retry(initial=10, multiplier=1, maximum=100, jitter=0.2)
    assert [retry.delay(1, lambda d=d: d) for d in (0.0, 0.5, 1.0)] == [8, 10, 12]  # type: ignore[misc]


def test_at_the_cap_the_band_lies_below_it() -> None:
    """Without jitter at the cap, messages that failed together would return together."""
    retry = Retry(initial=1, multiplier=2, maximum=60, jitter=0.33)
    low, high = retry.delay(50, lambda: 0.0), retry.delay(50, lambda: 1.0)
    assert (round(low, 6), high) == (40.2, 60)
    assert retry.delay(50, lambda: 0.5) == pytest.approx(50.1)


@given(
    initial=st.floats(0, 1e4),
    multiplier=st.floats(1, 100),
    step=st.floats(0, 1e4),
    maximum=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
    attempt=st.integers(1, 10**9),
    draw=st.floats(0, 1),
    first=st.sampled_from(["immediate", "backoff"]),
)
def test_every_delay_is_between_nothing_and_the_maximum(
    initial: float,
    multiplier: float,
    step: float,
    maximum: float,
    jitter: float,
    attempt: int,
    draw: float,
    first: str,
) -> None:
    """Large attempt numbers must not overflow the exponent."""
    retry = Retry(
        initial=initial,
        multiplier=multiplier,
        step=step,
        maximum=maximum,
        jitter=jitter,
        first=first,  # type: ignore[arg-type]
    )
    assert 0 <= retry.delay(attempt, lambda: draw) <= maximum + 1e-6


@pytest.mark.parametrize("attempt", [54, 55, 1_000, 10**6, 10**18])
def test_huge_attempts_do_not_overflow(attempt: int) -> None:
    assert Retry(initial=1e-6, multiplier=1.0000001, maximum=3600, jitter=0).delay(attempt) <= 3600
    assert Retry(initial=30, multiplier=1e6, maximum=3600, jitter=0).delay(attempt) == 3600


@given(attempt=st.integers(1, 60), multiplier=st.floats(1, 10))
def test_without_jitter_delays_never_shrink(attempt: int, multiplier: float) -> None:
    retry = Retry(initial=0.5, multiplier=multiplier, maximum=1000, jitter=0)
    assert retry.delay(attempt) <= retry.delay(attempt + 1)


def test_attempts_count_handler_runs() -> None:
    """Exactly max_attempts attempts."""
    retry = Retry(attempts=3, jitter=0)
    assert [retry.decide(n) for n in (1, 2, 3, 4)] == [1, 2, None, None]
    assert Retry.none().decide(1) is None
    assert Retry(attempts=None, jitter=0, maximum=5).decide(10**6) == 5


def test_the_default_retries_and_then_ends() -> None:
    assert [Retry().decide(n) is None for n in (1, 7, 8)] == [False, False, True]


def test_total_bounds_the_time_since_the_first_attempt() -> None:
    retry = Retry.constant(10, attempts=None)
    limited = Retry(initial=10, multiplier=1, maximum=10, jitter=0, attempts=None, total=timedelta(seconds=30))
    assert retry.decide(9, elapsed=1e6) == 10
    assert [limited.decide(1, elapsed=e) for e in (0, 20, 20.1, 31)] == [10, 10, None, None]


def test_zero_total_is_a_limit() -> None:
    """Zero is a limit; some libraries take it for "no limit"."""
    assert Retry(total=0).decide(1, elapsed=0) is None
    assert Retry(total=0, first="immediate").decide(1, elapsed=0) == 0


def test_some_errors_are_never_retried() -> None:
    retry = Retry(never=(KeyError, OSError), jitter=0)
    assert retry.decide(1, ValueError()) == 1
    assert retry.decide(1, KeyError()) is None
    assert retry.decide(1, FileNotFoundError()) is None
    assert retry.decide(1, None) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"initial": -1}, InvalidTime),
        ({"initial": math.nan}, InvalidTime),
        ({"maximum": math.inf}, InvalidTime),
        ({"step": "1"}, InvalidOption),
        ({"total": -1}, InvalidTime),
        ({"multiplier": 0.5}, InvalidOption),
        ({"multiplier": math.inf}, InvalidOption),
        ({"multiplier": math.nan}, InvalidOption),
        ({"jitter": -0.1}, InvalidOption),
        ({"jitter": 1.1}, InvalidOption),
        ({"jitter": math.nan}, InvalidOption),
        ({"attempts": 0}, InvalidOption),
        ({"attempts": 1.5}, InvalidOption),
        ({"attempts": True}, InvalidOption),
        ({"first": "later"}, InvalidOption),
        ({"never": KeyError}, InvalidOption),
        ({"never": ("KeyError",)}, InvalidOption),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Retry.{next(iter(options))}"):
        Retry(**options)  # type: ignore[arg-type]
