"""Real processes, really killed: tasks after their write, a driver between its tasks and its commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.dying import ROWS
from tests.spark.test_sink import left, live, migrated, save


@pytest.mark.timeout(300)
def test_what_dies_on_the_way_is_written_once(spark: Any, postgres_url: str) -> None:
    url = migrated(postgres_url)
    job = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "dying.py"), url],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    output, _ = job.communicate()
    assert output.splitlines()[-1:] == ["retried"], "it died where it should"
    everything = sorted(str(n).encode() for n in range(ROWS))
    for queue in ("retried", "retried-loose"):
        assert sorted(row.payload for row in live(url, queue)) == everything
    assert live(url, "driver") == []
    assert left(url) > ROWS, "the dead driver's rows, and nobody sees them"
    # Run again, cut otherwise.
    frame = spark.range(0, ROWS, 1, 2).selectExpr("cast(id as string) as payload")
    save(frame, url, queue="driver", txn="driver")
    assert sorted(row.payload for row in live(url, "driver")) == everything
    assert left(url) == 0
