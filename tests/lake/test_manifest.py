"""The lake's log: entries that are created once, epochs that fence, checkpoints that say the same in one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millpond.errors import InvalidOption, LakeDamaged, LakeFenced, NoLake
from millpond.spark.lake.manifest import CHECKPOINT_EVERY, File, Lake
from millpond.spark.lake.read import files


def file(name: str) -> File:
    return File(f"q/2026-11-16/{name}.parquet", 1, 1, "q", "2026-11-16", 0, 0, 0)


def opened(path: Path) -> Lake:
    lake = Lake.create(path)
    lake.open()
    return lake


def test_what_was_committed_is_there_for_everybody(tmp_path: Path) -> None:
    lake = opened(tmp_path)
    lake.commit("export", added=[file("a"), file("b")], until={0: 7}, body={"sku": "bigint"})
    lake.commit("compact", added=[file("c")], removed=[file("a").path, file("b").path])
    found = Lake(tmp_path)
    assert found.id == lake.id
    assert found.state == lake.state
    assert files(tmp_path) == [str(tmp_path / file("c").path)]
    assert (found.state.until, found.state.body) == ({0: 7}, {"sku": "bigint"})
    assert list(found.state.removed) == [file("a").path, file("b").path]
    assert files(tmp_path, queue="other") == [] == files(tmp_path, day="2026-11-17")


def test_whoever_opens_it_fences_whoever_had_it(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.commit("export", added=[file("a")])
    second = opened(tmp_path)
    for _ in range(2):
        with pytest.raises(LakeFenced):
            first.commit("export", added=[file("b")])
    second.commit("export", added=[file("c")])
    assert second.state.epoch == 2
    assert [os.path.basename(path) for path in files(tmp_path)] == ["a.parquet", "c.parquet"]


def test_two_that_open_at_once_have_two_epochs(tmp_path: Path) -> None:
    Lake.create(tmp_path)
    first, second = Lake(tmp_path), Lake(tmp_path)
    assert (first.open(), second.open()) == (1, 2)
    with pytest.raises(LakeFenced):
        first.commit("export")
    with pytest.raises(LakeFenced):
        Lake(tmp_path).commit("export", added=[file("never opened")])


def test_checkpoints_say_what_the_entries_said(tmp_path: Path) -> None:
    lake = opened(tmp_path)
    for n in range(3 * CHECKPOINT_EVERY):
        lake.commit("export", added=[file(f"{n:04}")], until={0: n})
        if n % 10 == 9:
            lake.commit("compact", removed=[file(f"{n:04}").path])
    log = tmp_path / "_millpond" / "log"
    before = len(os.listdir(log))
    lake.trim()
    assert len(os.listdir(log)) < before / 2
    assert Lake(tmp_path).state == lake.state
    lake.commit("export", added=[file("last")])
    assert Lake(tmp_path).state == lake.state


def test_one_that_slept_through_many_entries_is_fenced_too(tmp_path: Path) -> None:
    """The entry that it would append was there, and is trimmed"""
    sleeper = opened(tmp_path)
    awake = opened(tmp_path)
    for n in range(3 * CHECKPOINT_EVERY):
        awake.commit("export", added=[file(f"{n:04}")])
    awake.trim()
    for _ in range(2):
        with pytest.raises(LakeFenced):
            sleeper.commit("export", added=[file("of the sleeper")])
    assert Lake(tmp_path).state == awake.state


def test_a_hole_in_the_log_is_told(tmp_path: Path) -> None:
    lake = opened(tmp_path)
    lake.commit("export", added=[file("a")])
    lake.commit("export", added=[file("b")])
    (tmp_path / "_millpond" / "log" / "000000000002.json").unlink()
    with pytest.raises(LakeDamaged, match="entry 2"):
        Lake(tmp_path)


def test_no_lake_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NoLake):
        files(tmp_path)
    for path in ("s3://bucket/lake", ""):
        with pytest.raises(InvalidOption, match="folder"):
            Lake.create(path)
    assert Lake.create(f"file://{tmp_path}").root == tmp_path
