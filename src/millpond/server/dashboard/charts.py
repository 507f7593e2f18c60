"""Charts as points in a box; a template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime

import msgspec

from millpond.clock import SECOND, as_datetime
from millpond.control.history import KINDS, Every, SettledCounts
from millpond.server.dashboard.live_counts import Sample
from millpond.server.dashboard.rendering import NONE, count, duration, plural, rate

WIDTH, HEIGHT = 600, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 10, 24
_OVER: dict[Every, str] = {"minute": "60 min", "hour": "24 h", "day": "30 days"}
_SHORT: dict[Every, str] = {"minute": "%H:%M", "hour": "%H:%M", "day": "%d %b"}
"""Format of the begin of a bar."""
_LEAST_SPAN = 120.0
"""Seconds that a chart covers at least."""


class Line(msgspec.Struct, frozen=True):
    name: str
    kind: str
    """Class of the style sheet."""
    points: str
    last: str


class Chart(msgspec.Struct, frozen=True):
    title: str
    label: str
    """The chart in words, for screen readers."""
    lines: list[Line]
    ticks: list[tuple[float, str]]
    """(height, text) of each horizontal line."""
    times: list[tuple[float, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    base: int = HEIGHT - _BOTTOM


class Bar(msgspec.Struct, frozen=True):
    kind: str
    x: float
    y: float
    width: float
    height: float
    text: str


class HistoryChart(msgspec.Struct, frozen=True):
    """Bars of the messages settled in each minute, hour or day, with the same numbers as rows."""

    by: Every
    place: str
    """Where they were counted."""
    title: str
    label: str
    completed: str
    failed: str
    bars: list[Bar]
    ticks: list[tuple[float, str]]
    times: list[tuple[float, str]]
    rows: list[tuple[datetime, str, str, str]]
    """Newest first, those with messages: start, its text, completed, failed."""
    complete: bool
    missing: tuple[str, ...]
    unreadable: bool
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    base: int = HEIGHT - _BOTTOM


def history(counted: SettledCounts) -> HistoryChart:
    """Completed messages of each minute, hour or day, and failed ones above them."""
    by = counted.by
    number, over = KINDS[by].number, _OVER[by]
    buckets = counted.buckets
    ticks = nice_ticks(max([1, *(bucket.completed + bucket.failed for bucket in buckets)]))
    scale = (HEIGHT - _TOP - _BOTTOM) / ticks[-1]
    step = (WIDTH - _LEFT - _RIGHT) / number
    length = KINDS[by].seconds * SECOND
    newest = buckets[-1].begin_us if buckets else 0
    bars, rows = [], []
    for bucket in buckets:
        if not bucket.completed + bucket.failed:
            continue
        x = round(WIDTH - _RIGHT - step * ((newest - bucket.begin_us) // length + 1), 1)
        begin = as_datetime(bucket.begin_us)
        texts = _at_least(bucket.completed, bucket.at_least), _at_least(bucket.failed, bucket.at_least)
        text = f"{begin:{_SHORT[by]}} UTC: {texts[0]} completed, {texts[1]} failed"
        bottom = float(HEIGHT - _BOTTOM)
        for kind, value in (("completed", bucket.completed), ("failed", bucket.failed)):
            if value:
                height = max(1.0, round(value * scale, 1))
                bottom -= height
                bars.append(Bar(kind, x, round(bottom, 1), round(step * 0.8, 1), height, text))
        rows.append((begin, f"{begin:%Y-%m-%d}" if by == "day" else f"{begin:%Y-%m-%d %H:%M}", *texts))
    lower = any(bucket.at_least for bucket in buckets) or not counted.complete
    completed = _at_least(sum(bucket.completed for bucket in buckets), lower)
    failed = _at_least(sum(bucket.failed for bucket in buckets), lower)
    place = "lake" if by == "day" else "archive"
    title = f"Settled each {by}, last {over}{', from the lake' * (by == 'day')}"
    label = f"{title}: {completed} completed, {failed} failed"
    if rows:
        most = max(buckets, key=lambda bucket: bucket.completed + bucket.failed)
        begin, number_of_most = as_datetime(most.begin_us), plural(most.completed + most.failed, "message")
        label += f"; most at {begin:{_SHORT[by]}} UTC with {'at least ' * most.at_least}{number_of_most}"
    return HistoryChart(
        by=by,
        place=place,
        title=title,
        label=label,
        completed=completed,
        failed=failed,
        bars=bars,
        ticks=[(round(HEIGHT - _BOTTOM - tick * scale, 1), count(round(tick))) for tick in ticks if tick == int(tick)],
        times=[(_LEFT, f"{over} ago"), (WIDTH - _RIGHT, "today" if by == "day" else "now")],
        rows=rows[::-1],
        complete=counted.complete,
        missing=counted.missing,
        unreadable=counted.unreadable,
    )


def _at_least(number: int, lower: bool) -> str:
    return f"{'at least ' if lower else ''}{count(number)}"


def settled(samples: Sequence[Sample]) -> Chart:
    """Completed and failed messages per second."""
    series = [
        ("completed", "completed", [s.completed for s in samples]),
        ("failed", "failed", [s.failed for s in samples]),
    ]
    return _chart("Settled per second, mean of a minute", samples, series, rate)


def waiting(samples: Sequence[Sample]) -> Chart:
    """Messages that wait."""
    series = [("waiting", "pending", [float(s.waiting) for s in samples])]
    return _chart("Waiting messages", samples, series, lambda value: count(round(value)), whole=True)


def _chart(
    title: str,
    samples: Sequence[Sample],
    series: list[tuple[str, str, list[float]]],
    text: Callable[[float], str],
    *,
    whole: bool = False,
) -> Chart:
    """`whole`: the values are whole numbers, and so are the ticks."""
    end = samples[-1].at if samples else 0.0
    span = max(_LEAST_SPAN, end - samples[0].at if samples else 0.0)
    ticks = nice_ticks(max([1e-9, *(value for _, _, values in series for value in values)]))
    top = ticks[-1]

    def x(at: float) -> float:
        return round(_LEFT + (1 - (end - at) / span) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_TOP + (1 - value / top) * (HEIGHT - _TOP - _BOTTOM), 1)

    lines = []
    for name, kind, values in series:
        places = [f"{x(sample.at)},{y(value)}" for sample, value in zip(samples, values, strict=True)]
        if len(places) == 1:  # a line without length is a dot, a single point is nothing
            places *= 2
        lines.append(Line(name, kind, " ".join(places), text(values[-1]) if values else NONE))
    said = ", ".join(f"{line.name} {line.last}" for line in lines)
    return Chart(
        title=title,
        label=f"{title} over the last {duration(span)}; now {said}",
        lines=lines,
        ticks=[(y(tick), text(tick)) for tick in ticks if not whole or tick == int(tick)],
        times=[(x(end - span), f"{duration(span)} ago"), (x(end), "now")],
    )


def nice_ticks(highest: float) -> list[float]:
    """Up to five round values from zero to at least `highest`.

    >>> nice_ticks(7)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if highest < 1e-6:
        return [0.0, 1.0]
    raw = highest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.9999)
    return [round(n * step, 9) for n in range(math.ceil(highest / step - 1e-9) + 1)]
