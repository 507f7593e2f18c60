"""Killed at every step: no message twice, none missing, and none purged that the lake does not hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.lake.dying import POINTS
from tests.lake.here import lake_rows
from tests.lake.test_export import ids


def test_whatever_dies_wherever(url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lake.dying", url, str(tmp_path / "lake")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["died"] == list(POINTS)
    assert ids(lake_rows(tmp_path / "lake")) == sorted(said["archived"])
    assert said["before"], "the last one was killed before it had purged everything"
    assert said["left"] == []
