"""The measurements of reads and writes by Spark run and print their results; speed does not matter here."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from bench.databases import PostgresDatabase
from bench.spark.__main__ import MEASURES
from bench.spark.setup import set_up_on
from servers import Postgres


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bars"),
    [
        ("sink", 3),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("batch", 1), ("export", 2), ("stream", 2))),
    ],
)
def test_each_measurement(spark: Any, postgres_server: Postgres, name: str, bars: int) -> None:
    with set_up_on(PostgresDatabase(postgres_server), spark) as place:
        found = asyncio.run(MEASURES[name](place, 600, 1))
    assert all(measurement.name.startswith(f"spark-{name}") for measurement in found)
    assert all(math.isfinite(measurement.value) and measurement.value > 0 for measurement in found)
    assert sum(measurement.met is not None for measurement in found) == bars
