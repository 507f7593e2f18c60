"""Faults that slow a queue in SQLite: a version that may corrupt files, and a log that is never folded back."""

from __future__ import annotations

import sqlite3

from millpond.seam.diagnosis import Finding
from millpond.transports.database.sql.statement import Steps


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """SQLite 3.7.0 to 3.51.2 may corrupt a WAL file when two connections write and checkpoint at once."""
    if version >= (3, 53) or (3, 51, 3) <= version < (3, 52):
        return False
    return not ((3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45))


def examine() -> Steps[list[Finding]]:
    yield from ()
    if not has_wal_reset_bug(sqlite3.sqlite_version_info):
        return []
    return [
        Finding(
            kind="old-sqlite",
            severity="warning",
            text=f"SQLite {sqlite3.sqlite_version} has the WAL-reset bug: several processes that write one file at "
            "once may, rarely, corrupt it",
            remedy="use one process at a time, or a Python built with SQLite 3.51.3 or later",
        )
    ]
