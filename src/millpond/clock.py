"""Time, as every part of Millpond sees it: whole microseconds since 1970 in UTC.

The database's clock decides; then `Clock.now()` returns None. Tests give their own time, and RabbitMQ, which has no
database, uses the clock of this machine. No other module reads the wall clock.
"""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

from millpond.errors import InvalidOption, InvalidTime

SECOND = 1_000_000
Seconds = float | int | timedelta
"""A duration: seconds or a timedelta."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = (
    (edge.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1) for edge in (datetime.min, datetime.max)
)
_LONGEST_SECONDS = 100 * 365 * 86_400
"""A century. A longer duration is a mistake, and would overflow somewhere."""


class Clock(Protocol):
    def now(self) -> int | None:
        """Microseconds, or None if the database decides."""


class DatabaseClock:
    """The default: the database's clock decides."""

    def now(self) -> int | None:
        return None


class SystemClock:
    """The clock of this machine, for transports without a database."""

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
        self._now = time_us(start or datetime(2026, 1, 1, tzinfo=UTC), "start")

    def now(self) -> int:
        return self._now

    def advance(self, seconds: Seconds) -> None:
        self._now += micros(seconds, "advance")


monotonic = time.monotonic
"""Seconds of a clock for pauses and timeouts only. It never decides about a message."""


def micros(value: Seconds, option: str) -> int:
    """A duration in microseconds. The error for a negative, infinite or non-numeric one names the option."""
    # The usual case first: settles come by the thousand.
    if (type(value) is float or type(value) is int) and 0 <= value <= _LONGEST_SECONDS:
        return round(value * SECOND)
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidOption(f"{option} must be seconds or a timedelta, not {type(value).__name__}")
    if not 0 <= value < math.inf:  # in this form it also refuses NaN
        raise InvalidTime(f"{option} must be zero or more seconds, not {value}")
    if value > _LONGEST_SECONDS:
        raise InvalidTime(f"{option} must be shorter than 100 years")
    return round(value * SECOND)


def seconds(value: Seconds, option: str = "duration") -> float:
    """A duration in seconds, checked as by `micros`."""
    return micros(value, option) / SECOND


def time_us(value: datetime, option: str) -> int:
    """A timezone-aware datetime in microseconds."""
    if not isinstance(value, datetime):
        raise InvalidTime(f"{option} must be a timezone-aware datetime, not {type(value).__name__}")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidTime(
            f"{option} is a naive datetime ({value}); give it a time zone, e.g. datetime.now(timezone.utc)"
        )
    us = (value - _EPOCH) // timedelta(microseconds=1)
    if not _FIRST <= us <= _LAST:
        raise InvalidTime(f"{option} must be in the years 1 to 9999 of UTC, not {value}")
    return us


def as_datetime(us: int) -> datetime:
    """The time, or the nearest one in the years 1 to 9999: a row of another program must not hide its neighbours."""
    return _EPOCH + timedelta(microseconds=min(max(us, _FIRST), _LAST))


def utc_text(value: datetime, timespec: str = "auto") -> str:
    """
    >>> utc_text(datetime(2030, 1, 31, 8, tzinfo=UTC))
    '2030-01-31T08:00:00Z'
    """
    return value.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def span_text(seconds: float) -> str:
    """A time in a sentence, in the unit that keeps it short.

    >>> span_text(34.4), span_text(3600), span_text(10_000), span_text(200_000)
    ('34 s', '60 min', '2.8 h', '2.3 d')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"
