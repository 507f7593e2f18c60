"""Counts of a lake by file, for the history of the server, without Spark and Java."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import httpx
import pytest

import millpond
from millpond.errors import LakeError
from millpond.server.application import application
from millpond.server.settings import ServerSettings
from millpond.server.state import ServerState
from millpond.spark.lake.days import CountedLake
from tests.spark.lake.here import export, lake_rows
from tests.spark.ponds import HOSTILE, fill


def today() -> date:
    return datetime.now(UTC).date()


def test_files_of_some_days_are_counted_by_queue_and_state(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    counted = CountedLake(path)
    assert counted.days(today()) == {}, "no lake yet"
    fill(sqlite_url)
    export(path, sqlite_url)
    wanted = Counter((row["queue"], row["state"]) for row in lake_rows(path))
    files = counted.days(today() - timedelta(days=1))
    assert set(files.values()) <= {today(), today() - timedelta(days=1)}
    found: Counter[tuple[str, str]] = Counter()
    for file in files:
        found.update(counted.count(file))
    assert found == wanted and {queue for queue, _ in found} == set(HOSTILE)
    assert counted.days(today() + timedelta(days=2)) == {}
    with pytest.raises(LakeError, match="could not be read"):
        counted.count("day=2026-01-01/none.parquet")


async def test_a_server_shows_days_that_were_exported(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    await asyncio.to_thread(fill, sqlite_url, ["orders", "other"])
    await asyncio.to_thread(export, path, sqlite_url)
    wanted = Counter((row["queue"], row["state"]) for row in lake_rows(path))
    store = await millpond.connect(sqlite_url)
    await store.operations.purge("orders", older_than=0)
    state = ServerState(store, ServerSettings(lake=CountedLake(path)))
    inside = httpx.ASGITransport(app=application(state))
    async with httpx.AsyncClient(transport=inside, base_url="http://127.0.0.1:8420", timeout=60) as http:
        reply = (await http.get("/api/v1/history?by=day&queue=orders")).raise_for_status().json()
        assert (reply["complete"], len(reply["buckets"])) == (True, 30)
        sums = [sum(one[name] for one in reply["buckets"]) for name in ("completed", "failed")]
        assert sums == [wanted["orders", "COMPLETED"], wanted["orders", "FAILED"]], "also what was purged"
        page = (await http.get("/dashboard")).text
        assert f"Settled each day, last 30 days, from the lake: {wanted.total() // 2} completed" in page
    await state.close()
    await store.close()
