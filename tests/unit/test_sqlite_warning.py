"""The warning about SQLite's WAL-reset bug: once for each file, when it gets its tables."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest

import millpond
from millpond.transports.database.sqlite.engine import has_wal_reset_bug


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ((3, 40, 1), True),
        ((3, 44, 6), False),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), True),
        ((3, 53, 0), False),
    ],
)
def test_versions_with_the_bug(version: tuple[int, ...], has: bool) -> None:
    assert has_wal_reset_bug(version) is has


@pytest.mark.parametrize("migrate", [None, True])
async def test_once_for_each_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, migrate: bool | None
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 40, 1))
    for name in ("one", "two"):
        for _ in range(3):
            store = await millpond.connect(f"sqlite:///{tmp_path}/{name}.db", migrate=migrate)
            await store.close()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "One process at a time is safe; several processes that write" in warnings[0].getMessage()
    assert all(f"{name}.db" in warning.getMessage() for name, warning in zip(("one", "two"), warnings, strict=True))


async def test_no_warning_without_the_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 53, 0))
    await (await millpond.connect(f"sqlite:///{tmp_path}/one.db")).close()
    assert caplog.records == []
