"""Times of schedules: cron expressions in time zones, daylight-saving changes, intervals, missed times."""

import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from millpond.clock import as_datetime, time_us
from millpond.errors import InvalidOption, InvalidQueue
from millpond.schedule import Periodic, PeriodicRow, due_times, every, times_of

MINUTE = 60_000_000
HOUR = 60 * MINUTE


def utc(text: str) -> int:
    return time_us(datetime.fromisoformat(text).replace(tzinfo=UTC), "t")


def series(schedule: str, zone: str, start: str, count: int) -> list[str]:
    """The next times after `start` (UTC), as wall times of the zone."""
    times, at, found = times_of(schedule, zone), utc(start), []
    for _ in range(count):
        at = times.after(at)
        found.append(as_datetime(at).astimezone(ZoneInfo(zone)).strftime("%d %H:%M %z"))
    return found


def test_a_cron_expression_follows_the_wall_clock() -> None:
    assert series("0 9 * * 1-5", "Europe/Berlin", "2026-01-02T12:00", 2) == ["05 09:00 +0100", "06 09:00 +0100"]
    assert series("*/5 * * * *", "UTC", "2026-01-01T00:03", 2) == ["01 00:05 +0000", "01 00:10 +0000"]


def test_a_skipped_time_runs_once_after_the_change() -> None:
    """On 29 March 2026 there is no 02:30 in Berlin."""
    found = series("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00", 3)
    assert found == ["28 02:30 +0100", "29 03:00 +0200", "30 02:30 +0200"]


def test_a_time_that_occurs_twice_runs_once() -> None:
    """On 25 October 2026 there are two 02:30 in Berlin."""
    found = series("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", 2)
    assert found == ["25 02:30 +0200", "26 02:30 +0100"]


@pytest.mark.parametrize(("start", "end"), [("2026-03-29T00:00", 4), ("2026-10-25T00:00", 4)])
def test_an_hourly_schedule_runs_every_real_hour_over_a_change(start: str, end: int) -> None:
    times, at = times_of("0 * * * *", "Europe/Berlin"), utc(start)
    for hour in range(1, end):
        at = times.after(at)
        assert at == utc(start) + hour * 3_600_000_000


@pytest.mark.parametrize("minutes", [10, 20, 29])
def test_the_next_time_is_later_in_the_hour_that_occurs_twice(minutes: int) -> None:
    """From 02:10 winter time on the last 02:30 was that of summer time."""
    start = utc(f"2026-10-25T01:{minutes}")
    times = times_of("30 2 * * *", "Europe/Berlin")
    assert times.after(start) == utc("2026-10-26T01:30")
    assert times.until(start) == utc("2026-10-25T00:30")


@pytest.mark.parametrize(
    ("schedule", "spring", "autumn"),
    [
        ("30 2 * * *", ["03:00 +0200"], ["02:30 +0200"]),
        ("0,30 2 * * *", ["03:00 +0200"], ["02:00 +0200", "02:30 +0200"]),
        ("*/30 2 * * *", [], ["02:00 +0200", "02:30 +0200", "02:00 +0100", "02:30 +0100"]),
        ("30 */2 * * *", ["00:30 +0100"], ["00:30 +0200", "02:30 +0200", "02:30 +0100"]),
    ],
)
def test_a_star_in_minute_or_hour_means_real_minutes(schedule: str, spring: list[str], autumn: list[str]) -> None:
    """The hours up to 03:59 of the days of both changes in Berlin."""
    for day, begin, expected in (("29", "2026-03-28T23:00", spring), ("25", "2026-10-24T22:00", autumn)):
        found = [text[3:] for text in series(schedule, "Europe/Berlin", begin, 8) if text.startswith(day)]
        assert [time for time in found if time < "04"] == expected


@pytest.mark.parametrize("schedule", ["*/7 */3 * * *", "*/30 2-3 * * *", "* 4 * * *", "15,50 2-4 * * *", "40 3 * * *"])
@pytest.mark.parametrize(
    ("zone", "change"),
    [
        ("Pacific/Chatham", "2026-04-04T14:00"),  # 03:45 becomes 02:45: the parser's own steps never ended here
        ("Pacific/Chatham", "2026-09-26T14:00"),  # 02:45 becomes 03:45
        ("Australia/Lord_Howe", "2026-04-04T15:00"),  # by half an hour
        ("Australia/Lord_Howe", "2026-10-03T15:30"),
        ("Antarctica/Troll", "2026-03-29T01:00"),  # by two hours
        ("Asia/Gaza", "2011-03-31T22:01"),  # at one minute past midnight
        ("Pacific/Apia", "2011-12-30T10:00"),  # by a day
        ("Europe/Berlin", "2026-10-25T01:00"),
        ("UTC", "2026-10-25T01:00"),
    ],
)
def test_times_near_a_change_are_those_that_the_clock_shows(schedule: str, zone: str, change: str) -> None:
    """Compared with every real minute of 12 hours before and after."""
    middle = utc(change)
    minutes = range(middle - 12 * HOUR, middle + 12 * HOUR, MINUTE)
    expected = shown(schedule, ZoneInfo(zone), minutes)
    times = times_of(schedule, zone)
    at, found = minutes[0] - 1, []
    while (at := times.after(at)) <= minutes[-1]:
        found.append(at)
    assert found == expected
    for before, following in pairwise(expected):
        for between in (before, following - 1):
            assert (times.until(between), times.after(between)) == (before, following)


