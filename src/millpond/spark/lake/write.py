"""What a task of an export does: fetch its slice of the archive, and write it as Parquet files by queue and day.

The files are on the disk when the task ends, and belong to the lake when the driver has committed them. A task that
runs twice writes other files; those of the run that nobody names are orphans, and no reader ever looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.errors import StoreError
from millpond.spark.lake.manifest import File
from millpond.spark.lake.parquet import Writers

if TYPE_CHECKING:
    from millpond.spark.lake.body import Decoder
    from millpond.spark.options import Shard
    from millpond.transports.database.fetch import Slice


@dataclass(frozen=True, repr=False)
class Work:
    """A task's part of an export. Its text shows no password."""

    root: str
    epoch: int
    shard: Shard
    slice: Slice


def export_slice(work: Work, decoder: Decoder | None) -> list[File]:
    """In a task."""
    from millpond.spark.kept import kept_fetcher
    from millpond.spark.schema import batch_columns

    columns = batch_columns("archive", work.shard.number)
    out = Writers(Path(work.root), work.epoch, work.shard.number, decoder)
    with kept_fetcher(work.shard) as fetcher, out:
        for piece in work.slice:
            for batch in fetcher.read(piece, columns):
                out.add(batch)
            if piece.unmoved is not None and fetcher.rows(piece.unmoved, {})[0][0]:
                raise StoreError(
                    f"a partition of the archive at {work.shard.url} was rewritten (VACUUM FULL, CLUSTER) or emptied "
                    "while it was exported: export again; nothing of this export is in the lake"
                )
    return out.files
