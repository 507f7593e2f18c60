"""Purge after export: only messages that every lake durably holds leave the archive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Ack, ManualClock, Message, State
from millpond.clock import as_datetime
from millpond.errors import LakeIncomplete
from millpond.spark.lake.storage import Folder
from millpond.spark.lake.table import Lake
from millpond.transports.database.exports.exports import DatabaseExports
from millpond.transports.database.exports.ranges import PurgeCheck
from millpond.transports.database.operations import purge as purging
from millpond.transports.database.operations.operations import DatabaseOperations
from millpond.transports.database.postgres import partitions
from millpond.transports.database.runner import Mode
from tests.cli.conftest import Cli
from tests.spark.lake.here import export, exporter
from tests.spark.lake.test_export import archived, ids, lake_rows
from tests.spark.ponds import fill
from tests.triggers import execute

pytestmark = [pytest.mark.usefixtures("soon"), pytest.mark.slow_on_servers]


def with_store(url: str, do: Callable[[Any], Any], **options: Any) -> Any:
    async def go() -> Any:
        store = await millpond.connect(url, **options)
        try:
            return await do(store)
        finally:
            await store.close()

    return asyncio.run(go())


def purge(url: str) -> int:
    return int(with_store(url, lambda store: store.operations.purge(older_than=0)))


def test_nothing_goes_before_it_is_in_the_lake(url: str, tmp_path: Path) -> None:
    fill(url, ["orders"])
    one = exporter(tmp_path / "lake", url)
    one.open()
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
    one.open()
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
    other.open()
    assert purge(url) == 0
    found = cli.ok("lake", "exports", "--url", url, "--json").json["exports"]
    assert {one["path"] for one in found} == {str(tmp_path / "first"), str(tmp_path / "second")}
    (behind,) = [one["lake"] for one in found if one["until"] is None]
    assert "exported to a lake 'nobody'" in cli.fails(1, "lake", "exports", "--url", url, "--forget", "nobody")
    cli.ok("lake", "exports", "--url", url, "--forget", behind)
    assert purge(url) > 0
    assert archived(url) == []
    other.close()


def test_without_a_lake_there_is_nothing_to_wait_for(sqlite_url: str, cli: Cli) -> None:
    fill(sqlite_url, ["orders"])
    assert "exported to no lake" in cli.fails(1, "lake", "purge", "--older-than", "0s", "--url", sqlite_url)
    assert cli.ok("lake", "exports", "--url", sqlite_url).out == "exported to no lake\n"
    assert purge(sqlite_url) > 0


def test_an_export_that_died_after_its_commit_is_recorded_by_the_next(url: str, tmp_path: Path) -> None:
    """With the number of messages that the lake holds."""
    fill(url, ["orders"])
    one = exporter(tmp_path / "lake", url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseExports, "advance", dead)
        with pytest.raises(Dead):
            one.export()
    one.close()
    assert purge(url) == 0 and len(ids(lake_rows(tmp_path / "lake"))) == 4
    fill(url, ["orders"])
    assert export(tmp_path / "lake", url).rows == 4
    assert purge(url) == 8 and archived(url) == []
    assert len(ids(lake_rows(tmp_path / "lake"))) == 8


def test_an_entry_that_a_killed_export_left_is_on_disk_before_it_counts(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export died between its commit and the sync. What the database knows of it, purge relies on."""
    fill(sqlite_url, ["orders"])
    one = exporter(tmp_path / "lake", sqlite_url)
    with monkeypatch.context() as patch:
        patch.setattr(Lake, "_after", die)
        with pytest.raises(Dead):
            one.export()
    one.close()
    order: list[str] = []
    sync_log, advance = Folder.sync_log, DatabaseExports.advance

    def sync(self: Folder, names: Iterable[str]) -> None:
        names = list(names)
        order.extend(names)
        sync_log(self, names)

    async def recorded(self: Any, *given: Any) -> None:
        order.append("recorded")
        await advance(self, *given)

    monkeypatch.setattr(Folder, "sync_log", sync)
    monkeypatch.setattr(DatabaseExports, "advance", recorded)
    assert export(tmp_path / "lake", sqlite_url).rows == 0
    assert f"{1:020}.json" in order[: order.index("recorded")]
    assert purge(sqlite_url) == 4


