"""Exports without a JVM: the tasks that Spark would run on executors run here, one after the other.

The code of the driver and of the tasks is the same. `tests/spark/lake/test_lake.py` uses a real Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from millpond.spark.lake.export import Exported, Exporter, shards_of
from millpond.spark.lake.read import files
from millpond.spark.lake.storage import storage_of
from millpond.table_prefix import TABLE_PREFIX
from tests.spark.cached_readers import close_cached


class Here:
    """The part of a session that an export uses."""

    defaultParallelism = 2

    @property
    def sparkContext(self) -> Here:
        return self

    def range(self, start: int, end: int, step: int, partitions: int) -> Here:
        self._numbers, self.tasks = range(start, end, step), partitions
        return self

    def mapInArrow(self, task: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> Here:
        self._task = task
        return self

    def collect(self) -> list[tuple[Any, ...]]:
        batches = [pa.record_batch([pa.array([number])], names=["id"]) for number in self._numbers]
        try:
            return [(value,) for b in batches for out in self._task(iter([b])) for value in out.column(0).to_pylist()]
        finally:
            close_cached()  # as when the process of a task ends


def exporter(path: Path, url: str, **options: Any) -> Exporter:
    """Without a margin unless one is given. `clock` is the clock of the database."""
    clock = options.pop("clock", None)
    storage = storage_of(path, options.pop("storage_options", None))
    shards = shards_of(url, None, TABLE_PREFIX, pooler=options.pop("pooler", False))
    one = Exporter(Here(), storage, shards, **{"margin": 0, **options})  # type: ignore[arg-type]
    if clock is not None:
        one.store_options = {**one.store_options, "clock": clock}
    return one


def export(path: Path, url: str, **options: Any) -> Exported:
    one = exporter(path, url, **options)
    try:
        return one.export()
    finally:
        one.close()


def lake_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of the files in the log."""
    import pyarrow.parquet as pq

    return [row for file in files(path) for row in pq.ParquetFile(file).read().to_pylist()]
