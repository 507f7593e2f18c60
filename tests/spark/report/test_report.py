"""Every figure of a report against a history that was written and counted by hand."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pyspark.sql import functions as f

from bench.spark.passes import records_read
from millpond.errors import InvalidOption
from millpond.spark.report import ARCHIVE_COLUMNS, LIVE_COLUMNS, report
from millpond.spark.report.figures import TABLES
from tests.spark.report import report_history as history

pytestmark = [pytest.mark.slow, pytest.mark.long_on_servers]


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('report') / 'pond.db'}"
    history.write(url)
    return url


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of each kind with the history."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite")
        return
    url = request.getfixturevalue(f"{request.param}_url")
    history.write(url)
    yield url


def frames(spark: Any, url: str) -> tuple[Any, Any]:
    read = spark.read.format("millpond").option("url", url)
    archive = read.options(table="archive", columns=",".join(ARCHIVE_COLUMNS)).load()
    return archive, read.options(table="messages", columns=",".join(LIVE_COLUMNS)).load()


def rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rounded to microseconds, the unit of all times."""
    return [{name: round(v, 6) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def test_each_figure(spark: Any, url: str) -> None:
    found = report(*frames(spark, url), now=history.NOW)
    assert list(found.tables) == list(TABLES)
    for name, expected in history.EXPECTED.items():
        assert rounded(found.rows(name)) == rounded(expected), name
        assert found.tables[name].column_names == list(TABLES[name])


def test_a_part_of_time_and_some_queues(spark: Any, sqlite: str) -> None:
    archive, live = frames(spark, sqlite)
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")  # which changes nothing
    try:
        found = report(
            archive,
            live,
            since=history.after(3600),
            until=history.after(3640),
            queues=[history.ORDERS],
            every=timedelta(seconds=10),
            now=history.NOW,
        )
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    # Until means before: the one that was cancelled at 3640 is not among them.
    (summary,) = found.rows("summary")
    assert (summary["settled"], summary["per_second"]) == (3, 3 / 40)
    assert [row["at"] for row in found.rows("by_time")] == [
        history.after(3610),
        history.after(3620),
        history.after(3630),
    ]
    assert {row["reason"] for row in found.rows("failures")} == {"bad sku", "retries used up"}
    assert [row["queue"] for row in found.rows("backlog")] == [history.ORDERS]


def test_nothing_was_settled(spark: Any, sqlite: str) -> None:
    archive, _ = frames(spark, sqlite)
    found = report(archive, since=history.NOW)
    assert "backlog" not in found.tables, "nobody asked"
    assert {name: table.num_rows for name, table in found.tables.items()} == dict.fromkeys(found.tables, 0)
    assert "Millpond report" in found.page()


def test_messages_are_read_once(spark: Any, sqlite: str, tmp_path: Path) -> None:
    archive, _ = frames(spark, sqlite)
    many = archive.crossJoin(spark.range(1000).select(f.col("id").alias("copy")))
    many.write.parquet(str(tmp_path / "lake"))
    with records_read(spark) as read:
        found = report(spark.read.parquet(str(tmp_path / "lake")))
    (summary,) = found.rows("summary")
    assert summary["settled"] == 11_000
    assert 11_000 <= read[0] < 11_200, "and a few groups"
    # Percentiles of many messages come from a sketch and are approximate.
    assert (summary["waiting_p50_s"], summary["waiting_p90_s"], summary["handling_p50_s"]) == (3, 70, 0.5)


def test_files_for_other_tools(spark: Any, sqlite: str, tmp_path: Path) -> None:
    found = report(*frames(spark, sqlite), now=history.NOW)
    paths = found.write_tables(tmp_path / "tables", csv=True)
    assert sorted(path.name for path in paths) == sorted(
        f"{name}.{form}" for name in TABLES for form in ("parquet", "csv")
    )
    assert sorted(paths) == sorted((tmp_path / "tables").iterdir()), "and nothing else is left there"
    for name in TABLES:
        assert pyarrow.parquet.read_table(tmp_path / "tables" / f"{name}.parquet") == found.tables[name]
    with (tmp_path / "tables" / "slowest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[2]["error"] == history.HOSTILE_ERROR and rows[2]["queue"] == history.ORDERS


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"since": history.NOW, "until": history.START}, "must be before until"),
        ({"since": history.NOW.replace(tzinfo=None)}, "no time zone"),
        ({"every": timedelta(milliseconds=10)}, "one second"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOption, match=says):
        report(None, **options)  # type: ignore[arg-type]


def test_every_column_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "report.md").read_text()
    for name, columns in TABLES.items():
        section = page.partition(f"### `{name}`")[2].partition("\n### ")[0]
        for column, meaning in columns.items():
            assert f"| `{column}` | {meaning} |" in section, (name, column)
