"""A database whose disk is full, and has room again.

SQLite and PostgreSQL have their tables on a file system of a few megabytes in memory, which only root may mount.
MariaDB ends itself when a file of InnoDB cannot grow: there triggers raise the error of a full disk (1021).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from servers import MariaDB, Postgres

_MEGABYTES = 64
_FULL = "SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 1021, MESSAGE_TEXT = 'the disk is full'"


class SmallDisk:
    """Where the tables of one database are."""

    url: str

    def fill(self) -> None:
        """Leave no room."""
        raise NotImplementedError

    def free(self) -> None:
        raise NotImplementedError


class MountedDisk(SmallDisk):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        file = os.open(self._filler, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file, b"x" * size)
        finally:
            os.close(file)

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


class DiskOfTriggers(SmallDisk):
    """Every insert of a message, live or archived, fails."""

    def __init__(self, server: MariaDB, database: str) -> None:
        self.url = server.create_database(database)
        self._server, self._database = server, database

    def fill(self) -> None:
        for table in ("millpond_message", "millpond_archive"):
            self._execute(f"CREATE TRIGGER full_{table} BEFORE INSERT ON {table} FOR EACH ROW {_FULL}")

    def free(self) -> None:
        for table in ("millpond_message", "millpond_archive"):
            self._execute(f"DROP TRIGGER full_{table}")

    def _execute(self, text: str) -> None:
        with self._server.connect(self._database) as connection, connection.cursor() as cursor:
            cursor.execute(text)


@contextlib.contextmanager
def small_disk(name: str, server: Postgres | MariaDB | None) -> Iterator[SmallDisk]:
    """A new database of this name on a small disk."""
    if isinstance(server, MariaDB):
        yield DiskOfTriggers(server, name)
        server.drop_database(name)
        return
    with mounted() as disk:
        if server is None:
            disk.url = f"sqlite:///{disk.folder / 'pond.db'}"
            yield disk
            return
        place = disk.folder / name
        place.mkdir()
        shutil.chown(place, server.account, server.account)
        with server.connect() as connection:
            connection.execute(f"CREATE TABLESPACE {name} LOCATION '{place}'")  # type: ignore[arg-type]
            connection.execute(f"CREATE DATABASE {name} TABLESPACE {name}")  # type: ignore[arg-type]
            disk.url = server.url_of(name)
            try:
                yield disk
            finally:
                disk.free()
                server.drop_database(name)
                connection.execute(f"DROP TABLESPACE {name}")  # type: ignore[arg-type]


@contextlib.contextmanager
def mounted() -> Iterator[MountedDisk]:
    folder = Path(tempfile.mkdtemp(prefix="millpond-disk-"))
    folder.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_MEGABYTES}m,mode=755", "tmpfs", str(folder)], check=True)
    try:
        yield MountedDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
