"""Files of a lake and of a report: private, on disk, and without formulas. No Spark is needed."""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millpond.seam.arrow import arrow_schema
from millpond.spark.columns import batch_columns
from millpond.spark.lake.files import Progress
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake
from millpond.spark.lake.writers import Writers, file_schema
from millpond.spark.report.files import write_tables, write_text


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def write_messages(lake: Lake) -> Path:
    """Commit one Parquet file, as a task writes it; returns its path."""
    schema = arrow_schema(batch_columns("archive"))
    known = {"queue": "orders", "state": "FAILED", "archived_at": 0, "shard": 0}
    values = {field.name: known.get(field.name) for field in schema}
    out = Writers(lake.storage)
    with out:
        out.add(pa.RecordBatch.from_pylist([values], schema=schema))
    lake.export(out.files, {0: Progress(lake.until(0), (lake.until(0) or 0) + 1, 1)})
    return Path(lake.storage.root) / out.files[0].path


def created(path: Path) -> Lake:
    return Lake.create(storage_of(path), file_schema(None))


def test_a_new_lake_is_private(tmp_path: Path) -> None:
    lake = created(tmp_path / "a" / "lake")
    write_messages(lake)
    root = tmp_path / "a" / "lake"
    places = [root, *root.rglob("*")]
    assert len([place for place in places if place.is_file()]) == 3
    assert {mode(place) for place in places if place.is_dir()} == {"0o700"}
    assert {mode(place) for place in places if place.is_file()} == {"0o600"}
    assert mode(tmp_path / "a") == "0o755"


def test_a_lake_in_a_folder_of_the_operator_is_private_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = write_messages(created(tmp_path))
    assert [mode(file), mode(file.parent), mode(tmp_path / "_delta_log")] == ["0o600", "0o700", "0o700"]


def test_new_files_follow_the_mode_that_the_operator_gave_to_the_log(tmp_path: Path) -> None:
    lake = created(tmp_path / "lake")
    log = tmp_path / "lake" / "_delta_log"
    log.chmod(0o770)
    file = write_messages(lake)
    assert [mode(file), mode(file.parent)] == ["0o660", "0o770"]
    assert mode(log / f"{1:020}.json") == "0o660"


def test_what_a_commit_names_is_on_disk(tmp_path: Path) -> None:
    """`deltalake` does not sync its log. Purge relies on the log, so the log must survive a crash of the machine."""
    synced: list[str] = []
    real = os.fsync

    def fsync(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        real(number)

    lake = created(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        file = write_messages(lake)
    log = tmp_path / "_delta_log"
    assert {str(file), str(file.parent), str(tmp_path), str(log / f"{1:020}.json"), str(log)} <= set(synced)
    assert synced.index(str(file)) < synced.index(str(log / f"{1:020}.json"))


def test_an_entry_of_a_killed_process_is_on_disk_with_the_next_one(tmp_path: Path) -> None:
    """Otherwise a crash of the machine could leave a gap in the log."""
    lake, log = created(tmp_path), tmp_path / "_delta_log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lake, "_after", killed)
        with pytest.raises(Killed):
            write_messages(lake)
    assert (log / f"{1:020}.json").exists()
    synced: list[str] = []
    real = os.fsync

    def fsync(number: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        real(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        write_messages(Lake.open(lake.storage))
    assert {f"{1:020}.json", f"{2:020}.json"} <= set(synced)


class Killed(Exception):
    pass


def killed(*_: Any) -> None:
    raise Killed


def test_a_checkpoint_is_on_disk_before_it_replaces_entries(tmp_path: Path) -> None:
    """A crash of the machine could leave it empty otherwise, and the entries gone."""
    lake, log = created(tmp_path), tmp_path / "_delta_log"
    DeltaTable(tmp_path).alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    log.chmod(0o750)
    lake, first = Lake.open(lake.storage), log / f"{0:020}.json"
    there: dict[str, bool] = {}
    real = os.fsync

    def fsync(number: int) -> None:
        there[Path(os.readlink(f"/proc/self/fd/{number}")).name] = first.exists()
        real(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for _ in range(31):
            write_messages(lake)
    assert lake.version == 32 and not first.exists()
    checkpoint = f"{32:020}.checkpoint.parquet"
    assert there[checkpoint] and there["_last_checkpoint"]
    assert [mode(log / name) for name in (checkpoint, "_last_checkpoint")] == ["0o640"] * 2


def test_a_report_is_private_until_its_owner_opens_it(tmp_path: Path) -> None:
    table = pa.table({"queue": ["orders"]})
    written = [*write_tables({"failures": table}, tmp_path, csv=True), write_text(tmp_path / "report.html", "<p>")]
    assert [mode(path) for path in written] == ["0o600"] * 3
    written[2].chmod(0o644)
    assert mode(write_text(tmp_path / "report.html", "<p>")) == "0o644"


FORMULAS = ['=HYPERLINK("http://127.0.0.1/?"&A1,"x")', "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "  =1", "\n@x"]


def test_no_cell_of_a_csv_file_is_a_formula(tmp_path: Path) -> None:
    plain = ["orders", "a=b", "", None, "it's", "3-4"]
    table = pa.table({"queue": [*FORMULAS, *plain], "failed": range(-3, len(FORMULAS + plain) - 3)})
    write_tables({"failures": table}, tmp_path, csv=True)
    with (tmp_path / "failures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["queue"] for row in rows] == [*(f"'{text}" for text in FORMULAS), *(text or "" for text in plain)]
    assert [int(row["failed"]) for row in rows] == table.column("failed").to_pylist(), "numbers may be negative"
