"""Lakes of earlier versions: our own log, which only `migrate` reads.

    lake/_millpond/lake.json                       the lake's id
    lake/_millpond/log/000000000007.json           entry 7
    lake/_millpond/log/000000000032.checkpoint     all entries up to 32 in one
    lake/orders/2026-11-16/….parquet               files of one queue and day

A writer begins with an entry that draws the next epoch. From then on an earlier writer cannot commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from millpond.clock import SystemClock
from millpond.errors import LakeDamaged, NoLake
from millpond.spark.lake.storage import sync
from millpond.spark.lake.table import OLD_LOG

FORMAT = 1
_PATH = re.compile(r"[^/\x00]+/[^/\x00]+/[^/\x00]+\.parquet")
"""Files of a lake: folder of the queue, day, name."""


class OldFile(msgspec.Struct, frozen=True):
    """One Parquet file: messages of one queue and one day."""

    path: str
    rows: int
    size: int
    queue: str
    day: str
    shard: int
    first_us: int
    last_us: int


class _Entry(msgspec.Struct, frozen=True):
    number: int
    epoch: int
    added: Sequence[OldFile] = ()
    removed: Sequence[str] = ()
    until: Mapping[int, int] = {}
    body: Mapping[str, str] = {}


class OldLake(msgspec.Struct):
    """The state of a lake after all entries."""

    number: int = 0
    epoch: int = 0
    files: dict[str, OldFile] = {}
    until: dict[int, int] = {}
    body: dict[str, str] = {}

    def apply(self, entry: _Entry) -> None:
        self.number, self.epoch = entry.number, entry.epoch
        for path in entry.removed:
            self.files.pop(path, None)
        self.files.update({file.path: file for file in entry.added})
        self.until.update(entry.until)
        self.body.update(entry.body)


class _Identity(msgspec.Struct):
    format: int
    id: str


def identity(root: Path) -> str:
    try:
        found = msgspec.json.decode((root / OLD_LOG / "lake.json").read_bytes(), type=_Identity)
    except FileNotFoundError:
        raise NoLake(f"there is no lake of an earlier version in {root}") from None
    if found.format != FORMAT:
        raise LakeDamaged(f"the lake {root} has format {found.format}, and this Millpond converts {FORMAT}")
    return found.id


def load(root: Path) -> OldLake:
    log = root / OLD_LOG / "log"
    state = OldLake()
    names = sorted(os.listdir(log))
    for checkpoint in [name for name in names if name.endswith(".checkpoint")][-1:]:
        state = msgspec.json.decode((log / checkpoint).read_bytes(), type=OldLake)
        _check_paths(root, checkpoint, [*state.files, *(file.path for file in state.files.values())])
    for name in names:
        number, _, kind = name.partition(".")
        if not number or kind != "json" or int(number) <= state.number:
            continue
        if int(number) != state.number + 1:
            raise LakeDamaged(
                f"entry {state.number + 1} of the lake {root} is missing, and {name} is there: restore {log}"
            )
        entry = msgspec.json.decode((log / name).read_bytes(), type=_Entry)
        _check_paths(root, name, [file.path for file in entry.added])
        state.apply(entry)
    return state


def fence(root: Path) -> OldLake:
    """Append an entry with the next epoch: no export of an earlier version can commit any more."""
    while True:
        state = load(root)
        facts: dict[str, Any] = {"number": state.number + 1, "epoch": state.epoch + 1, "at_us": SystemClock().now()}
        entry = root / OLD_LOG / "log" / f"{state.number + 1:012}.json"
        if _create_once(entry, msgspec.json.encode({**facts, "what": "open"})):
            return load(root)


def _create_once(path: Path, content: bytes) -> bool:
    """Create a complete file on disk unless it exists; returns whether it was created."""
    written = path.parent / f".{path.name}.{uuid4().hex}"
    with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(written, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(written)
    sync(path.parent)
    return True


def _check_paths(root: Path, name: str, paths: Iterable[str]) -> None:
    """Refuse a path that leaves the lake: a writer of the log could make us read files of other users."""
    for path in paths:
        if not _PATH.fullmatch(path) or ".." in path.split("/") or path.startswith(OLD_LOG):
            raise LakeDamaged(f"{name} in the log of the lake {root} names the file {path!r}, outside of the lake")
