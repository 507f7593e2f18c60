"""Merging files of different ages, and the order of rows in files, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.seam.arrow import arrow_schema
from millpond.spark.columns import batch_columns
from millpond.spark.lake import writers
from millpond.spark.lake.body import Decoder
from millpond.spark.lake.compact import compact, merge, small_files
from millpond.spark.lake.files import Progress
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake
from millpond.spark.lake.writers import Writers, file_schema
from tests.spark.lake.here import Here, lake_rows

DAY = 86_400_000_000
DECODERS = (None, Decoder({"a": "bigint"}), Decoder({"a": "bigint", "b": "string"}))


def archived(*rows: dict[str, Any]) -> pa.RecordBatch:
    schema = arrow_schema(batch_columns("archive"))
    usual = {"id": "x", "queue": "orders", "state": "COMPLETED", "payload": b"", "archived_at": 0, "shard": 0}
    return pa.RecordBatch.from_pylist([{n: {**usual, **row}.get(n) for n in schema.names} for row in rows], schema)


def test_older_files_have_nulls_for_bodies_and_fields_that_were_added_later(tmp_path: Path) -> None:
    storage = storage_of(tmp_path)
    storage.prepare()
    files = []
    for at, decoder in enumerate(DECODERS):
        with Writers(storage, decoder) as out:
            out.add(archived({"payload": b'{"a": 1, "b": "x"}', "archived_at": at}))
            out.add(archived({"payload": b"no JSON", "archived_at": at, "queue": "q", "state": "FAILED", "shard": 1}))
        files += [(file.path, file.day, file.size) for file in out.files]

    (merged,) = merge(files, storage=storage, decoder=DECODERS[-1]).files

    rows = pq.ParquetFile(tmp_path / merged.path).read()
    assert rows.schema.equals(file_schema(DECODERS[-1]))
    bodies = [(row["queue"], row["body"], row["unreadable"]) for row in rows.to_pylist()]
    assert bodies == [
        ("orders", None, None),
        ("orders", {"a": 1, "b": None}, None),
        ("orders", {"a": 1, "b": "x"}, None),
        ("q", None, None),
        ("q", None, "no JSON object"),
        ("q", None, "no JSON object"),
    ]
    assert (merged.rows, merged.day) == (6, "1970-01-01")
    least, greatest = merged.least, merged.greatest
    assert (least.queue, least.state, least.archived_us, least.shard) == ("orders", "COMPLETED", 0, 0)
    assert (greatest.queue, greatest.state, greatest.archived_us, greatest.shard) == ("q", "FAILED", 2, 1)


def test_rows_are_sorted_by_queue_and_files_end_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of files depends on bytes and days, not on queues."""
    storage = storage_of(tmp_path)
    storage.prepare()
    monkeypatch.setattr(writers, "ROW_GROUP", 100)
    rows = [{"queue": f"q{n * 7 % 300:03}", "archived_at": n, "payload": b"x" * 100} for n in range(900)]
    with Writers(storage) as out:
        for start in range(0, 900, 90):
            out.add(archived(*rows[start : start + 90]))
    (one,) = out.files
    file = pq.ParquetFile(tmp_path / one.path)
    found = file.read(["queue", "archived_at"]).to_pylist()
    assert found == sorted(found, key=lambda row: (row["queue"], row["archived_at"])) and len(found) == 900
    assert file.metadata.num_row_groups == 9
    monkeypatch.setattr(writers, "FILE_BYTES", 40_000)
    with Writers(storage) as out:
        for start in range(0, 900, 90):
            out.add(archived(*rows[start : start + 90]))
    assert 2 <= len(out.files) <= 6 and sum(file.rows for file in out.files) == 900


def test_a_group_becomes_one_file_however_well_it_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged file ended by the bytes of its rows, and was small again for the next compaction, without end."""
    monkeypatch.setattr(writers, "FILE_BYTES", 100_000)
    Lake.create(storage_of(tmp_path), file_schema(None))
    for number in range(6):
        with Writers(storage_of(tmp_path)) as out:
            out.add(archived(*({"payload": b"x" * 1000, "archived_at": number * 50 + n} for n in range(50))))
        progress = {0: Progress(number * 50 or None, number * 50 + 50, 50)}
        Lake.open(storage_of(tmp_path)).export(out.files, progress)
    done = [compact(Here(), tmp_path, keep=None, fewest=fewest) for fewest in (2, 2, 1)]  # type: ignore[arg-type]
    assert [(one.replaced, one.written) for one in done] == [(6, 1), (0, 0), (0, 0)]
    assert len(lake_rows(tmp_path)) == 300


@pytest.mark.slow
def test_long_bodies_are_merged_in_bounded_memory(tmp_path: Path) -> None:
    """A batch of 16,384 rows is not read at once: it has the rows of many row groups."""
    storage = storage_of(tmp_path)
    storage.prepare()
    with Writers(storage, end_by_size=False) as out:
        for _ in range(50):
            out.add(archived(*[{"payload": b"x" * (1 << 16)}] * 160))
    (one,) = out.files
    usual, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    try:
        merge([(one.path, one.day, one.size)], storage, None)
    finally:
        pa.set_memory_pool(usual)
    assert counted.max_memory() < 300 << 20, "of 500 MiB of rows"


def test_days_are_apart_and_few_files_are_open(tmp_path: Path) -> None:
    storage = storage_of(tmp_path)
    storage.prepare()
    with Writers(storage) as out:
        for n in range(40):
            out.add(archived({"archived_at": n % 20 * DAY}, {"archived_at": (n + 1) % 20 * DAY}))
            assert len(out._open) <= writers.MOST_OPEN
    assert sum(file.rows for file in out.files) == 80
    for file in out.files:
        days = pq.ParquetFile(tmp_path / file.path).read(["day"]).column("day").unique().to_pylist()
        assert [f"{day}" for day in days] == [file.day] and file.path.startswith(f"day={file.day}/")


def test_a_failed_task_leaves_no_file_behind(tmp_path: Path) -> None:
    storage = storage_of(tmp_path)
    storage.prepare()
    with pytest.raises(RuntimeError), Writers(storage) as out:
        out.add(archived({}))
        raise RuntimeError("no connection")
    assert list(tmp_path.glob("day=*/*")) == []


def test_groups_of_small_files() -> None:
    files = [(f"{day}/{n}", day, size) for day in ("a", "b") for n, size in enumerate((10, 20, 60, 30, 10))]
    assert [[one[0] for one in group] for group in small_files(files, 100, 2)] == [
        ["a/0", "a/1", "a/3", "a/4"],
        ["b/0", "b/1", "b/3", "b/4"],
    ]
    assert small_files(files, 100, 5) == [] and small_files([], 100, 2) == []
    assert [len(group) for group in small_files(files, 45, 2)] == [3, 3]
    assert [len(group) for group in small_files(files, 25, 2)] == [2, 2]
