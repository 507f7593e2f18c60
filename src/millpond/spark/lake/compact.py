"""Compaction: many small files of a day become few large ones, and files that are no longer needed are deleted.

One commit replaces the small files by the large ones: every reader sees each row once, before and after. Exports may
run at the same time. The small files stay for a week, because a reader may have begun with them.

Executors merge, not `deltalake.optimize`: that one runs on the driver alone. It also cuts the greatest time of a file
to milliseconds, so a reader must know that rows of the file may be later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from millpond.spark.lake.body import Decoder
from millpond.spark.lake.files import File
from millpond.spark.lake.on_executors import check_written, run_on_executors
from millpond.spark.lake.storage import Storage, storage_of
from millpond.spark.lake.table import KEEP, Began, Lake, LakeChanged
from millpond.spark.lake.writers import Writers, file_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

LARGE = 128 << 20
"""Bytes: the size limit of a merged file. Files of at least half this size are not merged."""
_AT_ONCE = 10_000
"""Maximum number of files that one compaction replaces."""
_TRIES = 20

Small = tuple[str, str, int]
"""Path, day and size of a file."""


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a compaction."""

    replaced: int
    written: int
    deleted: int
    """Number of deleted files: replaced long ago, or never committed."""

    def summary(self) -> str:
        return f"{self.replaced:,} small files became {self.written:,}; {self.deleted:,} unneeded files deleted"


def compact(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    large: int = LARGE,
    fewest: int = 2,
    keep: timedelta | None = KEEP,
    storage_options: Mapping[str, str] | None = None,
) -> Compacted:
    """Merge small files, and delete files that were replaced or never committed before `keep`; None deletes nothing.

    `fewest` is the minimum number of files to merge. A shorter `keep` than the longest export destroys that export.
    """
    storage = storage_of(path, storage_options)
    lake, began = Lake.open(storage), Began()
    groups = small_files(lake.sizes(), large, fewest)
    do = partial(merge, storage=storage, decoder=Decoder(lake.body) if lake.body else None)
    made = run_on_executors(spark, do, groups, Merged)
    check_written(storage, (file for one in made for file in one.files))
    replaced = [small for group in groups for small in group]
    added = [file for one in made for file in one.files]
    began.check()
    if replaced:
        _replace(storage, replaced, added)
    gone = [] if keep is None else Lake.open(storage).unused(int(keep.total_seconds() // 3600))
    for unused in gone:
        storage.delete(unused)
    return Compacted(replaced=len(replaced), written=len(added), deleted=len(gone))


def _replace(storage: Storage, replaced: Sequence[Small], added: Sequence[File]) -> None:
    for tried in range(_TRIES):
        try:
            return Lake.open(storage).replace(replaced, added)
        except LakeChanged:  # an export was committed between the two steps
            if tried == _TRIES - 1:
                raise


def small_files(files: Iterable[Small], large: int, fewest: int) -> list[list[Small]]:
    """Groups of at least two files to merge, of the same day. Each becomes one file."""
    by_day: dict[str, list[Small]] = {}
    for small in sorted(files):
        if small[2] < large // 2:
            by_day.setdefault(small[1], []).append(small)
    groups: list[list[Small]] = []
    for _, files_of_day in sorted(by_day.items()):
        group: list[Small] = []
        for small in files_of_day:
            if group and sum(one[2] for one in group) + small[2] > large:
                groups.append(group)
                group = []
            group.append(small)
        groups.append(group)
    chosen, count = [], 0
    for group in groups:
        if len(group) >= max(2, fewest) and count + len(group) <= _AT_ONCE:
            chosen.append(group)
            count += len(group)
    return chosen


class Merged(msgspec.Struct, frozen=True):
    """Result of one task."""

    files: list[File]


def merge(files: Sequence[Small], storage: Storage, decoder: Decoder | None) -> Merged:
    """Merge one group, in a task.

    The result does not end by its size, which would be that of rows in memory: compressed, it may be small again, and
    every compaction would rewrite it.
    """
    schema = file_schema(decoder)
    with Writers(storage, decoder, end_by_size=False) as out:
        for path, _, _ in files:
            for batch in read_file(storage, path, schema):
                out.add_file_rows(batch)
    return Merged(out.files)


def read_file(storage: Storage, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file of any age, in batches of bounded size."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(storage.source(path)) as source:
        for number in range(source.num_row_groups):
            # Each alone, because a batch would have rows of several ones: gigabytes of long bodies.
            for batch in source.iter_batches(batch_size=1 << 14, row_groups=[number]):
                yield _conform(batch, schema)


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of an older file, with nulls for missing columns.

    Not by concat_tables: filling fields of a struct (apache/arrow#44587) is newer than the oldest pyarrow we allow.
    """
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
