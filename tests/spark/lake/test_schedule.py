"""A schedule of a lake goes on after errors, and reports on a week. No Spark is needed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import LakeError, LakeFenced, StoreError
from millpond.spark.lake import schedule
from millpond.spark.lake.export import Exporter, shards_of
from millpond.spark.lake.storage import storage_of
from millpond.table_prefix import TABLE_PREFIX
from tests.spark.lake.here import Here
from tests.spark.ponds import fill

pytestmark = pytest.mark.usefixtures("soon")


@pytest.mark.parametrize("error", [LakeFenced("others came first"), LakeError("x"), StoreError("x"), OSError("full")])
def test_an_error_postpones_a_step(
    error: Exception, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(sqlite_url, ["orders"])
    said: list[tuple[str, str]] = []
    original, calls = Exporter.export, iter([True, True, False])

    def fail_twice(exporter: Exporter) -> Any:
        if next(calls):
            raise error
        return original(exporter)

    monkeypatch.setattr(Exporter, "export", fail_twice)
    schedule.run(
        Here(),  # type: ignore[arg-type]
        tmp_path / "lake",
        sqlite_url,
        steps=["export"],
        every=timedelta(0),
        rounds=3,
        margin=0,
        on_step=lambda step, what: said.append((step, what)),
    )
    assert said[:2] == [("export", f"postponed: {error}")] * 2
    assert said[2][1].startswith("4 messages in")


def test_the_report_covers_a_week(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Report:
        def write_tables(self, folder: Path) -> None: ...

        def write_page(self, page: Path) -> Path:
            return page

    def report_on(spark: Any, **given: Any) -> Report:
        asked.append(given)
        return Report()

    monkeypatch.setattr("millpond.spark.report.report_on", report_on)
    shards, storage = shards_of(sqlite_url, None, TABLE_PREFIX), storage_of(tmp_path / "lake")
    steps: dict[str, Any] = {"steps": ["report"], "rounds": 1, "report_to": tmp_path}
    schedule.run(Here(), storage.root, shards[0].url.raw, **steps)  # type: ignore[arg-type]
    schedule.run(Here(), storage.root, sqlite_url, **steps, report_on=timedelta(hours=1))  # type: ignore[arg-type]
    week, hour = (datetime.now(UTC) - given["since"] for given in asked)
    assert timedelta(days=7) <= week < timedelta(days=7, minutes=5)
    assert timedelta(hours=1) <= hour < timedelta(hours=1, minutes=5)
