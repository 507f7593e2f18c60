"""Where a lake is: a folder that all machines of Spark see, or a URL of an object store.

Options of an object store are those of `deltalake`, such as AWS_ENDPOINT_URL; they may hold secrets. Without them its
own environment variables count, on the driver and on executors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from millpond.errors import InvalidOption, LakeDamaged

LOG = "_delta_log"
PRIVATE = 0o700
_SCHEMES = ("s3", "s3a", "gs", "abfss", "abfs", "az")
# Spark takes the others for a pattern, and `deltalake` decodes %20.
_NOT_IN_PATHS = set("*?[]{}\\%")


class Storage(Protocol):
    """Files of a lake, by paths relative to its root. Its repr shows no secret."""

    @property
    def root(self) -> str:
        """The folder or URL."""

    @property
    def is_folder(self) -> bool:
        """False for an object store, which is the same for all machines."""

    @property
    def options(self) -> Mapping[str, str] | None: ...

    def prepare(self) -> None:
        """Make the place of a new lake."""

    def begin(self, path: str) -> Any:
        """Begin a file; returns the destination for a Parquet writer."""

    def end(self, path: str, sink: Any) -> int:
        """Make a written file durable; returns its size."""

    def discard(self, path: str, sink: Any) -> None:
        """Remove a file whose writer failed."""

    def source(self, path: str) -> Any:
        """A source for a Parquet reader."""

    def has(self, path: str, size: int) -> bool:
        """Whether this process sees the file of another one."""

    def delete(self, path: str) -> None: ...

    def uri(self, path: str) -> str:
        """The file as Spark names it."""

    def sync_log(self, names: Iterable[str]) -> None:
        """Make files of the log durable, except those that a checkpoint has replaced."""


def storage_of(path: str | os.PathLike[str], options: Mapping[str, str] | None = None) -> Storage:
    """The storage of a lake at a folder or URL."""
    text = os.fspath(path)
    text = text.removeprefix("file://") if text.startswith("file:///") else text
    if not text or _NOT_IN_PATHS & set(text):
        raise InvalidOption(f"a lake's path is not empty and has none of the characters *?[]{{}}\\%, not {text!r}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Folder(str(Path(text).absolute()))
    if "#" in rest:  # `deltalake` would cut the URL there, and write to another place
        raise InvalidOption(f"the URL of a lake has no #, not {text!r}")
    if scheme not in _SCHEMES or not rest.strip("/"):
        raise InvalidOption(
            f"a lake is a folder, such as /data/lake, that every machine of Spark sees, or a URL that begins with "
            f"{', '.join(f'{name}://' for name in _SCHEMES)}; not {text!r}"
        )
    return ObjectStore(text.rstrip("/"), options)


@dataclass(frozen=True)
class Folder:
    """A lake in a folder. New folders and files get the mode of the log's folder, which is private at first."""

    root: str
    options: Mapping[str, str] | None = None

    is_folder = True

    def prepare(self) -> None:
        os.makedirs(os.path.dirname(self.root), exist_ok=True)
        for place in (self.root, self._path(LOG)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(place, PRIVATE)

    def begin(self, path: str) -> str:
        file, mode = self._path(path), self._mode()
        folder = os.path.dirname(file)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, PRIVATE)
            # Kept: with the set-group-ID bit new files belong to the group of the lake's folder.
            os.chmod(folder, mode | os.stat(folder).st_mode & stat.S_ISGID)
            sync(self.root)
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & 0o666 & PRIVATE)
        os.fchmod(number, mode & 0o666)
        os.close(number)
        return file

    def link(self, path: str, new: str) -> None:
        """Give a file a second name, by a copy where the file system has no links."""
        file, target = self._path(path), self._path(new)
        if os.path.exists(target):
            return
        written = self.begin(f"{new}.{uuid4().hex}")
        os.unlink(written)
        try:
            os.link(file, written)
        except OSError:
            shutil.copyfile(file, written)
            sync(written)
        os.replace(written, target)
        sync(os.path.dirname(target))

    def end(self, path: str, sink: Any) -> int:
        file = self._path(path)
        size = sync(file)
        sync(os.path.dirname(file))
        return size

    def discard(self, path: str, sink: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(path))

    def source(self, path: str) -> str:
        return self._path(path)

    def has(self, path: str, size: int) -> bool:
        try:
            return os.stat(self._path(path)).st_size == size
        except FileNotFoundError:
            return False

    def delete(self, path: str) -> None:
        # A folder that is a link leads out of the lake, and its files stay.
        file = Path(self._path(path))
        if file.parent.resolve().is_relative_to(Path(self.root).resolve()):
            file.unlink(missing_ok=True)

    def uri(self, path: str) -> str:
        return f"file://{self._path(path)}"

    def sync_log(self, names: Iterable[str]) -> None:
        # `deltalake` does not sync its files, and creates them with the umask of the process.
        mode = self._mode() & 0o666
        for name in names:
            file = self._path(f"{LOG}/{name}")
            with contextlib.suppress(PermissionError, FileNotFoundError):  # of another user; replaced
                os.chmod(file, mode)
            with contextlib.suppress(FileNotFoundError):
                sync(file)
        sync(self._path(LOG))

    def _mode(self) -> int:
        return stat.S_IMODE(os.stat(self._path(LOG)).st_mode) & 0o777

    def _path(self, path: str) -> str:
        return os.path.join(self.root, *check_path(path).split("/"))


@dataclass(frozen=True)
class ObjectStore:
    """A lake in an object store."""

    root: str
    options: Mapping[str, str] | None = field(default=None, repr=False)

    is_folder = False

    def prepare(self) -> None:
        """A bucket needs no folders."""

    def begin(self, path: str) -> Any:
        return self._files().open_output_stream(check_path(path))

    def end(self, path: str, sink: Any) -> int:
        sink.close()
        return int(self._files().get_file_info([path])[0].size)

    def discard(self, path: str, sink: Any) -> None:
        """An upload that is not completed makes no file."""

    def source(self, path: str) -> Any:
        return self._files().open_input_file(check_path(path))

    def has(self, path: str, size: int) -> bool:
        return True  # all machines see the same store, or none of them could write

    def delete(self, path: str) -> None:
        self._files().delete_file(check_path(path))

    def uri(self, path: str) -> str:
        # Hadoop's name of S3.
        return f"{self.root}/{check_path(path)}".replace("s3://", "s3a://", 1)

    def sync_log(self, names: Iterable[str]) -> None:
        """A written object is durable."""

    def _files(self) -> Any:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        return PyFileSystem(DeltaStorageHandler(self.root, dict(self.options or {})))


def check_path(path: str) -> str:
    """The path, if it is inside of the lake. Another program may have written the log."""
    parts = path.split("/")
    if not path or ".." in parts or "" in parts or "\0" in path or "://" in path:
        raise LakeDamaged(
            f"the log of the lake names the file {path!r}, which is outside of the lake: restore the log, and check "
            "who may write it"
        )
    return path


def sync(path: str | os.PathLike[str]) -> int:
    """Write a file or folder to disk; returns its size. A new file survives a crash only if its folder is synced."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
        return os.fstat(number).st_size
    finally:
        os.close(number)
