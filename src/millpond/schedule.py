"""Schedules of periodic messages: a cron expression in a time zone, or a fixed interval.

A cron expression follows the wall clock. At a daylight-saving change it behaves as Debian's cron does. If neither the
minute nor the hour begins with `*`, a time that is skipped runs at the change, and a time that occurs twice runs once.
Other expressions run at every real minute that matches: a skipped time not at all, a repeated one twice.
Intervals count from 1970 in UTC, so every process computes the same times.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Literal, Protocol, get_args

import msgspec

from millpond.clock import SECOND, Seconds, as_datetime, micros, time_us
from millpond.errors import InvalidOption, MillpondError
from millpond.message import check_name, check_priority

Missed = Literal["skip", "once", "all"]
MISSED_AFTER = 60 * SECOND
"""Microseconds after which a time that was not published counts as missed."""
CATCH_UP = 1000
"""Maximum number of times that one transaction publishes. The schedules that are due share it, each at least one."""
_EVERY = "every "
_OF_THE_MACHINE = ("localtime", "posixrules")
"""Names whose meaning differs between machines."""
_KNOWN = "Europe/Berlin"
_AROUND = timedelta(hours=26)
"""Longer than the largest change of a clock: a day was skipped in Samoa."""


class Periodic(msgspec.Struct, frozen=True, kw_only=True):
    """A periodic message: when, to which queue, and with which body."""

    name: str
    queue: str
    schedule: str
    """A cron expression, or `every N` with seconds."""
    timezone: str = "UTC"
    missed: Missed = "once"
    """Times that passed while no worker ran: skip them, publish once for all of them, or publish each."""
    priority: int = 50
    payload: bytes = b"null"
    headers: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise if the values are wrong, or if this machine lacks the time zone."""
        check_name(self.name, "name")
        check_name(self.queue, "queue")
        if self.missed not in get_args(Missed):
            raise InvalidOption(f"missed must be skip, once or all, not {self.missed!r}")
        check_priority(self.priority)
        times_of(self.schedule, self.timezone)


def stored(fields: dict[str, Any]) -> Periodic:
    """The periodic message of a stored row, unchecked: another program or machine may have written it."""
    periodic = Periodic(name="stored", queue="stored", schedule=f"{_EVERY}1")
    for field, value in fields.items():
        msgspec.structs.force_setattr(periodic, field, value)
    return periodic


class PeriodicRow(msgspec.Struct, frozen=True, kw_only=True):
    """A periodic message as the database has it."""

    periodic: Periodic
    paused: bool
    next_us: int
    last_us: int | None

    @property
    def error(self) -> str | None:
        """The reason why this machine cannot publish it, such as a time zone that it lacks."""
        try:
            self.periodic.check()
        except MillpondError as e:
            return str(e)
        return None

    @property
    def next_at(self) -> datetime:
        return as_datetime(self.next_us)

    @property
    def last_at(self) -> datetime | None:
        return None if self.last_us is None else as_datetime(self.last_us)


def every(interval: Seconds) -> str:
    """The schedule of a fixed interval.

    >>> every(300)
    'every 300'
    """
    us = micros(interval, "every")
    if us < SECOND:
        raise InvalidOption("every must be one second or longer")
    return f"{_EVERY}{us // SECOND}.{us % SECOND:06}".rstrip("0").rstrip(".")


class Times(Protocol):
    """The times of a schedule, in microseconds."""

    def after(self, us: int) -> int:
        """The first time after this one."""

    def until(self, us: int) -> int:
        """The last time that is not after this one."""


def times_of(schedule: str, timezone: str) -> Times:
    """Parse a schedule. The error names the part that is wrong."""
    if not isinstance(schedule, str):
        raise InvalidOption(f"a schedule is a text such as '*/5 * * * *', not {type(schedule).__name__}")
    zone = _zone(timezone)
    if not schedule.startswith(_EVERY):
        return _Cron(schedule, zone)
    try:
        length = micros(float(schedule.removeprefix(_EVERY)), "every")
    except ValueError:
        raise InvalidOption(f"the schedule {schedule!r} is no number of seconds, such as 'every 300'") from None
    if length < SECOND:
        raise InvalidOption("every must be one second or longer")
    return _Interval(length)


