"""Compaction: many small files of a queue and day become one, and what nobody needs any more is deleted.

A commit replaces the small files by the large one, so that every reader sees each row once, before and after. The
small ones stay on the disk for a day: a reader may have begun with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millpond.clock import SECOND, SystemClock
from millpond.spark.lake.body import Decoder
from millpond.spark.lake.manifest import FOLDER, File, Lake
from millpond.spark.lake.parquet import Writers, file_schema
from millpond.spark.lake.tasks import written_by_tasks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

LARGE = 128 << 20
"""Bytes of a file that is left as it is, and at most of one that is made."""
KEEP = 86_400 * SECOND
_AT_ONCE = 10_000
"""Files that one compaction replaces; the rest is for the next."""


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction has done."""

    replaced: int
    by: int
    deleted: int
    """Files that nobody needs any more: replaced long ago, or never committed."""


def compact(spark: SparkSession, path: str | os.PathLike[str], *, large: int = LARGE, keep: int = KEEP) -> Compacted:
    """Merge small files, as its only writer; an export that runs at the same time is fenced."""
    lake = Lake(path)
    lake.open()
    return compact_opened(spark, lake, large=large, keep=keep)


def compact_opened(
    spark: SparkSession, lake: Lake, *, large: int = LARGE, keep: int = KEEP, fewest: int = 2
) -> Compacted:
    """By who has opened the lake already; `fewest` files are worth the trouble of merging them."""
    groups = small_files(lake.state.files.values(), large, fewest)
    merges = [Merge(str(lake.root), lake.state.epoch, group) for group in groups]
    do = partial(merge, decoder=Decoder(lake.state.body) if lake.state.body else None)
    made = written_by_tasks(spark, lake, do, merges)
    gone = _unneeded(lake, keep)
    for path in gone:
        (lake.root / path).unlink(missing_ok=True)
    replaced = [file.path for group in groups for file in group]
    forgotten = [path for path in gone if path in lake.state.removed]
    if replaced or forgotten:
        lake.commit("compact", added=made, removed=replaced, forgotten=forgotten)
    lake.trim()
    return Compacted(replaced=len(replaced), by=len(made), deleted=len(gone))


def small_files(files: Iterable[File], large: int, fewest: int) -> list[list[File]]:
    """Groups of files that together make one: of the same queue, day and shard, the oldest first."""
    by_place: dict[tuple[str, str, int], list[File]] = {}
    for file in sorted(files, key=lambda file: (file.day, file.first_us, file.path)):
        if file.size < large // 2:
            by_place.setdefault((file.queue, file.day, file.shard), []).append(file)
    groups: list[list[File]] = []
    for small in by_place.values():
        group: list[File] = []
        for file in small:
            if group and sum(one.size for one in group) + file.size > large:
                groups.append(group)
                group = []
            group.append(file)
        groups.append(group)
    chosen, count = [], 0
    for group in groups:
        if len(group) >= fewest and count + len(group) <= _AT_ONCE:
            chosen.append(group)
            count += len(group)
    return chosen


def _unneeded(lake: Lake, keep: int) -> list[str]:
    """Files replaced so long ago, and those of earlier writers that no entry names: these can commit no more."""
    before = SystemClock().now() - keep
    gone = [path for path, at in lake.state.removed.items() if at <= before]
    known = lake.state.files.keys() | lake.state.removed.keys()
    # Once is enough for each writer: what it leaves itself is for the next one.
    for path in () if lake.swept else lake.root.glob("*/*/*.parquet"):
        name = str(path.relative_to(lake.root))
        epoch = path.name.partition("-")[0]
        if name not in known and not name.startswith(FOLDER) and epoch.isdigit() and int(epoch) < lake.state.epoch:
            gone.append(name)
    lake.swept = True
    return gone


@dataclass(frozen=True)
class Merge:
    root: str
    epoch: int
    files: Sequence[File]


def merge(work: Merge, decoder: Decoder | None) -> list[File]:
    """In a task."""
    import pyarrow.parquet as pq

    first = work.files[0]
    out = Writers(Path(work.root), work.epoch, first.shard, decoder)
    with out:
        for file in work.files:
            with pq.ParquetFile(Path(work.root) / file.path) as source:
                for batch in source.iter_batches(batch_size=1 << 14):
                    out.add_whole(first.queue, conform(batch, file_schema(decoder)))
    return out.files


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of an older file, with nulls for what it does not have."""
    import pyarrow as pa

    arrays = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
        elif pa.types.is_struct(field.type):
            arrays.append(_conform_struct(batch.column(at), field.type))
        else:
            arrays.append(batch.column(at))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _conform_struct(array: pa.StructArray, wanted: pa.StructType) -> pa.StructArray:
    import pyarrow as pa

    have = {field.name for field in array.type}
    arrays = [array.field(f.name) if f.name in have else pa.nulls(len(array), f.type) for f in wanted]
    return pa.StructArray.from_arrays(arrays, fields=list(wanted), mask=array.is_null())
