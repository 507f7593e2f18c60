"""The walk-through of examples/spark_walkthrough, from top to bottom."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "spark_walkthrough" / "walkthrough.py"


@pytest.mark.slow
def test_each_cell_runs_and_the_books_are_right(
    spark: Any, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLPOND_URL", sqlite_url)
    left = runpy.run_path(str(SCRIPT))
    assert sorted(map(tuple, left["archive"].groupBy("queue", "state").count().collect())) == [
        ("orders", "COMPLETED", 24),
        ("orders", "FAILED", 6),
        ("to-be-shipped", "COMPLETED", 24),
    ]
    assert sorted(map(tuple, left["now"].groupBy("queue", "state").count().collect())) == [("warehouse", "PENDING", 24)]
    assert "batch 1: 15 decided" in capfd.readouterr().out
