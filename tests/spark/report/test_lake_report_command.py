"""`millpond lake report`, on the history that was written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millpond.cli import run_command
from tests.spark.report import report_history as history


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('report') / 'pond.db'}"
    history.write(url)
    return url


def test_tables_files_and_a_page(spark: Any, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, tables = tmp_path / "out" / "report.html", tmp_path / "tables"
    assert run_command(["lake", "report", "--url", url, "--html", str(page), "--tables", str(tables), "--csv"]) == 0
    said = capsys.readouterr().out
    assert "11 settled: 7 completed, 4 failed" in said
    for part in ("Queues", "Over time", "Failures", "Slowest messages", "Poisonous messages", "Waiting now"):
        assert part in said
    assert history.MAIL in said and "retries used up" in said and "TimeoutError" in said
    assert "\x1b" not in said, "an error does nothing to a terminal"
    assert page.as_uri() in said and "Millpond report" in page.read_text()
    assert len(list(tables.glob("*.parquet"))) == len(list(tables.glob("*.csv"))) == len(history.EXPECTED)
    assert not spark.sparkContext._jsc.sc().isStopped(), "a session that was there stays"


def test_json_of_a_part(spark: Any, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    window = ["--since", "2026-03-01T09:00:00Z", "--until", "2026-03-01T10:00:00Z", "--every", "1d"]
    assert run_command(["lake", "report", "--url", url, "--json", "--queue", history.ORDERS, *window]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"][0]["settled"] == 4
    assert [row["at"] for row in found["by_time"]] == ["2026-03-01T00:00:00Z"]
    # By the clock of the database: everything scheduled is due by now.
    assert [(row["queue"], row["due"], row["scheduled"]) for row in found["backlog"]] == [(history.ORDERS, 3, 0)]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "--lake PATH, --url URL"),
        (["--url", "{url}", "--csv"], 2, "--tables DIR"),
        (["--url", "{url}", "--since", "yesterday"], 2, "2030-01-31T08:00:00Z"),
        (["--url", "{url}", "--every", "10ms"], 2, "one second"),
        (["--url", "sqlite:///nowhere.db"], 1, "nowhere.db"),
    ],
)
def test_what_is_wrong_is_said(
    spark: Any, url: str, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["lake", "report", *(argument.format(url=url) for argument in arguments)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("millpond: ") and says in said.err and said.err.count("\n") == 1