class _Interval:
    def __init__(self, length: int) -> None:
        self._length = length

    def after(self, us: int) -> int:
        return (us // self._length + 1) * self._length

    def until(self, us: int) -> int:
        return us // self._length * self._length


class _Cron:
    """The parser finds times of the wall clock, without a zone: its own steps assume changes of and at whole hours."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        from cronsim import CronSim, CronSimError  # imported only by programs with a cron expression

        self._expression, self._zone, self._sim = expression, zone, CronSim
        fields = expression.split()
        if len(fields) != 5:  # the parser takes seconds as well: near a change of the clock thousands of steps a time
            raise InvalidOption(
                f"the cron expression {expression!r} must have five fields, from minutes to days of the week; "
                "for seconds use every="
            )
        try:
            CronSim(expression, datetime(2026, 1, 1))
        except CronSimError as e:
            raise InvalidOption(f"the cron expression {expression!r} is not valid: {e}") from None
        self._fixed = not any(field.startswith("*") for field in fields[:2])

    def after(self, us: int) -> int:
        best: int | None = None
        for wall in self._walls(us, reverse=False):
            times = self._times_at(wall)
            best = min((time for time in (*times, best) if time is not None and time > us), default=None)
            if best is not None and times and times[0] >= best:  # later walls have later first times
                return best
        raise AssertionError("unreachable: `_walls` ends with an error")

    def until(self, us: int) -> int:
        best: int | None = None
        for wall in self._walls(us, reverse=True):
            times = self._times_at(wall)
            best = max((time for time in (*times, best) if time is not None and time <= us), default=None)
            if best is not None and times and times[-1] <= best:  # earlier walls have earlier last times
                return best
        raise AssertionError("unreachable: `_walls` ends with an error")

    def _walls(self, us: int, *, reverse: bool) -> Iterator[datetime]:
        """Wall clocks that match, from that of `us` on. Near a change they begin before it, where hours occur twice."""
        at = as_datetime(us)
        offsets = [self._offset(at + away) for away in (-_AROUND, timedelta(), _AROUND)]
        margin = max(offsets) - min(offsets) + timedelta(seconds=1)
        wall = (at + offsets[1]).replace(tzinfo=None, microsecond=0)
        yield from self._sim(self._expression, wall + margin if reverse else wall - margin, reverse=reverse)
        raise InvalidOption(f"the cron expression {self._expression!r} has no time within 50 years")

    def _times_at(self, wall: datetime) -> list[int]:
        """The times at which the clock shows this: none if it is skipped, two if it occurs twice."""
        first, second = (time_us(wall.replace(tzinfo=self._zone, fold=fold), "schedule") for fold in (0, 1))
        if first == second or (first < second and self._fixed):
            return [first]
        if first < second:
            return [first, second]
        return [self._change(second, first)] if self._fixed else []

    def _change(self, before: int, after: int) -> int:
        """The time between these at which the clock changes."""
        offset = self._offset(as_datetime(after))
        while after - before > SECOND:
            middle = (before + after) // 2 // SECOND * SECOND
            if self._offset(as_datetime(middle)) == offset:
                after = middle
            else:
                before = middle
        return after

    def _offset(self, at: datetime) -> timedelta:
        return at.astimezone(self._zone).utcoffset() or timedelta()


def _zone(name: str) -> tzinfo:
    if name == "UTC":  # needs no database of time zones, which small images lack
        return UTC
    zone = None if name in _OF_THE_MACHINE else _found_zone(name)
    if zone is not None:
        return zone
    advice = f"give a name such as {_KNOWN}"
    if _found_zone(_KNOWN) is None:
        advice = "this machine has no time zones: install its package tzdata, or pip install tzdata"
    raise InvalidOption(f"there is no time zone {name!r}; {advice}")


def _found_zone(name: str) -> tzinfo | None:
    from zoneinfo import ZoneInfo  # only for programs with time zones

    try:
        return ZoneInfo(name)
    except Exception:  # a wrong name raises one of several errors
        return None


def due_times(row: PeriodicRow, now: int, most: int = CATCH_UP) -> tuple[list[int], int]:
    """(times to publish at `now`, at most so many; next time)."""
    times = times_of(row.periodic.schedule, row.periodic.timezone)
    begin = row.next_us
    missed = begin < now - MISSED_AFTER
    if missed and row.periodic.missed != "all":
        begin = times.after(now - MISSED_AFTER - 1)
    due: list[int] = []
    while begin <= now and len(due) < most:
        due.append(begin)
        begin = times.after(begin)
    if missed and not due and row.periodic.missed == "once":
        due = [max(times.until(now), row.next_us)]
    return due, begin
