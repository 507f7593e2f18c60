"""Purge after export: from the archive goes only what every lake durably holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, ManualClock, Message
from millpond.clock import as_datetime
from millpond.errors import LakeFenced
from millpond.transports.database import partitions
from millpond.transports.database.engine import Mode
from tests.cli.conftest import Cli
from tests.lake.here import export, exporter
from tests.lake.test_export import archived, ids, lake_rows
from tests.spark.ponds import fill

pytestmark = pytest.mark.usefixtures("soon")


def with_store(url: str, do: Callable[[Any], Any], **options: Any) -> Any:
    async def go() -> Any:
        store = await millpond.connect(url, **options)
        try:
            return await do(store)
        finally:
            await store.close()

    return asyncio.run(go())


def purge(url: str) -> int:
    return int(with_store(url, lambda store: store.purge(older_than=0)))


def test_nothing_goes_before_it_is_in_the_lake(url: str, tmp_path: Path) -> None:
    fill(url, ["orders"])
    one = exporter(tmp_path / "lake", url)
    one.opened()
    assert purge(url) == 0, "the export is on, and has brought nothing yet"
    one.export()
    exported = archived(url)
    fill(url, ["orders", "later"])
    assert purge(url) == len(exported)
    assert not set(archived(url)) & set(exported) and archived(url)
    one.export()
    assert purge(url) > 0
    assert archived(url) == []
    assert set(ids(lake_rows(tmp_path / "lake"))) > set(exported)
    one.close()


def test_retention_and_the_operators_command_wait_too(url: str, tmp_path: Path, cli: Cli) -> None:
    fill(url, ["orders"])
    one = exporter(tmp_path / "lake", url)
    one.opened()
    cli.ok("retain", "orders", "--completed", "0s", "--failed", "0s", "--url", url)
    for command in (["purge"], ["purge", "--older-than", "0s"], ["lake", "purge", "--older-than", "0s"]):
        assert cli.ok(*command, "--url", url, "--json").json == {"purged": 0}
    before = len(archived(url))
    one.export()
    one.close()
    assert cli.ok("purge", "--url", url, "--json").json == {"purged": before}


def test_all_lakes_must_hold_it(url: str, tmp_path: Path, cli: Cli) -> None:
    fill(url, ["orders"])
    export(tmp_path / "first", url)
    other = exporter(tmp_path / "second", url)
    other.opened()
    assert purge(url) == 0
    found = cli.ok("lake", "exports", "--url", url, "--json").json["exports"]
    assert {one["path"] for one in found} == {str(tmp_path / "first"), str(tmp_path / "second")}
    (behind,) = [one["lake"] for one in found if one["until"] is None]
    assert "exported to no lake" in cli.fails(1, "lake", "exports", "--url", url, "--forget", "nobody")
    cli.ok("lake", "exports", "--url", url, "--forget", behind)
    assert purge(url) > 0
    assert archived(url) == []
    other.close()


def test_without_a_lake_there_is_nothing_to_wait_for(sqlite_url: str, cli: Cli) -> None:
    fill(sqlite_url, ["orders"])
    assert "exported to no lake" in cli.fails(1, "lake", "purge", "--older-than", "0s", "--url", sqlite_url)
    assert cli.ok("lake", "exports", "--url", sqlite_url).out == "exported to no lake\n"
    assert purge(sqlite_url) > 0


def test_a_fenced_export_notes_nothing(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url, ["orders"])
    first, second = (exporter(tmp_path / "lake", sqlite_url) for _ in range(2))
    first.opened()
    second.opened()
    with pytest.raises(LakeFenced):
        first.export()
    assert purge(sqlite_url) == 0
    first.close()
    second.close()


def test_what_a_crash_left_unnoted_is_noted_by_the_next(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url, ["orders"])
    one = exporter(tmp_path / "lake", sqlite_url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(one), "_note", lambda self: None)
        one.export()
    one.close()
    assert purge(sqlite_url) == 0
    export(tmp_path / "lake", sqlite_url)
    assert purge(sqlite_url) > 0 and archived(sqlite_url) == []


def test_days_are_dropped_whole_once_the_lake_holds_them(shared_postgres: Any, tmp_path: Path) -> None:
    shared_postgres.empty()
    url = shared_postgres.url
    clock = ManualClock(datetime.now(UTC) - timedelta(days=3))

    async def settle_then(store: Any) -> list[str]:
        await store.purge()  # makes that day ready
        await store.publish([Message(queue="q", payload=b"x") for _ in range(5)])
        await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], limit=5)])
        return await days(store)

    async def days(store: Any) -> list[str]:
        found = await store._run(lambda again: partitions.partitions(store.dialect), Mode.READ)
        return [one.name for one in found]

    before = with_store(url, settle_then, clock=clock)
    (day,) = [name for name in before if f"{as_datetime(clock.now()):%Y%m%d}" in name]
    one = exporter(tmp_path / "lake", url)
    one.opened()
    assert purge(url) == 0 and day in with_store(url, days)
    one.export()
    one.close()
    assert purge(url) == 5
    assert len(ids(lake_rows(tmp_path / "lake"))) == 5
    assert day not in with_store(url, days)
