"""The Delta log of a lake: commits, conflicts, statistics, fields, and paths that lead out of the lake."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

from millpond.errors import InvalidOption, LakeDamaged, LakeError, NoLake
from millpond.spark.lake.files import Bounds, File, Progress
from millpond.spark.lake.read import files
from millpond.spark.lake.storage import check_path, storage_of
from millpond.spark.lake.table import LONGEST, Chosen, Lake, LakeChanged
from millpond.spark.lake.writers import file_schema
from tests.spark.ponds import HOSTILE

DAY = "2026-11-16"
AT = int(datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()) * 1_000_000 + 123_456


def created(path: Path) -> Lake:
    return Lake.create(storage_of(path), file_schema(None))


def opened(path: Path) -> Lake:
    return Lake.open(storage_of(path))


def file(name: str, queue: str = "q", at: int = AT, day: str = DAY, size: int = 10) -> File:
    bounds = Bounds(queue, "COMPLETED", at, 0)
    return File(f"day={day}/{name}.parquet", day, 1, size, bounds, bounds)


def names(path: Path, **chosen: Any) -> list[str]:
    return [Path(one).stem for one in files(path, **chosen)]


def small(one: File) -> tuple[str, str, int]:
    return one.path, one.day, one.size


def test_a_commit_is_there_for_every_reader(tmp_path: Path) -> None:
    lake = created(tmp_path)
    lake.export([file("a"), file("b")], {0: Progress(None, 7, 2), 1: Progress(None, 9, 0)})
    found = opened(tmp_path)
    assert (found.id, found.version) == (lake.id, 1)
    assert [found.until(shard) for shard in (0, 1, 2)] == [7, 9, None]
    assert files(tmp_path) == [str(tmp_path / f"day={DAY}/{name}.parquet") for name in ("a", "b")]
    (commit,) = DeltaTable(tmp_path).history(1)
    assert commit["millpond.export"] == [
        {"shard": 0, "since": None, "until": 7, "rows": 2},
        {"shard": 1, "since": None, "until": 9, "rows": 0},
    ]


def test_of_two_exports_of_a_shard_one_is_committed(tmp_path: Path) -> None:
    created(tmp_path)
    first, second, stale = (opened(tmp_path) for _ in range(3))
    first.export([file("a")], {0: Progress(None, 7, 1)})
    for _ in range(2):
        with pytest.raises(LakeChanged):
            second.export([file("b")], {0: Progress(None, 9, 1)})
    # From the progress that the log has, after a read of the log.
    with pytest.raises(LakeChanged, match="not planned"):
        opened(tmp_path).export([file("b")], {0: Progress(None, 9, 1)})
    opened(tmp_path).export([file("c")], {0: Progress(7, 9, 1)})
    # A lower version than the log has; from a new handle deltalake would accept it.
    with pytest.raises(LakeChanged):
        stale.export([file("d")], {0: Progress(None, 5, 1)})
    assert names(tmp_path) == ["a", "c"] and opened(tmp_path).until(0) == 9


def test_exports_of_other_shards_do_not_disturb_each_other(tmp_path: Path) -> None:
    created(tmp_path)
    lakes = [opened(tmp_path) for _ in range(3)]
    for shard, lake in enumerate(lakes):
        lake.export([file(str(shard))], {shard: Progress(None, 7, 1)})
    assert names(tmp_path) == ["0", "1", "2"]


def test_a_compaction_beside_exports_and_other_compactions(tmp_path: Path) -> None:
    created(tmp_path).export([file("a"), file("b")], {0: Progress(None, 7, 2)})
    compacting, exporting = opened(tmp_path), opened(tmp_path)
    exporting.export([file("c")], {0: Progress(7, 8, 1)})
    with pytest.raises(LakeChanged):  # a commit came between reading the log and writing to it
        compacting.replace([small(file("a")), small(file("b"))], [file("ab")])
    exporting = opened(tmp_path)
    opened(tmp_path).replace([small(file("a")), small(file("b"))], [file("ab")])
    with pytest.raises(LakeChanged, match="replaced by another"):
        opened(tmp_path).replace([small(file("a")), small(file("c"))], [file("ac")])
    exporting.export([file("d")], {0: Progress(8, 9, 1)})
    assert names(tmp_path) == ["ab", "c", "d"] and opened(tmp_path).until(0) == 9


def test_a_reader_that_slept_through_the_cleaning_of_the_log(tmp_path: Path) -> None:
    created(tmp_path).export([file("a")], {0: Progress(None, 7, 1)})
    sleeper = opened(tmp_path)
    DeltaTable(tmp_path).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    for n in range(7, 10):
        opened(tmp_path).export([file(str(n))], {0: Progress(n, n + 1, 1)})
    DeltaTable(tmp_path).create_checkpoint()
    DeltaTable(tmp_path).cleanup_metadata()
    assert not (tmp_path / "_delta_log" / f"{3:020}.json").exists()
    with pytest.raises(LakeError):
        sleeper.export([file("late")], {0: Progress(7, 99, 1)})
    assert names(tmp_path) == ["7", "8", "9", "a"] and opened(tmp_path).until(0) == 10


def test_the_log_is_as_long_as_the_longest_export(tmp_path: Path) -> None:
    """It commits against the entries since it began, although others have committed and cleaned the log meanwhile."""
    created(tmp_path).export([file("a")], {0: Progress(None, 7, 1)})
    longest = opened(tmp_path)
    opened(tmp_path).export([file("b")], {1: Progress(None, 7, 1)})
    began = time.time() - LONGEST.total_seconds()
    for entry in (tmp_path / "_delta_log").iterdir():
        os.utime(entry, (began, began))
    opened(tmp_path).export([file("c")], {1: Progress(7, 8, 1)})
    DeltaTable(tmp_path).create_checkpoint()
    DeltaTable(tmp_path).cleanup_metadata()
    longest.export([file("late")], {0: Progress(7, 9, 1)})
    assert names(tmp_path) == ["a", "b", "c", "late"]


def test_the_log_stays_short(tmp_path: Path) -> None:
    """Checkpoints, and no entries older than the retention, after any number of commits."""
    lake = created(tmp_path)
    DeltaTable(tmp_path).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    lake = opened(tmp_path)
    for n in range(100):
        lake.export([file(str(n))], {0: Progress(n or None, n + 1, 1)})
    assert len(os.listdir(tmp_path / "_delta_log")) < 2 * 32
    assert len(names(tmp_path)) == 100
    assert DeltaTable(tmp_path).metadata().configuration.keys() >= {"delta.logRetentionDuration"}
    assert "delta.setTransactionRetentionDuration" not in DeltaTable(tmp_path).metadata().configuration


def test_a_query_chooses_its_files(tmp_path: Path) -> None:
    lake = created(tmp_path)
    other = AT + 86_400_000_000
    lake.export(
        [
            *(file(str(n), queue) for n, queue in enumerate(HOSTILE)),
            file("next day", "orders", other, "2026-11-17"),
        ],
        {0: Progress(None, 7, 6)},
    )
    for n, queue in enumerate(HOSTILE):
        assert names(tmp_path, queue=queue, day=DAY) == [str(n)], queue
    assert names(tmp_path, queue="orders") == ["0", "next day"]
    assert names(tmp_path, queue=["orders", HOSTILE[1]], day=date(2026, 11, 16)) == ["0", "1"]
    assert names(tmp_path, day="2026-11-17") == ["next day"] and names(tmp_path, queue="unknown") == []
    # To the microsecond: the log has milliseconds, and rounds the least down and the greatest up.
    exact = datetime(2026, 11, 16, 12, 0, 0, 123_456, tzinfo=UTC)
    micro = timedelta(microseconds=1)
    assert len(names(tmp_path, since=exact, until=exact + micro)) == len(HOSTILE)
    assert names(tmp_path, since=exact + timedelta(seconds=1)) == ["next day"]
    assert names(tmp_path, until=exact - timedelta(seconds=1)) == []
    assert Chosen().filters() is None


def test_fields_are_added(tmp_path: Path) -> None:
    lake, other = created(tmp_path), opened(tmp_path)
    lake.add_fields({"sku": "bigint", "note": "string"})
    assert lake.body == {"sku": "bigint", "note": "string"} == opened(tmp_path).body
    with pytest.raises(LakeChanged):  # it was planned with other columns
        other.export([file("a")], {0: Progress(None, 7, 1)})
    lake.export([file("a")], {0: Progress(None, 7, 1)})
    opened(tmp_path).add_fields({"price": "double", "paid": "boolean"})
    assert list(opened(tmp_path).body) == ["sku", "note", "price", "paid"]
    assert [field.name for field in DeltaTable(tmp_path).schema().fields][-3:] == ["day", "body", "unreadable"]


def test_of_two_that_add_fields_at_once_one_plans_anew(tmp_path: Path) -> None:
    """With fields that differ only in case, most readers would refuse the table."""
    created(tmp_path)
    first, second = opened(tmp_path), opened(tmp_path)
    first.add_fields({"sku": "bigint"})
    with pytest.raises(LakeChanged):
        second.add_fields({"SKU": "bigint"})
    assert opened(tmp_path).body == {"sku": "bigint"}


@pytest.mark.parametrize("partition_by", [[], ["day"]])
def test_a_table_of_another_program_is_no_lake(partition_by: list[str], tmp_path: Path) -> None:
    """An export would spoil it, and a compaction would drop its columns."""
    write_deltalake(tmp_path, pa.table({"id": ["a"], "day": [date(2026, 11, 16)]}), partition_by=partition_by)
    before = DeltaTable(tmp_path).file_uris()
    for use in (created, opened):
        with pytest.raises(NoLake, match="another program, and no lake"):
            use(tmp_path)
    assert DeltaTable(tmp_path).file_uris() == before and DeltaTable(tmp_path).version() == 0


def test_an_error_of_the_log_is_one_line(tmp_path: Path) -> None:
    created(tmp_path).export([file("a")], {0: Progress(None, 7, 1)})
    (tmp_path / "_delta_log" / f"{1:020}.json").write_text("garbage")
    with pytest.raises(LakeError, match="could not be read") as caught:
        opened(tmp_path)
    assert not {"\n", "\x1b"} & set(str(caught.value)) and "<unknown>" not in str(caught.value)
    assert "; at ./" not in str(caught.value)


def test_a_table_that_another_program_changed(tmp_path: Path) -> None:
    lake = created(tmp_path)
    lake.export([file("a")], {0: Progress(None, 7, 1)})
    entry = tmp_path / "_delta_log" / f"{1:020}.json"
    changed = entry.read_text().replace(f'"partitionValues":{{"day":"{DAY}"}}', '"partitionValues":{"day":null}')
    assert changed != entry.read_text()
    entry.write_text(changed)
    assert list(opened(tmp_path).sizes()) == []
    DeltaTable(tmp_path).alter.add_columns([Field("body", PrimitiveType("string"))])
    with pytest.raises(LakeDamaged, match=r"'body' .* another program"):
        _ = opened(tmp_path).body


OUTSIDE = [
    "../victim.parquet",
    "/etc/victim.parquet",
    "a/../../victim.parquet",
    "file:///etc/victim.parquet",
    "a//b",
    "",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_log_that_names_files_outside_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(LakeDamaged, match="outside of the lake"):
        check_path(path)
    created(tmp_path).export([file("a")], {0: Progress(None, 7, 1)})
    entry = tmp_path / "_delta_log" / f"{1:020}.json"
    entry.write_text(entry.read_text().replace(f"day={DAY}/a.parquet", path))
    with pytest.raises(LakeDamaged, match="outside of the lake"):
        list(opened(tmp_path).sizes())
    with contextlib.suppress(LakeDamaged):  # or a name inside of the lake, of a file that is not there
        (found,) = files(tmp_path)
        assert os.path.normpath(found).startswith(f"{tmp_path}/")


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    """`deltalake` itself follows links: its own vacuum would delete these files."""
    precious = tmp_path / "precious" / "x.parquet"
    precious.parent.mkdir()
    precious.write_text("precious")
    lake = created(tmp_path / "lake")
    (tmp_path / "lake" / "day=2020-01-01").symlink_to(precious.parent)
    orphan = tmp_path / "lake" / f"day={DAY}" / "orphan.parquet"
    orphan.parent.mkdir()
    orphan.write_text("an orphan")
    found = lake.unused(0)
    assert sorted(found) == ["day=2020-01-01/x.parquet", f"day={DAY}/orphan.parquet"]
    for one in found:
        lake.storage.delete(one)
    assert precious.exists() and not orphan.exists()


def test_no_lake_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NoLake, match="lake export"):
        files(tmp_path)
    for wrong in ("", "ftp://host/lake", "s3://", "lake[1]", "lake*", "la{k}e", "a\\b", "a%20b", "s3://bucket/a#b"):
        with pytest.raises(InvalidOption, match="lake"):
            storage_of(wrong)
    assert storage_of(f"file://{tmp_path}").root == str(tmp_path)
    assert storage_of("s3://bucket/lake/").root == "s3://bucket/lake"


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error, not the advice to make a lake there by an export."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("403 Forbidden")

    monkeypatch.setattr(DeltaTable, "create", refused)
    with pytest.raises(LakeError, match=r"could not be created; .* 403 Forbidden"):
        created(tmp_path)


@pytest.mark.parametrize("name", ["my lake", "größe", "a#b", "a+b&c=d", "日本"])
def test_folders_with_unusual_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    created(path).export([file("a")], {0: Progress(None, 7, 1)})
    assert files(path) == [str(path / f"day={DAY}/a.parquet")]
    assert list(opened(path).sizes()) == [small(file("a"))]


def test_a_copied_lake_is_the_same_lake(tmp_path: Path) -> None:
    lake = created(tmp_path / "a")
    lake.export([file("a")], {0: Progress(None, 7, 1)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert opened(tmp_path / "b").id == lake.id
    assert files(tmp_path / "b") == [str(tmp_path / "b" / f"day={DAY}/a.parquet")]
