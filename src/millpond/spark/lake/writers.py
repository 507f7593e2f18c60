"""Writes Parquet files of messages by day of archiving, in bounded memory.

The number of files depends on days and bytes, not on queues. Rows are sorted by queue within some tens of megabytes:
a reader of one queue skips most row groups by their statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from millpond.clock import SECOND
from millpond.seam.arrow import arrow_schema
from millpond.spark.lake.body import Decoder
from millpond.spark.lake.files import Bounds, File
from millpond.spark.lake.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

ROW_GROUP, ROW_GROUP_BYTES = 1 << 17, 32 << 20
"""Maximum number of rows and bytes of a row group."""
SORTED_BYTES = 64 << 20
"""Bytes of rows that are sorted together. Twice as much is in memory for each open file."""
FILE_BYTES = 256 << 20
"""Bytes of rows after which a file ends."""
MOST_OPEN = 4
"""Maximum number of open files, one for each day, in a task."""
DICTIONARY = ["queue", "key", "state", "reason", "error", "priority", "deliveries", "attempts", "shard", "day"]
"""Columns with recurring values; for the others Parquet would begin a dictionary and drop it."""
_DAY = 86_400 * SECOND


@dataclass
class Writers:
    """Parquet files, one or more for each day; some of them are open."""

    storage: Storage
    decoder: Decoder | None = None
    end_by_size: bool = True
    """False: one file for each day, however long."""
    files: list[File] = field(default_factory=list)
    _open: dict[int, _Open] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows as they were read from a database."""
        for day, rows in group_by_day(batch):
            self._write(day, with_day_and_body(rows, day, self.decoder))

    def add_file_rows(self, rows: pa.RecordBatch) -> None:
        """Add rows of a file of the lake, all of one day."""
        if rows.num_rows:
            self._write(int(archived_times(rows)[0]) // _DAY, rows)

    def _write(self, day: int, rows: pa.RecordBatch) -> None:
        out = self._open.pop(day, None) or _Open.begin(self.storage, day, file_schema(self.decoder))
        self._open[day] = out  # in order of use, the latest last
        out.take(rows)
        if self.end_by_size and out.bytes >= FILE_BYTES:
            self._end(self._open.pop(day))
        elif len(self._open) > MOST_OPEN:
            self._end(self._open.pop(next(iter(self._open))))

    def _end(self, out: _Open) -> None:
        self.files.append(out.end(self.storage))

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        while self._open:
            out = self._open.popitem()[1]
            if error is None:
                self._end(out)
            else:
                out.discard(self.storage)


@dataclass
class _Open:
    """One open file."""

    path: str
    day: str
    sink: Any
    writer: Any
    rows: int = 0
    bytes: int = 0
    least: Bounds | None = None
    greatest: Bounds | None = None
    pending: list[pa.RecordBatch] = field(default_factory=list)
    """Rows that are not written yet."""
    pending_bytes: int = 0

    @classmethod
    def begin(cls, storage: Storage, day: int, schema: pa.Schema) -> _Open:
        import pyarrow.parquet as pq

        text = day_text(day)
        path = f"day={text}/{uuid4().hex}.parquet"
        sink = storage.begin(path)
        writer = pq.ParquetWriter(sink, schema, compression="zstd", compression_level=1, use_dictionary=DICTIONARY)
        return cls(path, text, sink, writer)

    def take(self, rows: pa.RecordBatch) -> None:
        self.rows += rows.num_rows
        self.bytes += rows.nbytes
        self.pending.append(rows)
        self.pending_bytes += rows.nbytes
        if self.pending_bytes >= SORTED_BYTES:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if not self.pending:
            return
        rows = pa.Table.from_batches(self.pending).combine_chunks()
        size = max(1, min(ROW_GROUP, rows.num_rows * ROW_GROUP_BYTES // max(1, self.pending_bytes)))
        self.pending, self.pending_bytes = [], 0
        least, greatest = bounds(rows)
        self.least = least if self.least is None else Bounds.of(min, self.least, least)
        self.greatest = greatest if self.greatest is None else Bounds.of(max, self.greatest, greatest)
        self.writer.write_table(sorted_by_queue(rows), row_group_size=size)

    def end(self, storage: Storage) -> File:
        self.flush()
        self.writer.close()
        size = storage.end(self.path, self.sink)
        assert self.least is not None and self.greatest is not None
        return File(self.path, self.day, self.rows, size, self.least, self.greatest)

    def discard(self, storage: Storage) -> None:
        self.writer.close()
        storage.discard(self.path, self.sink)


def file_schema(decoder: Decoder | None) -> pa.Schema:
    import pyarrow as pa

    from millpond.spark.columns import batch_columns

    schema = arrow_schema(batch_columns("archive")).append(pa.field("day", pa.date32()))
    if decoder is None:
        return schema
    return schema.append(pa.field("body", decoder.type)).append(pa.field("unreadable", pa.string()))


def with_day_and_body(rows: pa.RecordBatch, day: int, decoder: Decoder | None) -> pa.RecordBatch:
    """The rows with the columns `day`, `body` and `unreadable`."""
    import pyarrow as pa

    days = pa.repeat(pa.scalar(day, pa.int32()), rows.num_rows).cast(pa.date32())
    rows = rows.append_column("day", days)
    if decoder is None:
        return rows
    body, unreadable = decoder(rows)
    return rows.append_column("body", body).append_column("unreadable", unreadable)


def group_by_day(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch by day of archiving."""
    import numpy as np

    if not batch.num_rows:
        return
    days = archived_times(batch) // _DAY
    if days.min() == days.max():
        yield int(days[0]), batch
        return
    for day in np.unique(days):
        yield int(day), batch.take(np.flatnonzero(days == day))


def sorted_by_queue(rows: pa.Table) -> pa.Table:
    """The rows by queue; those of a queue keep their order."""
    import numpy as np
    import pyarrow.compute as pc

    queues = pc.dictionary_encode(rows.column("queue").combine_chunks())
    if len(queues.dictionary) == 1:
        return rows
    ranks = np.empty(len(queues.dictionary), np.uint32)
    ranks[pc.sort_indices(queues.dictionary).to_numpy()] = np.arange(len(ranks), dtype=np.uint32)
    # Few values in 16 bits are sorted in linear time.
    found = ranks.astype(np.uint16) if len(ranks) < 1 << 16 else ranks
    return rows.take(np.argsort(found[queues.indices.to_numpy()], kind="stable"))


def bounds(rows: pa.Table) -> tuple[Bounds, Bounds]:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [rows.column("queue"), rows.column("state"), rows.column("archived_at").cast(pa.int64())]
    found = [pc.min_max(column).as_py() for column in (*columns, rows.column("shard"))]
    return Bounds(*(one["min"] for one in found)), Bounds(*(one["max"] for one in found))


def archived_times(batch: pa.RecordBatch) -> Any:
    """`archived_at` as int64 microseconds."""
    import pyarrow as pa

    return batch.column("archived_at").cast(pa.int64()).to_numpy(zero_copy_only=False)


def day_text(day: int) -> str:
    return f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"
