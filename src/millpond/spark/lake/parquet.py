"""Parquet files of messages, by queue and day, written little by little in bounded memory."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from millpond.clock import SECOND
from millpond.spark.lake.manifest import File, sync_folder

if TYPE_CHECKING:
    import pyarrow as pa

    from millpond.spark.lake.body import Decoder

ROW_GROUP, ROW_GROUP_BYTES = 1 << 17, 32 << 20
"""Rows, or bytes of them, that make a row group."""
MOST_PENDING = 128 << 20
"""Bytes of all row groups that a task has in memory: with many queues they become smaller."""
MOST_OPEN = 64
"""Files that a task has open."""
_DAY = 86_400 * SECOND
_SIMPLE = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


@dataclass
class _Open:
    writer: Any
    path: str
    queue: str
    day: int
    rows: int = 0
    first: int = 2**63
    last: int = -(2**63)
    pending: list[pa.RecordBatch] = field(default_factory=list)
    """Rows of the next row group."""
    pending_rows: int = 0
    pending_bytes: int = 0

    def take(self, rows: pa.RecordBatch) -> None:
        moments = _moments(rows)
        self.rows += rows.num_rows
        self.first, self.last = min(self.first, int(moments.min())), max(self.last, int(moments.max()))
        self.pending.append(rows)
        self.pending_rows += rows.num_rows
        self.pending_bytes += rows.nbytes

    def flush(self) -> None:
        import pyarrow as pa

        if self.pending:
            self.writer.write_table(pa.Table.from_batches(self.pending), row_group_size=self.pending_rows)
            self.pending, self.pending_rows, self.pending_bytes = [], 0, 0


@dataclass
class Writers:
    """Parquet files, one or more for each queue and day, of which some are open."""

    root: Path
    epoch: int
    shard: int
    decoder: Decoder | None = None
    files: list[File] = field(default_factory=list)
    _open: dict[tuple[str, int], _Open] = field(default_factory=dict)
    _folders: set[Path] = field(default_factory=set)

    def add(self, batch: pa.RecordBatch) -> None:
        """Rows as they were fetched."""
        for queue, day, rows in parted(batch):
            self._write(queue, day, whole_rows(rows, day, self.decoder))

    def add_whole(self, queue: str, rows: pa.RecordBatch) -> None:
        """Rows as they stand in a file, all of one queue and day."""
        if rows.num_rows:
            self._write(queue, int(_moments(rows)[0]) // _DAY, rows)

    def _write(self, queue: str, day: int, rows: pa.RecordBatch) -> None:
        out = self._open.pop((queue, day), None) or self._begin(queue, day)
        self._open[queue, day] = out  # the last one used stands last
        out.take(rows)
        if out.pending_rows >= ROW_GROUP or out.pending_bytes >= ROW_GROUP_BYTES:
            out.flush()
        elif sum(one.pending_bytes for one in self._open.values()) > MOST_PENDING:
            max(self._open.values(), key=lambda one: one.pending_bytes).flush()
        if len(self._open) > MOST_OPEN:
            self._end(self._open.pop(next(iter(self._open))))

    def _begin(self, queue: str, day: int) -> _Open:
        import pyarrow.parquet as pq

        folder = self.root / folder_of(queue) / day_text(day)
        if folder not in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
            self._folders.add(folder)
        path = folder / f"{self.epoch:08}-{self.shard}-{uuid4().hex}.parquet"
        schema = file_schema(self.decoder)
        writer = pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, use_dictionary=DICTIONARY)
        return _Open(writer, str(path.relative_to(self.root)), queue, day)

    def _end(self, out: _Open) -> None:
        out.flush()
        out.writer.close()
        size = _sync(self.root / out.path)
        day = day_text(out.day)
        self.files.append(File(out.path, out.rows, size, out.queue, day, self.shard, out.first, out.last))

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for out in self._open.values():
                out.writer.close()
                os.unlink(self.root / out.path)
            return
        for out in self._open.values():
            self._end(out)
        self._open.clear()
        for folder in {self.root, *self._folders, *(folder.parent for folder in self._folders)}:
            sync_folder(folder)


DICTIONARY = ["queue", "key", "state", "reason", "error", "priority", "deliveries", "attempts", "shard", "day"]
"""Columns whose values recur; of the others a dictionary would be made only to be given up."""


def file_schema(decoder: Decoder | None) -> pa.Schema:
    import pyarrow as pa

    from millpond.spark.schema import batch_columns
    from millpond.transports.database.fetch.columns import arrow_schema

    schema = arrow_schema(batch_columns("archive")).append(pa.field("day", pa.date32()))
    return schema if decoder is None else schema.append(pa.field("body", decoder.type))


def whole_rows(rows: pa.RecordBatch, day: int, decoder: Decoder | None) -> pa.RecordBatch:
    """With the day, and with the body's columns."""
    import pyarrow as pa

    days = pa.repeat(pa.scalar(day, pa.int32()), rows.num_rows).cast(pa.date32())
    arrays = [*rows.columns, days]
    if decoder is not None:
        arrays.append(decoder(rows))
    return pa.RecordBatch.from_arrays(arrays, schema=file_schema(decoder))


def parted(batch: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """The rows of a batch by queue and by day of archiving."""
    import numpy as np
    import pyarrow.compute as pc

    if not batch.num_rows:
        return
    queues = pc.dictionary_encode(batch.column("queue"))
    days = _moments(batch) // _DAY
    codes = queues.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    if len(queues.dictionary) == 1 and days[0] == days[-1] and (days == days[0]).all():
        yield queues.dictionary[0].as_py(), int(days[0]), batch
        return
    group = codes * 100_000_000 + days
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=group[order[0]] - 1))
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        row = order[start]
        # Copied, since a slice would keep the whole batch in memory for its few rows.
        yield queues.dictionary[int(codes[row])].as_py(), int(days[row]), batch.take(order[start:end])


def _moments(batch: pa.RecordBatch) -> Any:
    """Of archiving, in microseconds."""
    import pyarrow as pa

    return batch.column("archived_at").cast(pa.int64()).to_numpy(zero_copy_only=False)


def day_text(day: int) -> str:
    return f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"


def folder_of(queue: str) -> str:
    """A folder's name for a queue: the same where that is plain, else what is plain of it and a hash of the rest.

    Nobody reads the queue from here: it is a column of the files.

    >>> folder_of("orders"), folder_of("a/b")
    ('orders', 'a_b~c14cddc033f64b9d')
    """
    if _SIMPLE.fullmatch(queue):
        return queue
    plain = re.sub(r"[^A-Za-z0-9.-]+", "_", queue).strip("._")[:40]
    return f"{plain or 'queue'}~{hashlib.sha256(queue.encode()).hexdigest()[:16]}"


def _sync(path: Path) -> int:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
        return os.fstat(number).st_size
    finally:
        os.close(number)
