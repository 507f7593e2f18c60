"""A report: its tables, its scope, and its output as HTML, Parquet and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from millpond.clock import SystemClock, as_datetime
from millpond.errors import InvalidOption
from millpond.spark.report import figures, files, measure, page

SHORTEST = timedelta(seconds=1)


@dataclass(frozen=True)
class Report:
    """Small Arrow tables."""

    tables: dict[str, pa.Table]
    """By name; `backlog` only if live messages were given."""
    made_at: datetime
    every: timedelta
    """The length of a period in `by_time` and `by_queue_and_time`."""
    since: datetime | None = None
    until: datetime | None = None
    queues: Sequence[str] = ()
    source: str = ""
    """The lake and the databases, without passwords."""

    def rows(self, table: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.tables[table].to_pylist()
        return found

    def write_tables(self, folder: str | Path, *, csv: bool = False) -> list[Path]:
        """Write one Parquet file for each table, with `csv` also a CSV file; returns their paths."""
        return files.write_tables(self.tables, Path(folder), csv=csv)

    def page(self) -> str:
        """One self-contained HTML page."""
        return page.page(self)

    def write_page(self, path: str | Path) -> Path:
        return files.write_text(Path(path), self.page())


def report(
    archive: DataFrame,
    live: DataFrame | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Sequence[str] = (),
    every: timedelta = timedelta(hours=1),
    now: datetime | None = None,
    source: str = "",
) -> Report:
    """Measure the messages settled from `since` until before `until`, and the backlog.

    `archive` has the columns `ARCHIVE_COLUMNS`, `live` has `LIVE_COLUMNS`; both are read once. `now` decides which live
    messages are due: pass the database's time if you know it; the default is this machine's. `source` names the lake or
    the databases on the page.
    """
    for name, time in (("since", since), ("until", until), ("now", now)):
        if time is not None and time.tzinfo is None:
            raise InvalidOption(f"{name} has no time zone: give it one, such as UTC")
    if since is not None and until is not None and since >= until:
        raise InvalidOption(f"since ({since}) must be before until ({until})")
    if every < SHORTEST or every % SHORTEST:
        raise InvalidOption(f"every must be one second or a multiple of it, not {every}")
    made_at = now or as_datetime(SystemClock().now())
    tables = measure.measure_archive(measure.filter_messages(archive, queues, since, until), every)
    for name in ("summary", "by_queue"):
        tables[name] = _with_rate(name, tables[name], tables["summary"], since, until)
    if live is not None:
        tables["backlog"] = measure.backlog(measure.filter_messages(live, queues), made_at)
    named = {name: tables[name] for name in figures.TABLES if name in tables}
    return Report(named, made_at, every, since, until, tuple(queues), source)


def _with_rate(
    name: str, table: pa.Table, summary: pa.Table, since: datetime | None, until: datetime | None
) -> pa.Table:
    """Add messages per second of the report's time range, which is the same for all queues."""
    rates: list[float | None] = []
    for whole in summary.to_pylist():
        time = (until or whole["last_at"]) - (since or whole["first_at"])
        seconds = time.total_seconds() if time > timedelta(0) else None
        rates = [None if seconds is None else settled / seconds for settled in table.column("settled").to_pylist()]
    table = table.append_column("per_second", pa.array(rates, pa.float64()))
    return table.select(list(figures.TABLES[name]))
