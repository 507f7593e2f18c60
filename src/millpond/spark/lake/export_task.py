"""One task of an export: reads its slice of the archive and writes Parquet files by day.

The files are durable when the task ends, and part of the lake when the driver has committed them. A task that runs
twice writes other files; those that are not committed are orphans, which no reader opens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from millpond.seam.arrow import Slice
from millpond.spark.lake.body import Decoder
from millpond.spark.lake.files import File
from millpond.spark.lake.ranges import MINUTE
from millpond.spark.lake.storage import Storage
from millpond.spark.lake.writers import Writers, archived_times
from millpond.spark.options import SparkShard

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, repr=False)
class Work:
    """The part of one task. Its repr shows no password."""

    shard: SparkShard
    slice: Slice


class SliceExported(msgspec.Struct, frozen=True):
    """Result of one task."""

    shard: int
    files: list[File]
    by_minute: Mapping[int, int]
    """Minute of archiving since 1970 -> number of messages."""


RedactBody = Callable[[str, bytes], bytes]
"""Gets the queue and the body of a message; returns the body for the lake."""


def export_slice(
    work: Work, storage: Storage, decoder: Decoder | None, redact: RedactBody | None = None
) -> SliceExported:
    """Export one slice, in a task."""
    from millpond.spark.columns import batch_columns

    columns = batch_columns("archive", work.shard.number)
    out = Writers(storage, decoder)
    by_minute: dict[int, int] = {}
    # Not a cached connection: the next export may be hours away.
    with work.shard.open_reader() as reader, out:
        for batch in reader.read(work.slice, columns):
            out.add(batch if redact is None else redacted(batch, redact))
            count_minutes(batch, by_minute)
    return SliceExported(work.shard.number, out.files, by_minute)


def count_minutes(batch: pa.RecordBatch, by_minute: dict[int, int]) -> None:
    import numpy as np

    minutes, counts = np.unique(archived_times(batch) // MINUTE, return_counts=True)
    for minute, count in zip(minutes.tolist(), counts.tolist(), strict=True):
        by_minute[minute] = by_minute.get(minute, 0) + count


def redacted(batch: pa.RecordBatch, redact: RedactBody) -> pa.RecordBatch:
    """The rows with the bodies that the function returns. A body for which it fails is empty."""
    import pyarrow as pa

    at = batch.schema.get_field_index("payload")
    queues, bodies = batch.column("queue").to_pylist(), batch.column(at).to_pylist()
    field = batch.schema.field(at)
    values = pa.array([redacted_body(*each, redact) for each in zip(queues, bodies, strict=True)], field.type)
    return batch.set_column(at, field, values)


def redacted_body(queue: str, body: bytes, redact: RedactBody) -> bytes:
    try:
        result = redact(queue, body)
    except Exception:
        return b""  # one body must not stop every export, and its error may quote it
    return result if isinstance(result, bytes) else b""
