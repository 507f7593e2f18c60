"""The disk of a lake is full: nothing is committed or purged, and the next export takes everything."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import LakeError
from millpond.spark.lake.compact import compact
from millpond.spark.lake.files import File
from millpond.spark.lake.read import files
from millpond.spark.lake.table import Lake
from tests.faults.disk import mounted
from tests.spark.lake.here import Here, export, exporter
from tests.spark.lake.readers import READERS, by_duckdb
from tests.spark.lake.test_export import archived, settle

pytestmark = [pytest.mark.usefixtures("soon"), pytest.mark.slow_on_servers]


def test_a_compaction_without_room_changes_nothing(sqlite_url: str) -> None:
    with mounted() as disk:
        path: Path = disk.folder / "lake"
        one = exporter(path, sqlite_url)
        for _ in range(3):
            asyncio.run(settle(sqlite_url, "orders", [{"text": os.urandom(500).hex()} for _ in range(100)]))
            one.export()
        one.close()
        before, files_before = by_duckdb(path), files(path)
        disk.fill()
        with pytest.raises((LakeError, OSError)):
            compact(Here(), path, keep=timedelta(0))  # type: ignore[arg-type]
        assert by_duckdb(path) == before and files(path) == files_before
        disk.free()
        assert compact(Here(), path, keep=timedelta(0)).replaced >= 3  # type: ignore[arg-type]
        assert by_duckdb(path) == before


@pytest.mark.parametrize("step", ["export", "replace"])
def test_the_disk_is_full_when_the_files_are_written_and_the_entry_of_the_log_is_not(
    sqlite_url: str, step: str
) -> None:
    real = getattr(Lake, step)

    def full(lake: Lake, *args: Any) -> None:
        assert all(lake.storage.has(file.path, file.size) for arg in args for file in arg if isinstance(file, File))
        disk.fill()
        real(lake, *args)

    with mounted() as disk:
        path: Path = disk.folder / "lake"
        one = exporter(path, sqlite_url)
        for n in range(2):
            asyncio.run(settle(sqlite_url, "orders", [{"n": n}] * 10))
            one.export()
        before, log = by_duckdb(path), sorted(os.listdir(path / "_delta_log"))
        asyncio.run(settle(sqlite_url, "orders", [{"n": n} for n in range(10)]))
        change = one.export if step == "export" else lambda: compact(Here(), path, keep=None)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Lake, step, full)
            with pytest.raises((LakeError, OSError)):
                change()
        for read in READERS:
            assert read(path) == before, read.__name__
        assert [name for name in sorted(os.listdir(path / "_delta_log")) if name.endswith(".json")] == log
        assert one.purge(older_than=0) == 20 and len(archived(sqlite_url)) == 10
        disk.free()
        change()
        one.export()
        assert by_duckdb(path) == sorted([*before, *archived(sqlite_url)])
        assert one.purge(older_than=0) == 10
        one.close()


def test_an_export_without_room_changes_nothing(url: str) -> None:
    with mounted() as disk:
        path: Path = disk.folder / "lake"
        asyncio.run(settle(url, "orders", [{"n": n} for n in range(10)]))
        assert export(path, url).rows == 10
        before = by_duckdb(path)
        # Random text: compressed it still needs more than the last block of the disk.
        asyncio.run(settle(url, "orders", [{"text": os.urandom(500).hex()} for _ in range(300)]))
        disk.fill()
        one = exporter(path, url)
        for _ in range(2):
            with pytest.raises((LakeError, OSError)):
                one.export()
            assert by_duckdb(path) == before
        assert one.purge(older_than=0) == 10, "the lake holds only these"
        assert len(archived(url)) == 300
        disk.free()
        assert one.export().rows == 300
        one.close()
        assert by_duckdb(path) == sorted([*before, *archived(url)])
