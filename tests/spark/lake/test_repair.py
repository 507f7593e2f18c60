"""Repair of a lake that lacks messages: each is exported once, and purge deletes only compared messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from millpond.errors import LakeIncomplete
from millpond.spark.lake.export import shards_of
from millpond.spark.lake.storage import storage_of
from millpond.spark.lake.table import Lake
from millpond.spark.lake.verify import repair_shard
from millpond.table_prefix import TABLE_PREFIX
from tests.spark.lake.here import export
from tests.spark.lake.test_export import archived, ids, lake_rows
from tests.spark.lake.test_purge import insert_late, purge, times
from tests.spark.ponds import fill, rows

pytestmark = pytest.mark.usefixtures("soon")


def repair(lake: Lake, url: str, missing: list[tuple[UUID, int]], found: int) -> None:
    asyncio.run(repair_shard(lake, shards_of(url, None, TABLE_PREFIX)[0], missing, found))


def missing_in(path: Path, url: str) -> list[tuple[UUID, int]]:
    held = set(ids(lake_rows(path)))
    return [(id_, row.archived_us) for id_, row in rows(url, "archive").items() if str(id_) not in held]


def test_missing_messages_are_exported_then_purged(url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    fill(url, ["orders"])
    export(path, url)
    insert_late(url, times(url)[0])
    with pytest.raises(LakeIncomplete):
        purge(url)
    repair(Lake.open(storage_of(path)), url, missing_in(path, url), 4)
    assert export(path, url).rows == 1
    assert ids(lake_rows(path)) == archived(url)
    assert purge(url) == 5


def test_a_message_that_another_lake_may_hold_is_not_dated_anew(url: str, tmp_path: Path) -> None:
    """The other lake would get it twice."""
    first, second = tmp_path / "first", tmp_path / "second"
    fill(url, ["orders"])
    export(first, url)
    insert_late(url, times(url)[0])
    export(second, url)
    before = times(url)
    with pytest.raises(LakeIncomplete, match="would get them twice"):
        repair(Lake.open(storage_of(first)), url, missing_in(first, url), 4)
    assert times(url) == before
    assert export(second, url).rows == 0
    # The numbers alone concern one lake only.
    repair(Lake.open(storage_of(second)), url, [], 5)


def test_an_export_meanwhile(url: str, tmp_path: Path) -> None:
    """A message that appears in its range after it is not among those that were compared."""
    path = tmp_path / "lake"
    fill(url, ["orders"])
    export(path, url)
    compared = Lake.open(storage_of(path))
    fill(url, ["orders"])
    export(path, url)
    insert_late(url, times(url)[-1])
    repair(compared, url, [], 4)
    with pytest.raises(LakeIncomplete, match=r"has \d messages .* exported"):
        purge(url)
    assert len(archived(url)) > 4
    repair(Lake.open(storage_of(path)), url, missing_in(path, url), 8)
    assert export(path, url).rows == 1
    purge(url)
    assert archived(url) == [] and len(ids(lake_rows(path))) == 9


def test_a_message_that_appears_after_the_comparison(url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    fill(url, ["orders"])
    export(path, url)
    insert_late(url, times(url)[0])
    with pytest.raises(LakeIncomplete, match=r"has 5 messages .* 4 of them were found"):
        repair(Lake.open(storage_of(path)), url, [], 4)
    with pytest.raises(LakeIncomplete):
        purge(url)
    assert len(archived(url)) == 5
