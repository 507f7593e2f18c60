"""Killed at every step: no message twice, none missing, and none purged without being in the lake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.lake.dying import POINTS
from tests.spark.lake.here import lake_rows
from tests.spark.lake.readers import READERS
from tests.spark.lake.test_export import ids


@pytest.mark.slow
@pytest.mark.parametrize("url", ["sqlite", "postgres", pytest.param("mariadb", marks=pytest.mark.long)], indirect=True)
def test_whatever_dies_wherever(url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.lake.dying", url, str(tmp_path / "lake")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["died"] == list(POINTS)
    everything = sorted(said["archived"])
    assert ids(lake_rows(tmp_path / "lake")) == everything
    for read in READERS:
        assert read(tmp_path / "lake") == everything, read.__name__
    assert said["before"], "the last one was killed before it had purged everything"
    assert said["left"] == []
