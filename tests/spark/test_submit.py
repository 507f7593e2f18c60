"""The job of the guide, started as `spark-submit` starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.lake.test_export import lake_rows
from tests.spark.ponds import fill, rows

GUIDE = Path(__file__).resolve().parents[2] / "docs/how-to/lake.md"


@pytest.mark.java
@pytest.mark.long
def test_the_job_of_the_guide(sqlite_url: str, tmp_path: Path) -> None:
    """The job of the guide with other folders, and one round only."""
    fill(sqlite_url)
    before = rows(sqlite_url, "archive")
    found = re.search(r"```py\n(# lake_job\.py\n.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    text = found[1].replace("/data/", f"{tmp_path}/").replace("every=timedelta(minutes=10)", "rounds=1, margin=0")
    job = tmp_path / "lake_job.py"
    job.write_text(text)
    subprocess.run(
        [Path(sys.executable).with_name("spark-submit"), "--master", "local[2]", job],
        env={**os.environ, "MILLPOND_URL": sqlite_url, "PYSPARK_PYTHON": sys.executable},
        check=True,
        timeout=200,
    )
    assert list((tmp_path / "report").iterdir())
    assert sorted(row["id"] for row in lake_rows(tmp_path / "lake")) == sorted(map(str, before))
