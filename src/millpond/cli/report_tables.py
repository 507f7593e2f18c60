"""Print a report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from millpond.cli.table import WIDE, plain

if TYPE_CHECKING:
    from millpond.spark.report import Report

Show = Callable[[Any], str]
_LISTED = 10
_LAST_PERIODS = 24
_UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"), (172_800.0, 1 / 3600, "h"))


def print_report(report: Report, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDE, highlight=False)
    summary = report.rows("summary")
    if summary:
        console.print(_headline(summary[0]))
        for part in _SETTLED:
            part.print(report, console)
    else:
        console.print("No message was settled in this period.")
    if "backlog" in report.tables:
        _BACKLOG.print(report, console)


def duration(seconds: float | None) -> str:
    """
    >>> duration(0.0123), duration(75), duration(7_500), duration(None)
    ('12.3 ms', '75 s', '2.08 h', '')
    """
    if seconds is None:
        return ""
    for below, factor, unit in _UNITS:
        if seconds < below:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 86_400:,.3g} d"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


def when(time: datetime | None) -> str:
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"


def text(value: str | None) -> str:
    """Names, reasons and errors are foreign text: printed literally."""
    return plain(value or "")


def _headline(row: Mapping[str, Any]) -> Text:
    rate = "" if row["per_second"] is None else f", {row['per_second']:,.4g} per second"
    return Text(
        f"{row['settled']:,} settled: {row['completed']:,} completed, {row['failed']:,} failed{rate}; "
        f"{row['retries']:,} retries, {row['redeliveries']:,} redeliveries; "
        f"{when(row['first_at'])} to {when(row['last_at'])} UTC",
        "bold",
    )


class _Part(NamedTuple):
    """One printed table: columns of a table of the report, with their heads."""

    table: str
    title: str
    columns: Mapping[str, tuple[str, Show]]
    rows: slice = slice(None)

    def print(self, report: Report, console: Console) -> None:
        rows = report.rows(self.table)[self.rows]
        if not rows:
            return
        grid = Table(title=Text(self.title), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for head, show in self.columns.values():
            is_text = show is text
            grid.add_column(head, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
        for row in rows:
            grid.add_row(*(Text(show(row[name])) for name, (_, show) in self.columns.items()))
        console.print()
        console.print(grid)


_COUNTS: dict[str, tuple[str, Show]] = {
    "settled": ("settled", number),
    "failed": ("failed", number),
    "retries": ("retries", number),
    "redeliveries": ("redelivered", number),
}
_TIMES: dict[str, tuple[str, Show]] = {
    f"{time}_{suffix}_s": (f"{head} {suffix}", duration)
    for time, head in (("waiting", "waits"), ("handling", "runs"))
    for suffix in ("p50", "p90", "p99")
}
_MESSAGE: dict[str, tuple[str, Show]] = {
    "queue": ("queue", text),
    "id": ("id", text),
    "state": ("state", text),
    "deliveries": ("deliveries", number),
    "attempts": ("attempts", number),
    "handling_s": ("ran", duration),
    "error": ("last error", text),
}
_SETTLED = (
    _Part("by_queue", "Queues", {"queue": ("queue", text), **_COUNTS, **_TIMES}),
    _Part("by_time", "Over time (the last periods)", {"at": ("from (UTC)", when), **_COUNTS, **_TIMES},
          slice(-_LAST_PERIODS, None)),
    _Part("failures", "Failures", {
        "failed": ("failed", number), "queue": ("queue", text), "reason": ("reason", text),
        "exception": ("exception", text), "last_at": ("last (UTC)", when), "example_id": ("for example", text),
    }, slice(_LISTED)),
    _Part("slowest", "Slowest messages", _MESSAGE, slice(_LISTED)),
    _Part("poisonous", "Poisonous messages", _MESSAGE, slice(_LISTED)),
)  # fmt: skip
_BACKLOG = _Part("backlog", "Waiting now", {
    "queue": ("queue", text), "pending": ("pending", number), "processing": ("processing", number),
    "retryable": ("retryable", number), "due": ("due", number), "scheduled": ("scheduled", number),
    "suspect": ("suspect", number), "overdue_s": ("oldest overdue", duration),
})  # fmt: skip
