"""Migrated SQLite files to copy, because a migration takes longer than most tests."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import millpond
from millpond import transports

SHARDS = ("a", "b", "c")


def migrated(path: Path) -> str:
    """The URL of a new file with all tables and no messages."""
    shutil.copyfile(_single(), path)
    return f"sqlite:///{path}"


def shards(folder: Path, prefix: str = "") -> list[str]:
    """The URLs of three new files that form one pond."""
    return [f"sqlite:///{shutil.copyfile(file, folder / (prefix + file.name))}" for file in _shards()]


@functools.cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="millpond-templates-")
    _kept.append(made)
    return Path(made.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []
"""They are deleted at the end of the process."""


@functools.cache
def _single() -> Path:
    path = _folder() / "pond.db"

    async def make() -> None:
        await (await millpond.connect(f"sqlite:///{path}", migrate=True)).close()

    _run(make)
    return path


@functools.cache
def _shards() -> Sequence[Path]:
    paths = [_folder() / f"{name}.db" for name in SHARDS]

    async def make() -> None:
        await transports.init_shards([f"sqlite:///{path}" for path in paths], names=SHARDS, migrate=True)

    _run(make)
    return paths


def _run(make: Any) -> None:
    """In a thread, because the caller may be in an event loop."""
    thread = threading.Thread(target=lambda: asyncio.run(make()))
    thread.start()
    thread.join()
