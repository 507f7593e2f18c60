"""A lake of an earlier version becomes a Delta table, with all its messages, fields and progress."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow.parquet as pq
import pytest

from millpond.errors import LakeDamaged, LakeIncomplete, NoLake
from millpond.spark.lake import migrate, old_format
from millpond.spark.lake.compact import compact
from millpond.spark.lake.export import shards_of
from millpond.spark.lake.read import files
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake
from millpond.spark.lake.verify import repair_shard
from millpond.table_prefix import TABLE_PREFIX
from tests.cli.conftest import Cli
from tests.spark.lake.dying_migrate import POINTS
from tests.spark.lake.here import Here, export, lake_rows
from tests.spark.lake.old_lake import CHECKPOINT_EVERY, OldLakeWriter
from tests.spark.lake.readers import READERS
from tests.spark.lake.test_export import ids
from tests.spark.lake.test_purge import purge, with_store
from tests.spark.ponds import HOSTILE, fill, rows
from tests.triggers import execute

pytestmark = pytest.mark.usefixtures("soon")


def old_lake(path: Path, url: str) -> OldLakeWriter:
    """A lake that holds the archive, as an earlier version wrote it, with a checkpoint, and entered in the database."""
    old = OldLakeWriter(path)
    found = [plain(id_, row) for id_, row in rows(url, "archive").items()]
    until = max(row["archived_at"] for row in found) + 1
    for at in range(0, len(found), 2):
        old.append("export", added=old.write(found[at : at + 2]), until={"0": until})
    while old.state["number"] < CHECKPOINT_EVERY + 2:
        old.append("open")
    replaced = list(old.state["files"])[:2]
    gone = [row for row in found if any(row["id"] in ids_of(path / one) for one in replaced)]
    old.append("compact", added=old.write(gone), removed=replaced)

    async def enter(store: Any) -> None:
        await store.exports.open(old.id, shard=0, path=str(path), until=None)

    with_store(url, enter)
    execute(url, f"UPDATE millpond_export SET until = {until}")
    return old


def ids_of(file: Path) -> list[str]:
    return [str(one) for one in pq.read_table(file, columns=["id"]).column("id").to_pylist()]


def plain(id_: UUID, row: Any) -> dict[str, Any]:
    known = {"id": str(id_), "queue": row.queue, "payload": row.payload, "state": row.state.value, "shard": 0}
    return {**known, "archived_at": row.archived_us, "priority": row.priority, "deliveries": row.deliveries}


@pytest.mark.slow_on_servers
def test_all_messages_and_the_progress(url: str, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lake"
    fill(url, HOSTILE)
    old = old_lake(path, url)
    before = sorted(str(id_) for id_ in rows(url, "archive"))
    with pytest.raises(NoLake, match="millpond lake migrate"):
        files(path)
    with pytest.raises(NoLake, match="earlier version"):
        export(path, url)
    said = cli.ok("lake", "migrate", "--lake", str(path), "--json").json
    assert said == {"files": len(old.state["files"]), "rewritten": 0, "fields_left_out": []}
    assert ids(lake_rows(path)) == before
    for read in READERS:
        assert read(path) == before, read.__name__
        assert len(read(path, "queue = 'orders'")) == 4
    lake = Lake.open(storage_of(path))
    assert (lake.id, lake.until(0)) == (old.id, old.state["until"]["0"])
    # Exports continue. Purge deletes their messages, and the converted ones only after a comparison.
    fill(url, ["more"])
    assert export(path, url).rows == 4
    with pytest.raises(LakeIncomplete, match="4 other messages were purged"):
        purge(url)
    assert sorted(str(id_) for id_ in rows(url, "archive")) == before
    compared = Lake.open(storage_of(path))
    asyncio.run(repair_shard(compared, shards_of(url, None, TABLE_PREFIX)[0], [], len(before)))
    assert purge(url) == len(before)
    # A compaction leaves the old names of files to readers of the earlier version. Nothing else needs them.
    compact(Here(), path, keep=timedelta(0))  # type: ignore[arg-type]
    assert all((path / one["path"]).exists() for one in old.state["files"].values())
    for place in path.iterdir():
        if place.name != "_delta_log" and not place.name.startswith("day="):
            shutil.rmtree(place)
    assert len(ids(lake_rows(path))) == len(before) + 4
    for read in READERS:
        assert len(read(path)) == len(before) + 4, read.__name__
    assert "no lake of an earlier version" in cli.fails(2, "lake", "migrate", "--lake", str(path))


def test_fields_that_differ_in_case_open_again(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    old = OldLakeWriter(path)
    row = {"queue": "q", "state": "COMPLETED", "shard": 0, "archived_at": 86_400_000_000, "payload": b"{}"}
    first = {"sku": "bigint"}
    old.append("export", added=old.write([{**row, "id": "a", "body": {"sku": 1}}], first), until={"0": 7}, body=first)
    both = {**first, "SKU": "bigint", "a.b": "string"}
    body = {"sku": 2, "SKU": 3, "a.b": "x"}
    old.append("export", added=old.write([{**row, "id": "b", "body": body}], both), until={"0": 9}, body=both)
    done = migrate(path)
    assert (done.files, done.rewritten, done.fields) == (2, 1, ("SKU", "a.b"))
    assert Lake.open(storage_of(path)).body == {"sku": "bigint"}
    for read in READERS:
        assert read(path, "body['sku'] = 2" if read.__name__ == "by_deltalake" else "body.sku = 2") == ["b"]
    assert sorted((one["id"], one["body"]) for one in lake_rows(path)) == [("a", {"sku": 1}), ("b", {"sku": 2})]


def test_an_export_of_an_earlier_version_cannot_commit_any_more(tmp_path: Path) -> None:
    old = OldLakeWriter(tmp_path / "lake")
    old_format.fence(tmp_path / "lake")
    with pytest.raises(FileExistsError):  # its next entry exists
        old.append("export", until={"0": 7})


def test_a_lake_with_a_missing_file_or_entry_is_refused(tmp_path: Path) -> None:
    old = OldLakeWriter(tmp_path / "lake")
    row = {"id": "a", "queue": "q", "state": "COMPLETED", "shard": 0, "archived_at": 0, "payload": b""}
    added = old.write([row])
    old.append("export", added=added, until={"0": 7})
    (tmp_path / "lake" / added[0]["path"]).unlink()
    with pytest.raises(LakeDamaged, match="missing"):
        migrate(tmp_path / "lake")
    entry = old.log / "000000000002.json"
    entry.write_text(entry.read_text().replace(added[0]["path"], "../../victim.parquet"))
    with pytest.raises(LakeDamaged, match="outside"):
        migrate(tmp_path / "lake")
    entry.unlink()
    with pytest.raises(LakeDamaged, match="entry 2"):
        migrate(tmp_path / "lake")


@pytest.mark.parametrize(
    "point", [pytest.param(one, marks=() if one == "committed, not synced" else pytest.mark.slow) for one in POINTS]
)
def test_killed_and_run_again(point: str, sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    fill(sqlite_url, ["orders", "other"])
    old = old_lake(path, sqlite_url)
    old.append("export", body={"sku": "bigint"})
    command = [sys.executable, "-m", "tests.spark.lake.dying_migrate", str(path), point]
    assert subprocess.run(command, cwd=Path(__file__).parents[3]).returncode == -signal.SIGKILL
    with pytest.raises(NoLake, match="earlier version"):  # half of it is no lake
        files(path)
    migrate(path)
    before = sorted(str(id_) for id_ in rows(sqlite_url, "archive"))
    assert ids(lake_rows(path)) == before
    for read in READERS:
        assert read(path) == before, read.__name__
    fill(sqlite_url, ["orders"])
    assert export(path, sqlite_url).rows == 4