class Dead(Exception):
    pass


async def dead(*_: Any, **__: Any) -> None:
    raise Dead


def insert_late(url: str, archived_at: int) -> None:
    """A row of this time that no export has seen."""
    id_ = "'01234567-89ab-cdef-0123-456789abcdef'" if "postgres" in url else "x'0123456789abcdef0123456789abcdef'"
    execute(
        url,
        "INSERT INTO millpond_archive (id, queue, priority, due_at, payload, deliveries, attempts, created_at, state, "
        f"archived_at) VALUES ({id_}, 'orders', 50, 0, '', 1, 1, 0, 'COMPLETED', {archived_at})",
    )


def times(url: str) -> list[int]:
    return [int(at) for (at,) in execute(url, "SELECT archived_at FROM millpond_archive ORDER BY archived_at")]


def test_a_row_that_no_lake_holds_is_never_purged(url: str, tmp_path: Path, cli: Cli) -> None:
    fill(url, ["orders", "other"])
    export(tmp_path / "lake", url)
    insert_late(url, times(url)[0])
    before = archived(url)
    with pytest.raises(LakeIncomplete, match=r"has 9 messages .* 0 were purged, but 8 were exported"):
        purge(url)
    said = cli("lake", "purge", "--older-than", "0s", "--url", url)
    assert said.code != 0 and "millpond lake check" in said.err
    assert archived(url) == before
    # Later ranges of the same lake may go, but none of this one.
    execute(url, f"DELETE FROM millpond_archive WHERE archived_at = {times(url)[0]}")
    with pytest.raises(LakeIncomplete):
        purge(url)


def test_rows_that_another_program_deleted_are_noticed(url: str, tmp_path: Path) -> None:
    fill(url, ["orders"])
    export(tmp_path / "lake", url)
    execute(url, "DELETE FROM millpond_archive WHERE state = 'FAILED'")
    left = len(archived(url))
    with pytest.raises(LakeIncomplete):
        purge(url)
    assert len(archived(url)) == left


