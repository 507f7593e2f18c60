"""The history of days: files of a lake are counted once, newest first, and an unreadable lake hides no counts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest

from millpond.control import exported_days as module
from millpond.control.exported_days import ExportedDays
from millpond.control.history import KINDS, SettledCounts
from millpond.errors import LakeError

TODAY = date(2026, 11, 19)


class Clock:
    def now(self) -> int:
        return int(datetime(TODAY.year, TODAY.month, TODAY.day, 9, tzinfo=UTC).timestamp()) * 1_000_000


class Files:
    """A lake with one file for each (days ago, queue, state, number)."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, str, str, int]] = {}
        self.read: list[str] = []
        self.broken = False

    def days(self, since: date) -> Mapping[str, date]:
        assert since == TODAY - timedelta(days=29)
        if self.broken:
            raise LakeError("away")
        return {name: TODAY - timedelta(days=file[0]) for name, file in self.files.items()}

    def count(self, file: str) -> Mapping[tuple[str, str], int]:
        self.read.append(file)
        _, queue, state, number = self.files[file]
        return {(queue, state): number}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(module, "SystemClock", Clock)
    kinds = {by: msgspec.structs.replace(kind, same_for=-1.0) for by, kind in KINDS.items()}
    monkeypatch.setattr(module, "KINDS", kinds)
    monkeypatch.setattr(module, "FREE", 1e9)
    return Files()


def in_task(work: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
    return asyncio.create_task(work, name=what)


async def counts(days: ExportedDays, *queues: str) -> SettledCounts:
    return await days.counts(lambda queue: not queues or queue in queues, within=60)


def last(found: SettledCounts, number: int) -> list[tuple[int, int]]:
    return [(bucket.completed, bucket.failed) for bucket in found.buckets[-number:]]


async def test_files_are_counted_once_and_newest_first(files: Files) -> None:
    days = ExportedDays(files, in_task)
    assert not days.is_known
    files.files = {"a": (2, "q", "COMPLETED", 5), "b": (0, "q", "FAILED", 1), "c": (0, "other", "COMPLETED", 7)}
    found = await counts(days)
    assert (found.by, len(found.buckets), found.complete) == ("day", 30, True)
    assert last(found, 3) == [(5, 0), (0, 0), (7, 1)] and files.read == ["b", "c", "a"]
    assert last(await counts(days, "q"), 3) == [(5, 0), (0, 0), (0, 1)]
    del files.files["a"]  # a compaction replaced it
    files.files["d"] = (2, "q", "COMPLETED", 6)
    assert last(await counts(days), 3) == [(6, 0), (0, 0), (7, 1)]
    assert files.read == ["b", "c", "a", "d"]


async def test_an_unreadable_lake_keeps_what_was_counted(files: Files) -> None:
    days = ExportedDays(files, in_task)
    files.files = {"a": (1, "q", "COMPLETED", 5)}
    await counts(days)
    files.broken = True
    found = await counts(days)
    assert (last(found, 2), found.complete, found.unreadable) == ([(5, 0), (0, 0)], False, True)
    files.broken = False
    found = await counts(days)
    assert (last(found, 2), found.complete, found.unreadable) == ([(5, 0), (0, 0)], True, False)


async def test_days_with_uncounted_files_are_lower_bounds(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREE", -1.0)
    monkeypatch.setattr(module, "SHARE", 10**12)  # a pause for ever after each file
    days = ExportedDays(files, in_task)
    files.files = {"a": (0, "q", "COMPLETED", 5), "b": (1, "q", "COMPLETED", 3)}
    found = await days.counts(lambda queue: True, within=0)
    assert (found.buckets, found.complete) == ((), False)
    while "a" not in files.read or not found.buckets or not found.buckets[-1].completed:
        await asyncio.sleep(0)
        found = await days.counts(lambda queue: True, within=0)
    assert last(found, 2) == [(0, 0), (5, 0)] and not found.complete
    assert [bucket.at_least for bucket in found.buckets[-2:]] == [True, False]
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "history of the lake"]
    task.cancel()


async def test_no_pause_follows_the_last_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREE", -1.0)
    monkeypatch.setattr(module, "SHARE", 10**12)
    days = ExportedDays(files, in_task)
    files.files = {"a": (0, "q", "COMPLETED", 5)}
    found = await counts(days)
    assert last(found, 1) == [(5, 0)] and found.complete
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "history of the lake" and not task.done()]
