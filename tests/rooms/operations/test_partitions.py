"""Partitions of the archive on PostgreSQL: made ahead, dropped as a whole, and never blocking a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from millpond import Ack, ManualClock, Transport
from millpond.transports.database.operations import operations
from tests.rooms.operations.lives import claim, complete, fail, message, publish

Connect = Callable[..., Awaitable[Transport]]

DAY = 86_400


def partitions(url: str, table: str = "millpond_archive") -> list[str]:
    with psycopg.connect(url) as raw:
        rows = raw.execute(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = %s::regclass ORDER BY 1",
            [table],
        )
        return [name.removeprefix(f"{table.split('.')[-1]}_") for (name,) in rows]


def days(first: datetime, number: int = 8) -> list[str]:
    return [f"{first + timedelta(days=n):%Y%m%d}" for n in range(number)]


@pytest.fixture
async def store(postgres_url: str, connect: Connect, clock: ManualClock) -> Transport:
    """A store with the partitions of the clock's week, as if it had been migrated then."""
    store = await connect(postgres_url)
    await store.operations.purge()
    return store


async def test_a_new_database_has_a_week_ahead(postgres_url: str, connect: Connect) -> None:
    today = datetime.now(UTC)
    await connect(postgres_url)
    made = partitions(postgres_url)
    assert set(days(today)) | {"default"} <= set(made) | set(days(today, 1))  # midnight may pass during the test


async def test_purge_keeps_a_week_ahead(store: Transport, postgres_url: str, clock: ManualClock) -> None:
    assert set(days(datetime(2026, 1, 1, tzinfo=UTC))) <= set(partitions(postgres_url))
    clock.advance(3 * DAY)
    await complete(store)
    await store.operations.purge()
    assert set(days(datetime(2026, 1, 4, tzinfo=UTC))) <= set(partitions(postgres_url))