def test_a_range_is_purged_in_parts(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By queue, by state and in batches: the number of purged rows is known, and a row that appears is noticed."""
    monkeypatch.setattr(DatabaseOperations, "purge_batch", 3)
    for _ in range(2):
        fill(url, ["orders", "other"], each=24)
        export(tmp_path / "lake", url)
    total = len(archived(url))
    removed = with_store(url, lambda store: store.operations.purge("orders", older_than=0, states=[State.FAILED]))
    assert 0 < removed < total
    first = times(url)[0]
    insert_late(url, first)
    with pytest.raises(LakeIncomplete):
        purge(url)
    execute(url, "DELETE FROM millpond_archive WHERE created_at = 0")
    assert purge(url) == total - removed and archived(url) == []
    insert_late(url, first)
    with pytest.raises(LakeIncomplete, match="has 1 messages"):
        purge(url)
    assert len(archived(url)) == 1


def test_a_row_that_appears_between_two_batches_is_kept(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(url, ["orders"], each=36)
    export(tmp_path / "lake", url)
    monkeypatch.setattr(DatabaseOperations, "purge_batch", 3)
    waiting = [times(url)[-1]]

    async def late(started: float) -> None:
        if waiting:
            insert_late(url, waiting.pop())

    monkeypatch.setattr(purging, "rest", late)
    with pytest.raises(LakeIncomplete, match=r"has 10 messages .* 3 were purged, but 12 were exported"):
        purge(url)
    assert len(archived(url)) == 10


@pytest.mark.parametrize("server", ["postgres", "mariadb"])
def test_a_row_that_appears_between_the_count_and_the_delete_is_kept(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite has one writer at a time."""
    url = request.getfixturevalue(f"{server}_url")
    fill(url, ["orders"])
    export(tmp_path / "lake", url)
    ((first,),) = execute(url, "SELECT min(archived_at) FROM millpond_archive WHERE state = 'COMPLETED'")
    waiting = [first]
    count = PurgeCheck.count_as_purged

    def late(*given: Any) -> Any:
        result = yield from count(*given)
        if waiting:
            insert_late(url, waiting.pop())
        return result

    monkeypatch.setattr(PurgeCheck, "count_as_purged", late)
    with pytest.raises(LakeIncomplete, match=r"has 5 messages .* 0 were purged, but 4 were exported"):
        purge(url)
    assert len(archived(url)) == 5


def test_one_late_row_keeps_its_range_only(url: str, tmp_path: Path) -> None:
    """Other ranges are purged, of every queue, and so are ids that no publish needs any more."""
    path = tmp_path / "lake"
    for hours in (0, 2, 4):
        settle_at(url, START + timedelta(hours=hours), queues=("orders", "other"))
        export(path, url, clock=ManualClock(START + timedelta(hours=hours, minutes=1)), margin=0)
    late = times(url)[4]
    insert_late(url, late)
    execute(url, "UPDATE millpond_dedupe SET expires_at = 1")
    with pytest.raises(LakeIncomplete, match=r"has 5 messages .* but 4 were exported .* 8 other messages were purged"):
        purge(url)
    assert times(url) == [late] * 5
    assert execute(url, "SELECT count(*) FROM millpond_dedupe") == [(0,)]


START = datetime(2026, 3, 1, tzinfo=UTC)


def settle_at(url: str, moment: datetime, *, queues: Sequence[str] = ("q",)) -> None:
    """Two messages of each queue."""

    async def settle(store: Any) -> None:
        await store.publish([Message(queue=queue, payload=b"x") for queue in queues for _ in range(2)])
        await store.settle([Ack(claim.receipt) for claim in await store.claim(queues, limit=2 * len(queues))])

    with_store(url, settle, clock=ManualClock(moment))


def test_purged_ranges_become_one(url: str, tmp_path: Path) -> None:
    start, path = START, tmp_path / "lake"
    for hours in (0, 1, 2, 30, 100):
        settle_at(url, start + timedelta(hours=hours))
    export(path, url, clock=ManualClock(start + timedelta(hours=100, minutes=1)))
    for hours in (101, 102):
        settle_at(url, start + timedelta(hours=hours))
        export(path, url, clock=ManualClock(start + timedelta(hours=hours, minutes=1)))
    ranges = "SELECT since, until, messages, purged FROM millpond_export_range ORDER BY since"
    found = execute(url, ranges)
    assert [row[0] for row in found][1:] == [row[1] for row in found][:-1], "they follow each other"
    assert sum(row[2] for row in found) == 14 and max(row[2] for row in found) == 2
    clock = ManualClock(start + timedelta(hours=101, minutes=30))
    assert with_store(url, lambda store: store.operations.purge(older_than=3600 * 50), clock=clock) == 8
    found = execute(url, ranges)
    assert (found[0][2], found[0][3]) == (8, 8) and all(row[3] == 0 for row in found[1:])
    assert purge(url) == 6
    ((_, _, messages, purged),) = execute(url, ranges)
    assert messages == purged == 14


def test_a_day_with_a_row_that_no_lake_holds_is_not_dropped(shared_postgres: Any, tmp_path: Path) -> None:
    shared_postgres.empty()
    url = shared_postgres.url
    clock = three_days_ago(url, 5)
    export(tmp_path / "lake", url)
    insert_late(url, times(url)[0] + 1)
    with pytest.raises(LakeIncomplete, match="has 6 messages"):
        purge(url)
    assert len(archived(url)) == 6
    execute(url, "DELETE FROM millpond_archive WHERE created_at = 0")
    assert purge(url) == 5 and archived(url) == []
    insert_late(url, clock.now())
    with pytest.raises(LakeIncomplete, match=r"has 1 messages .* 5 were purged, but 5 were exported"):
        purge(url)


def test_rows_that_no_export_has_recorded_are_not_purged(url: str, tmp_path: Path) -> None:
    """A lake of an earlier version: its progress is known, and its numbers of messages are not."""
    fill(url, ["orders"])
    export(tmp_path / "lake", url)
    execute(url, "DELETE FROM millpond_export_range")
    unrecorded = archived(url)
    fill(url, ["orders"])
    export(tmp_path / "lake", url)
    with pytest.raises(
        LakeIncomplete, match=r"no export to .* has recorded .* lake check --repair .* 4 other messages"
    ):
        purge(url)
    assert archived(url) == unrecorded


def three_days_ago(url: str, messages: int) -> ManualClock:
    """Messages settled in their own partition, by the clock that is returned."""
    clock = ManualClock(datetime.now(UTC) - timedelta(days=3))

    async def settle(store: Any) -> None:
        await store.operations.purge()  # makes that day ready
        await store.publish([Message(queue="orders", payload=b"x") for _ in range(messages)])
        await store.settle([Ack(claim.receipt) for claim in await store.claim(["orders"], limit=messages)])

    with_store(url, settle, clock=clock)
    return clock


@pytest.mark.parametrize("which", ["until > 0", "messages > 0"])
def test_a_day_that_no_export_has_recorded_is_not_dropped(shared_postgres: Any, tmp_path: Path, which: str) -> None:
    shared_postgres.empty()
    url = shared_postgres.url
    three_days_ago(url, 5)
    export(tmp_path / "lake", url)
    execute(url, f"DELETE FROM millpond_export_range WHERE {which}")
    with pytest.raises(LakeIncomplete, match="has recorded messages"):
        purge(url)
    assert len(archived(url)) == 5


def test_a_row_that_appears_before_its_day_is_dropped(
    shared_postgres: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its ranges were compared with the lake, and before they are deleted."""
    shared_postgres.empty()
    url = shared_postgres.url
    clock = three_days_ago(url, 5)
    export(tmp_path / "lake", url)
    truncate = partitions.truncate_if_allowed

    def late(*given: Any) -> Any:
        insert_late(url, clock.now())
        return truncate(*given)

    monkeypatch.setattr(partitions, "truncate_if_allowed", late)
    with pytest.raises(LakeIncomplete, match=r"has 6 messages .* but 5 were exported .* Nothing was purged"):
        purge(url)
    assert len(archived(url)) == 6


def test_a_purge_that_dies_while_it_drops_a_day(
    shared_postgres: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the day is emptied for good, and before it is dropped."""
    shared_postgres.empty()
    url = shared_postgres.url
    three_days_ago(url, 5)
    export(tmp_path / "lake", url)
    for owner, name, left in ((PurgeCheck, "emptied", 5), (partitions, "drop_if_empty", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, die)
            with pytest.raises(Dead):
                purge(url)
        assert len(archived(url)) == left
    assert purge(url) == 0
    fill(url, ["orders"])
    export(tmp_path / "lake", url)
    assert purge(url) == 4 and archived(url) == []
    assert len(ids(lake_rows(tmp_path / "lake"))) == 9


def die(*_: Any) -> None:
    raise Dead


def test_days_are_dropped_whole_once_the_lake_holds_them(shared_postgres: Any, tmp_path: Path) -> None:
    shared_postgres.empty()
    url = shared_postgres.url
    clock = ManualClock(datetime.now(UTC) - timedelta(days=3))

    async def settle_then(store: Any) -> list[str]:
        await store.operations.purge()  # makes that day ready
        await store.publish([Message(queue="q", payload=b"x") for _ in range(5)])
        await store.settle([Ack(claim.receipt) for claim in await store.claim(["q"], limit=5)])
        return await days(store)

    async def days(store: Any) -> list[str]:
        found = await store.runner.run(lambda again: partitions.partitions(store.dialect), Mode.READ)
        return [one.name for one in found]

    before = with_store(url, settle_then, clock=clock)
    (day,) = [name for name in before if f"{as_datetime(clock.now()):%Y%m%d}" in name]
    one = exporter(tmp_path / "lake", url)
    one.open()
    assert purge(url) == 0 and day in with_store(url, days)
    one.export()
    one.close()
    assert purge(url) == 5
    assert len(ids(lake_rows(tmp_path / "lake"))) == 5
    assert day not in with_store(url, days)
