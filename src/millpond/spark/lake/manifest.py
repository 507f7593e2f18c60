"""Which files make up a lake: a log of entries, each appended by creating a file that must not exist yet.

    lake/_millpond/lake.json                       the lake's id
    lake/_millpond/log/000000000007.json           entry 7
    lake/_millpond/log/000000000032.checkpoint     all entries up to 32 in one
    lake/orders/2026-11-16/….parquet               files; one that no entry names does not exist

An entry is all there is to a commit: the files that it adds and removes, and how far the archive of each shard has
been exported with them. Two writers can never both append entry 7: the second finds it there, and is fenced. A writer
begins with an entry of its own that draws the next epoch, so that whatever an earlier one has under way cannot be
committed any more; the files' names carry the epoch of who wrote them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from millpond.clock import SystemClock
from millpond.errors import InvalidOption, LakeDamaged, LakeFenced, NoLake

FOLDER = "_millpond"
FORMAT = 1
CHECKPOINT_EVERY = 32


class File(msgspec.Struct, frozen=True):
    """One Parquet file: messages of one queue and one day."""

    path: str
    """Within the lake."""
    rows: int
    size: int
    queue: str
    day: str
    """In UTC, of archiving: 2026-11-16."""
    shard: int
    first_us: int
    last_us: int
    """Between which moments its messages were archived."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    number: int
    epoch: int
    at_us: int
    what: str
    """`open`, `export` or `compact`."""
    added: Sequence[File] = ()
    removed: Sequence[str] = ()
    """Replaced by those that were added; still on the disk."""
    forgotten: Sequence[str] = ()
    """Removed earlier, and now deleted."""
    until: Mapping[int, int] = {}
    """Of each shard that was exported: everything archived before this moment of its clock is in the lake."""
    body: Mapping[str, str] = {}
    """Columns of decoded bodies that are new, with their types."""


class State(msgspec.Struct):
    """What all entries together say."""

    number: int = 0
    epoch: int = 0
    files: dict[str, File] = {}
    until: dict[int, int] = {}
    body: dict[str, str] = {}
    removed: dict[str, int] = {}
    """Files that were replaced, and when: readers that began before may still need them."""

    def apply(self, entry: Entry) -> None:
        self.number = entry.number
        self.epoch = entry.epoch
        for path in entry.removed:
            self.files.pop(path, None)
            self.removed[path] = entry.at_us
        for path in entry.forgotten:
            self.removed.pop(path, None)
        self.files.update({file.path: file for file in entry.added})
        self.until.update(entry.until)
        self.body.update(entry.body)


class _Identity(msgspec.Struct):
    format: int
    id: str