async def test_days_that_nobody_needs_go_whole(
    store: Transport, postgres_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.advance(DAY // 2)
    await store.operations.retain("a", completed=1 * DAY, failed=2 * DAY)
    await store.operations.retain("b", completed=2 * DAY, failed=None)
    await complete(store, "a", 5)
    await fail(store, "a", 3)
    clock.advance(1 * DAY)
    await complete(store, "b", 2)
    clock.advance(2 * DAY)  # at noon of the 4th
    monkeypatch.setattr(operations, "purge_rows", _nothing_left)
    assert await store.operations.purge() == 5 + 3
    left = partitions(postgres_url)
    assert "20260101" not in left and "20260102" in left
    assert "20260103" not in left and "20260104" in left  # both are empty, and the day of one is over
    monkeypatch.undo()
    assert await store.operations.purge() == 2
    assert "20260102" in partitions(postgres_url)
    assert await store.operations.purge() == 0
    assert "20260102" not in partitions(postgres_url)


async def _nothing_left(*_: object) -> int:
    """A dropped partition replaces the deletion of its rows."""
    return 0


async def test_a_day_of_which_something_is_kept_stays(store: Transport, postgres_url: str, clock: ManualClock) -> None:
    await store.operations.retain("a", completed=1 * DAY, failed=None)
    await complete(store, "a", 5)
    (kept,) = await fail(store, "a")
    await complete(store, "no retention", 1)
    clock.advance(10 * DAY)
    assert await store.operations.purge() == 5
    assert "20260101" in partitions(postgres_url)
    assert kept in {row.id for row in await store.operations.archived()}
    assert await store.operations.purge("a", older_than=0) == 1
    assert "20260101" in partitions(postgres_url)
    assert await store.operations.purge(older_than=9 * DAY) == 1
    assert "20260101" not in partitions(postgres_url)


async def test_a_day_with_rows_in_the_default_partition_is_left_to_it(
    postgres_url: str, connect: Connect, clock: ManualClock
) -> None:
    store = await connect(postgres_url)
    ids = await complete(store, number=3)  # partitions were made for the real week, not for the clock's
    await store.operations.purge()
    made = partitions(postgres_url)
    assert "20260101" not in made and set(days(datetime(2026, 1, 2, tzinfo=UTC), 7)) <= set(made)
    assert {row.id for row in await store.operations.archived()} == set(ids)
    await complete(store)
    clock.advance(5 * DAY)
    assert await store.operations.purge(older_than=4 * DAY) == 4


async def test_many_processes_make_them_at_once(postgres_url: str, connect: Connect, clock: ManualClock) -> None:
    stores = [await connect(postgres_url) for _ in range(6)]
    await asyncio.gather(*(store.operations.purge() for store in stores))
    assert set(days(datetime(2026, 1, 1, tzinfo=UTC))) <= set(partitions(postgres_url))


async def test_several_purges_at_once_count_each_row_once(
    postgres_url: str, connect: Connect, clock: ManualClock
) -> None:
    stores = [await connect(postgres_url) for _ in range(5)]
    await stores[0].operations.purge()
    for _ in range(6):
        await complete(stores[0], number=20)
        clock.advance(1 * DAY)
    purged = await asyncio.gather(*(store.operations.purge(older_than=1 * DAY) for store in stores))
    assert sum(purged) == 6 * 20
    assert await stores[0].operations.archived() == []


async def test_a_transaction_held_open_stops_neither_purge_nor_settles(
    store: Transport, postgres_url: str, clock: ManualClock
) -> None:
    """A session reads the archive for a long time: rows are deleted one by one, and the next purge drops the day."""
    await complete(store, number=50)
    clock.advance(2 * DAY)
    await publish(store, message(), message())
    first, second = await claim(store, number=2)
    with psycopg.connect(postgres_url) as lunch:
        lunch.execute("SELECT count(*) FROM millpond_archive")
        async with asyncio.timeout(60):
            purging = asyncio.create_task(store.operations.purge(older_than=1 * DAY))
            assert await store.settle([Ack(first.receipt)]) == []
            assert await purging == 50
            assert await store.settle([Ack(second.receipt)]) == []
    assert "20260101" in partitions(postgres_url)
    assert await store.operations.purge(older_than=1 * DAY) == 0
    assert "20260101" not in partitions(postgres_url)


async def test_an_ack_that_is_not_committed_yet_is_not_lost(
    store: Transport, postgres_url: str, clock: ManualClock
) -> None:
    """Settled in a transaction that ends days later: the partition waits for it."""
    (id_,) = await publish(store, message())
    (held,) = await claim(store, lease=100 * DAY)
    async with await psycopg.AsyncConnection.connect(postgres_url) as late:
        assert await store.settle([Ack(held.receipt)], within=late) == []
        clock.advance(30 * DAY)
        assert await store.operations.purge() == 0
        assert "20260101" in partitions(postgres_url)
        await late.commit()
    assert [row.id for row in await store.operations.archived()] == [id_]


async def test_a_role_that_may_not_change_tables_purges_row_by_row(
    store: Transport, postgres_url: str, connect: Connect, clock: ManualClock
) -> None:
    await complete(store, number=5)
    with psycopg.connect(postgres_url) as admin:
        admin.execute("DROP ROLE IF EXISTS humble")
        admin.execute("CREATE ROLE humble LOGIN PASSWORD 'pie'")
        admin.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO humble")
    host = postgres_url.partition("@")[2]
    humble = await connect(f"postgresql://humble:pie@{host}", migrate=False)
    clock.advance(20 * DAY)
    assert await humble.operations.purge(older_than=0) == 5
    assert "20260121" not in partitions(postgres_url)
    await humble.close()
    with psycopg.connect(postgres_url) as admin:
        admin.execute("DROP OWNED BY humble")
        admin.execute("DROP ROLE humble")


async def test_in_a_schema_with_a_prefix(postgres_url: str, connect: Connect, clock: ManualClock) -> None:
    store = await connect(postgres_url, schema="Mill", table_prefix="Pond_")
    await store.operations.purge()
    table = '"Mill"."Pond_archive"'
    with psycopg.connect(postgres_url) as raw:
        rows = raw.execute(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", [table]
        ).fetchall()
    assert ('"Mill"."Pond_archive_20260101"',) in rows
    await complete(store, number=3)
    clock.advance(5 * DAY)
    assert await store.operations.purge(older_than=1 * DAY) == 3
