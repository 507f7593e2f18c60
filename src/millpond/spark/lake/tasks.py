"""Work on the executors: each piece of it in a task of its own, and what comes back is which files it wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from millpond.errors import LakeDamaged
from millpond.spark.lake.manifest import File, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

W = TypeVar("W")


def written_by_tasks(spark: SparkSession, lake: Lake, do: Callable[[W], list[File]], works: Sequence[W]) -> list[File]:
    if not works:
        return []

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                text = msgspec.json.encode(do(works[number])).decode()
                yield pa.record_batch([pa.array([text])], names=["files"])

    frame = spark.range(0, len(works), 1, len(works)).mapInArrow(task, "files string")
    found = [file for row in frame.collect() for file in msgspec.json.decode(row[0], type=list[File])]
    for file in found:
        # An executor of another machine may have a folder of its own under the same name.
        path = lake.root / file.path
        if not path.exists() or path.stat().st_size != file.size:
            raise LakeDamaged(
                f"an executor wrote {file.path}, and it is not in {lake.root}: the lake must be a folder that all "
                "machines of Spark share; nothing was committed"
            )
    return found
