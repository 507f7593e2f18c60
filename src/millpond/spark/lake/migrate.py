"""`millpond lake migrate`: makes a Delta table of a lake of an earlier version, without copying its messages.

    1. fence exports of the earlier version
    2. link its files into folders by day
    3. make the table, and commit all files with the progress of each shard
    4. put the old log aside; until then every reader and export refuses the lake

It can be killed at any point and run again. Fields of decoded bodies whose names only differ in case, or that many
readers refuse, are left out; files that have them are written anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from millpond.errors import InvalidOption, LakeDamaged
from millpond.spark.lake.body import Decoder, usable_fields
from millpond.spark.lake.compact import merge
from millpond.spark.lake.files import Bounds, File, Progress
from millpond.spark.lake.old_format import OldFile, OldLake, fence, identity
from millpond.spark.lake.storage import Folder, storage_of, sync
from millpond.spark.lake.table import OLD_LOG, Lake
from millpond.spark.lake.writers import file_schema


class Migrated(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a migration."""

    files: int
    rewritten: int
    """Number of files that were written anew because of their fields."""
    fields: tuple[str, ...]
    """Decoded fields that were left out."""

    def summary(self) -> str:
        text = f"{self.files:,} files are a Delta table now, {self.rewritten:,} of them written anew"
        return f"{text}; fields left out: {', '.join(map(repr, self.fields))}" if self.fields else text


def migrate(path: str | os.PathLike[str]) -> Migrated:
    storage = storage_of(path)
    if not isinstance(storage, Folder):
        raise InvalidOption("only a folder can hold a lake of an earlier version")
    root = Path(storage.root)
    id_ = identity(root)
    old = fence(root)
    body = usable_fields(old.body)
    dropped = tuple(name for name in old.body if name not in body)
    lake = _table(storage, id_, body)
    files, rewritten = _files(storage, old, body, bool(dropped))
    if not _is_committed(lake, old):
        lake.export(files, _progress(old))
    os.rename(root / OLD_LOG, root / f"{OLD_LOG}.migrated")
    sync(root)
    return Migrated(files=len(files), rewritten=rewritten, fields=dropped)


def _table(storage: Folder, id_: str, body: Mapping[str, str]) -> Lake:
    """The table, empty or with all files."""
    lake = Lake.create(storage, file_schema(None), id_=id_, migrating=True)
    if lake.id != id_:
        raise LakeDamaged(f"the folder {storage.root} has another Delta table, {lake.id}")
    if body and not lake.body:
        lake.add_fields(body)
    return lake


def _is_committed(lake: Lake, old: OldLake) -> bool:
    """A migration that was killed may have committed the files; a lake without progress has none."""
    return not old.until or any(lake.until(shard) is not None for shard in old.until)


def _progress(old: OldLake) -> dict[int, Progress]:
    rows = {shard: sum(file.rows for file in old.files.values() if file.shard == shard) for shard in old.until}
    return {shard: Progress(None, until, rows[shard]) for shard, until in old.until.items()}


def _files(storage: Folder, old: OldLake, body: Mapping[str, str], drop: bool) -> tuple[list[File], int]:
    """The files of the table, and how many of the old ones were written anew."""
    decoder = Decoder(body) if body else None
    found: list[File] = []
    rewritten = 0
    for file in old.files.values():
        if not storage.has(file.path, file.size):
            raise LakeDamaged(f"the file {file.path} of the lake {storage.root} is missing or has another size")
        if drop and _has_other_fields(storage, file, body):
            found += merge([(file.path, file.day, file.size)], storage, decoder).files
            rewritten += 1
        else:
            # Polars refuses a table with some files in folders of days and others elsewhere.
            path = f"day={file.day}/{sha256(file.path.encode()).hexdigest()[:32]}.parquet"
            storage.link(file.path, path)
            least = Bounds(file.queue, "COMPLETED", file.first_us, file.shard)
            greatest = Bounds(file.queue, "FAILED", file.last_us, file.shard)
            found.append(File(path, file.day, file.rows, file.size, least, greatest))
    return found, rewritten


def _has_other_fields(storage: Folder, file: OldFile, body: Mapping[str, str]) -> bool:
    import pyarrow.parquet as pq

    schema = pq.read_schema(storage.source(file.path))
    at = schema.get_field_index("body")
    return at >= 0 and any(field.name not in body for field in schema.field(at).type)