class Lake:
    """A lake in a folder: a look at it, and, once opened, the right to append."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = folder(path)
        self._log = self.root / FOLDER / "log"
        self.id = self._identity()
        self.state = self._load()
        self.swept = False
        """Files that earlier writers left uncommitted were looked for."""
        self._epoch = 0

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Lake:
        """The lake in this folder, made if there is none."""
        root = folder(path)
        (root / FOLDER / "log").mkdir(parents=True, exist_ok=True)
        identity = msgspec.json.encode(_Identity(FORMAT, str(uuid4())))
        create_once(root / FOLDER / "lake.json", identity)  # somebody else's is as good
        return cls(root)

    def refresh(self) -> None:
        self.state = self._load()

    # --- write --------------------------------------------------------------------------------------

    def open(self) -> int:
        """Become the one who appends: from now on whoever wrote before is fenced. Returns the epoch."""
        while True:
            try:
                self._append("open", self.state.epoch + 1)
            except LakeFenced:  # another one opened it at the same time; the last one stays
                self.refresh()
                continue
            self._epoch = self.state.epoch
            return self._epoch

    def commit(
        self,
        what: str,
        *,
        added: Sequence[File] = (),
        removed: Sequence[str] = (),
        forgotten: Sequence[str] = (),
        until: Mapping[int, int] | None = None,
        body: Mapping[str, str] | None = None,
    ) -> Entry:
        """Append what was done. All of it is in the lake then, or nothing."""
        if not self._epoch or self.state.epoch != self._epoch:
            raise self._fenced()
        facts = {"added": added, "removed": removed, "forgotten": forgotten, "until": until or {}, "body": body or {}}
        return self._append(what, self._epoch, **facts)

    def _append(self, what: str, epoch: int, **facts: Any) -> Entry:
        entry = Entry(self.state.number + 1, epoch, SystemClock().now(), what, **facts)
        path = self._log / f"{entry.number:012}.json"
        if not create_once(path, msgspec.json.encode(entry)):
            raise self._fenced()
        if any(int(name.partition(".")[0]) >= entry.number for name in self._checkpoints()):
            path.unlink()  # there was one of this number, long ago, and it was trimmed
            raise self._fenced()
        self.state.apply(entry)
        if entry.number % CHECKPOINT_EVERY == 0:
            replace(self._log / f"{entry.number:012}.checkpoint", msgspec.json.encode(self.state))
        return entry

    def trim(self) -> None:
        """Delete entries that the last checkpoint but one has in it: a reader may have begun with that."""
        checkpoints = self._checkpoints()
        if len(checkpoints) > 1:
            for name in os.listdir(self._log):
                if not name.startswith(".") and name < checkpoints[-2]:
                    os.unlink(self._log / name)

    def _fenced(self) -> LakeFenced:
        return LakeFenced(
            f"another export or compaction of the lake {self.root} has begun since this one: this one has committed "
            "nothing, and the other goes on from where the last one ended. Run one at a time"
        )

    # --- look ---------------------------------------------------------------------------------------

    def _identity(self) -> str:
        try:
            identity = msgspec.json.decode((self.root / FOLDER / "lake.json").read_bytes(), type=_Identity)
        except FileNotFoundError:
            raise NoLake(
                f"there is no lake in {self.root}; make one with: millpond lake export --lake {self.root}"
            ) from None
        if identity.format != FORMAT:
            raise LakeDamaged(
                f"the lake {self.root} is of format {identity.format}, and this Millpond knows {FORMAT}; upgrade it"
            )
        return identity.id

    def _checkpoints(self) -> list[str]:
        return sorted(name for name in os.listdir(self._log) if name.endswith(".checkpoint"))

    def _load(self) -> State:
        state = State()
        for checkpoint in self._checkpoints()[-1:]:
            state = msgspec.json.decode((self._log / checkpoint).read_bytes(), type=State)
        for name in sorted(os.listdir(self._log)):
            number, _, kind = name.partition(".")
            if not number or kind != "json" or int(number) <= state.number:
                continue
            if int(number) != state.number + 1:
                raise LakeDamaged(
                    f"entry {state.number + 1} of the lake {self.root} is missing, and {name} is there: restore the "
                    f"folder {self._log}"
                )
            state.apply(msgspec.json.decode((self._log / name).read_bytes(), type=Entry))
        return state


def folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a lake: one that every executor sees under the same name."""
    text = os.fspath(path)
    text = text.removeprefix("file://") if text.startswith("file:///") else text
    if "://" in text or not text:
        raise InvalidOption(f"a lake is a folder, such as /data/lake, that every machine of Spark sees; not {text!r}")
    return Path(text).absolute()


def create_once(path: Path, content: bytes) -> bool:
    """Make a file with this content, whole and on the disk, unless there is one; says whether it did."""
    written = _write_beside(path, content)
    try:
        os.link(written, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(written)
    sync_folder(path.parent)
    return True


def replace(path: Path, content: bytes) -> None:
    os.replace(_write_beside(path, content), path)
    sync_folder(path.parent)


def _write_beside(path: Path, content: bytes) -> Path:
    written = path.parent / f".{path.name}.{uuid4().hex}"
    with open(written, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return written


def sync_folder(path: Path) -> None:
    """What was created in a folder survives a crash of the machine only when the folder itself is on the disk."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