def shown(schedule: str, zone: ZoneInfo, minutes: Iterable[int]) -> list[int]:
    """Minutes at which the clock shows a time of the schedule. Its fields are lists, ranges and steps."""
    allowed = [numbers(field, size) for field, size in zip(schedule.split(), (60, 24), strict=False)]
    fixed = "*" not in "".join(schedule.split()[:2])
    found, last = [], None
    for minute in minutes:
        clock = as_datetime(minute).astimezone(zone)
        skipped, wall = [], clock.replace(tzinfo=None)
        while fixed and last is not None and (last := last + timedelta(minutes=1)) < wall:
            skipped.append(last)
        walls = skipped if fixed and clock.fold else [*skipped, wall]
        if any(one.minute in allowed[0] and one.hour in allowed[1] for one in walls):
            found.append(minute)
        last = wall
    return found


def numbers(field: str, size: int) -> set[int]:
    if field.startswith("*"):
        return set(range(0, size, int(field[2:] or 1)))
    ends = [[int(end) for end in part.split("-")] for part in field.split(",")]
    return {number for part in ends for number in range(part[0], part[-1] + 1)}


def test_an_interval_counts_from_1970_and_knows_no_time_zone() -> None:
    times = times_of(every(timedelta(minutes=5)), "Europe/Berlin")
    assert times.after(utc("2026-03-29T00:58")) == utc("2026-03-29T01:00")
    assert times.after(utc("2026-03-29T01:00")) == utc("2026-03-29T01:05")
    assert times.until(utc("2026-03-29T01:04")) == times.until(utc("2026-03-29T01:00")) == utc("2026-03-29T01:00")


@pytest.mark.parametrize("seconds", [1, 1.5, 12345.25, 1234567.5, 1.000001, 100 * 86400 + 0.125])
def test_the_text_of_an_interval_is_exact(seconds: float) -> None:
    assert times_of(every(seconds), "UTC").after(0) == round(seconds * 1_000_000)


def test_the_last_time_includes_now() -> None:
    times = times_of("*/5 * * * *", "UTC")
    assert times.until(utc("2026-01-01T00:05")) == utc("2026-01-01T00:05")
    assert times.until(utc("2026-01-01T00:04")) == utc("2026-01-01T00:00")


def row(missed: Any, schedule: str = "0 * * * *", begin: str = "2026-01-01T01:00") -> PeriodicRow:
    periodic = Periodic(name="p", queue="q", schedule=schedule, missed=missed)
    return PeriodicRow(periodic=periodic, paused=False, next_us=utc(begin), last_us=None)


@pytest.mark.parametrize(("missed", "hours"), [("skip", []), ("once", [4]), ("all", [1, 2, 3, 4])])
def test_times_that_passed_while_no_worker_ran(missed: str, hours: list[int]) -> None:
    due, following = due_times(row(missed), utc("2026-01-01T04:30"))
    assert due == [utc(f"2026-01-01T0{hour}:00") for hour in hours]
    assert following == utc("2026-01-01T05:00")


@pytest.mark.parametrize("missed", ["skip", "once", "all"])
def test_a_time_is_published_however_late_the_worker_is_by_seconds(missed: str) -> None:
    due, following = due_times(row(missed), utc("2026-01-01T01:00:59"))
    assert (due, following) == ([utc("2026-01-01T01:00")], utc("2026-01-01T02:00"))
    assert due_times(row(missed), utc("2026-01-01T00:59")) == ([], utc("2026-01-01T01:00"))


def test_a_time_now_covers_the_missed_ones() -> None:
    due, _ = due_times(row("once"), utc("2026-01-01T04:00"))
    assert due == [utc("2026-01-01T04:00")]


def test_catching_up_is_bounded_and_continues() -> None:
    first, following = due_times(row("all", "every 1"), utc("2026-01-01T02:00"))
    assert len(first) == 1000 and following == first[-1] + 1_000_000
    few, following = due_times(row("all", "every 1"), utc("2026-01-01T02:00"), 10)
    assert few == first[:10] and following == first[10]
    once, after = due_times(row("once", "every 1", "2025-01-01T00:00"), utc("2026-01-01T02:00"))
    assert len(once) == 61 and after == utc("2026-01-01T02:00:01")


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": "* * *"},
        {"schedule": "61 * * * *"},
        {"schedule": "* * * * * *"},
        {"schedule": "every day"},
        {"schedule": "every 0.5"},
        {"schedule": 5},
        {"timezone": "Mars/Olympus"},
        {"timezone": "../../etc/passwd"},
        {"missed": "maybe"},
        {"name": ""},
        {"queue": "x" * 256},
    ],
)
def test_wrong_schedules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((InvalidOption, InvalidQueue)):
        Periodic(**{"name": "p", "queue": "q", "schedule": "* * * * *", **wrong})


def test_utc_and_intervals_need_no_time_zones_of_the_machine() -> None:
    """A small container image has none."""
    code = (
        "import sys, zoneinfo; sys.modules['tzdata'] = None; zoneinfo.reset_tzpath(to=[])\n"
        "from millpond.errors import InvalidOption; from millpond.schedule import times_of\n"
        "print(times_of('0 0 * * *', 'UTC').after(0), times_of('every 5', 'UTC').after(0))\n"
        "try: times_of('0 0 * * *', 'Europe/Berlin')\n"
        "except InvalidOption as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("86400000000 5000000\n") and "install its package tzdata" in done.stdout


@pytest.mark.parametrize("zone", ["localtime", "posixrules"])
def test_a_zone_that_differs_between_machines_is_refused(zone: str) -> None:
    with pytest.raises(InvalidOption, match="no time zone"):
        times_of("0 0 * * *", zone)


def test_a_day_that_never_comes_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(InvalidOption):
        times_of("0 0 30 2 *", "UTC").after(0)
