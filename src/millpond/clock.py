"""Time, as every part of Millpond sees it: whole microseconds since 1970 in UTC.

A database's own clock decides; `Clock.now()` returning `None` says so. Only tests, and the in-memory
transport that has no database, give a moment of their own. No other module reads the wall clock.
"""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

from millpond.errors import InvalidOption, InvalidTime

SECOND = 1_000_000
Seconds = float | int | timedelta
"""How callers give a duration: seconds or a timedelta."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_SECONDS = 100 * 365 * 86_400
"""A century: anything longer is a mistake, and would overflow somewhere."""


class Clock(Protocol):
    def now(self) -> int | None:
        """Microseconds, or None to let the database decide."""


class DatabaseClock:
    """The default: the database's clock decides."""

    def now(self) -> int | None:
        return None


class SystemClock:
    """For transports without a database."""

    def now(self) -> int:
        return time.time_ns() // 1_000


class ManualClock:
    """A clock that stands still until a test moves it.

    >>> clock = ManualClock()
    >>> before = clock.now()
    >>> clock.advance(1.5)
    >>> clock.now() - before
    1500000
    """

    def __init__(self, start: datetime | None = None) -> None:
        self._now = moment(start or datetime(2026, 1, 1, tzinfo=UTC), "start")

    def now(self) -> int:
        return self._now

    def advance(self, seconds: Seconds) -> None:
        self._now += micros(seconds, "advance")


monotonic = time.monotonic
"""Seconds on a clock that only pacing uses: it never decides what happens to a message."""


def micros(value: Seconds, option: str) -> int:
    """A duration in microseconds; negative, endless and non-numeric ones are refused by name."""
    # What is usual is asked first: settles come by the thousand.
    if (type(value) is float or type(value) is int) and 0 <= value <= _LONGEST_SECONDS:
        return round(value * SECOND)
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidOption(f"{option} must be seconds or a timedelta, not {type(value).__name__}")
    if not 0 <= value < math.inf:  # so written, it refuses what is not a number too
        raise InvalidTime(f"{option} must be zero or more seconds, not {value}")
    if value > _LONGEST_SECONDS:
        raise InvalidTime(f"{option} must be shorter than 100 years")
    return round(value * SECOND)


def moment(value: datetime, option: str) -> int:
    """A timezone-aware datetime in microseconds."""
    if not isinstance(value, datetime):
        raise InvalidTime(f"{option} must be a timezone-aware datetime, not {type(value).__name__}")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidTime(
            f"{option} is a naive datetime ({value}); give it a time zone, e.g. datetime.now(timezone.utc)"
        )
    return (value - _EPOCH) // timedelta(microseconds=1)


def as_datetime(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)
