"""Every figure of a report against a history that was written, and counted, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millpond.spark.report import ARCHIVE_COLUMNS, LIVE_COLUMNS, report
from millpond.spark.report.figures import TABLES
from tests.spark import report_history as history


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


def test_each_figure(spark: Any, url: str) -> None:
    found = report(*frames(spark, url), now=history.NOW)
    assert list(found.tables) == list(TABLES)
    for name, expected in history.EXPECTED.items():
        assert found.rows(name) == [pytest.approx(row) for row in expected], name
        assert found.tables[name].column_names == list(TABLES[name])
