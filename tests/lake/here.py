"""Exports without a JVM: the tasks that Spark would run on executors run here, one after the other.

What the driver does is the same; so is what a task does. `tests/spark/test_lake.py` has the real thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from millpond.spark.kept import close_kept
from millpond.spark.lake.export import Exported, Exporter, shards_of
from millpond.spark.lake.read import files


class Here:
    """As much of a session as an export uses."""

    defaultParallelism = 2

    @property
    def sparkContext(self) -> Here:
        return self

    def range(self, start: int, end: int, step: int, partitions: int) -> Here:
        self._numbers = range(start, end, step)
        return self

    def mapInArrow(self, task: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> Here:
        self._task = task
        return self

    def collect(self) -> list[tuple[Any, ...]]:
        batches = [pa.record_batch([pa.array([number])], names=["id"]) for number in self._numbers]
        try:
            return [(value,) for b in batches for out in self._task(iter([b])) for value in out.column(0).to_pylist()]
        finally:
            close_kept()  # as when the process of a task ends


def exporter(path: Path, url: str, **options: Any) -> Exporter:
    return Exporter(Here(), path, shards_of(url, None, ""), **options)  # type: ignore[arg-type]


def export(path: Path, url: str, **options: Any) -> Exported:
    one = exporter(path, url, **options)
    try:
        return one.export()
    finally:
        one.close()


def lake_rows(path: Path) -> list[dict[str, Any]]:
    """What a reader that follows the manifest sees."""
    import pyarrow.parquet as pq

    return [row for file in files(path) for row in pq.ParquetFile(file).read().to_pylist()]
