"""A report: its tables, what it is of, and the forms in which people and programs take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.clock import SystemClock, as_datetime
from millpond.errors import InvalidOption
from millpond.spark.report import figures, measure

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

SHORTEST = timedelta(seconds=1)


@dataclass(frozen=True)
class Report:
    """Small tables, as Arrow holds them."""

    tables: dict[str, pa.Table]
    """By name; `backlog` only if live messages were given."""
    made_at: datetime
    every: timedelta
    """How long a period of `by_time` and `by_queue_and_time` is."""
    since: datetime | None = None
    until: datetime | None = None
    queues: Sequence[str] = field(default_factory=tuple)

    def rows(self, table: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.tables[table].to_pylist()
        return found

    def write_tables(self, folder: str | Path, *, csv: bool = False) -> list[Path]:
        """One Parquet file for each table, and one CSV file if wanted; returns their paths."""
        from millpond.spark.report.files import write_tables

        return write_tables(self.tables, Path(folder), csv=csv)

    def page(self) -> str:
        """One HTML page that needs nothing else."""
        from millpond.spark.report.page import page

        return page(self)

    def write_page(self, path: str | Path) -> Path:
        from millpond.spark.report.files import write_text

        return write_text(Path(path), self.page())


def report(
    archive: DataFrame,
    live: DataFrame | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Sequence[str] = (),
    every: timedelta = timedelta(hours=1),
    now: datetime | None = None,
) -> Report:
    """Measure what was settled from `since` until before `until`, and what waits now.

    `archive` has the columns `ARCHIVE_COLUMNS`, `live` has `LIVE_COLUMNS`; both are read once. `now` is the moment
    by which live messages are due: the database's, if you know it; else this machine's.
    """
    for name, moment in (("since", since), ("until", until), ("now", now)):
        if moment is not None and moment.tzinfo is None:
            raise InvalidOption(f"{name} has no time zone: give it one, such as UTC")
    if since is not None and until is not None and since >= until:
        raise InvalidOption(f"a report since {since} until {until} would be of nothing")
    if every < SHORTEST or every % SHORTEST:
        raise InvalidOption(f"every must be one second or a multiple of it, not {every}")
    made_at = now or as_datetime(SystemClock().now())
    tables = measure.settled(measure.chosen(archive, queues, since, until), every)
    for name in ("summary", "by_queue"):
        tables[name] = _with_rate(name, tables[name], tables["summary"], since, until)
    if live is not None:
        tables["backlog"] = measure.backlog(measure.chosen(live, queues), made_at)
    return Report(
        {name: tables[name] for name in figures.TABLES if name in tables}, made_at, every, since, until, tuple(queues)
    )


def _with_rate(
    name: str, table: pa.Table, summary: pa.Table, since: datetime | None, until: datetime | None
) -> pa.Table:
    """With messages per second of the report's time, which is the same for all queues."""
    import pyarrow as pa

    rates: list[float | None] = []
    for row in table.to_pylist():
        (whole,) = summary.to_pylist()
        time = (until or whole["last_at"]) - (since or whole["first_at"])
        rates.append(row["settled"] / time.total_seconds() if time > timedelta(0) else None)
    table = table.append_column("per_second", pa.array(rates, pa.float64()))
    return table.select(list(figures.TABLES[name]))
