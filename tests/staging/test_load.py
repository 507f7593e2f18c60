"""Tables of Arrow into each database, through its own fast way."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import millpond
from millpond.errors import BatchChanged, Unreachable
from millpond.spark.rows import layout, messages
from millpond.transport import Row
from millpond.transports.database.load import has_parts, open_loader, open_part
from millpond.transports.database.staging import Batch
from millpond.transports.url import Url
from servers import PgBouncer, Postgres

QUEUE = "loaded"
PLACE: dict[str, Any] = {"schema": None, "table_prefix": "pond_"}
BATCH = Batch('it\'s "a" job; --', 5)


@pytest.fixture(params=["postgres_url", "mariadb_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> Url:
    return migrated(request.getfixturevalue(request.param))


@pytest.fixture
def postgres(postgres_url: str) -> Url:
    return migrated(postgres_url)


def migrated(url: str) -> Url:
    with_store(url, lambda store: store.count(), migrate=True)
    return Url(url)


def with_store(url: str, do: Any, **options: Any) -> Any:
    async def run() -> Any:
        store: Any = await millpond.connect(url, **PLACE, **options)
        try:
            return await do(store)
        finally:
            await store.close()

    return asyncio.run(run())


def table(count: int, first: int = 0) -> pa.Table:
    from pyspark.sql.types import StringType, StructField, StructType

    batch = pa.RecordBatch.from_pydict({"payload": [str(n) for n in range(first, first + count)]})
    return pa.Table.from_batches(
        [messages(layout(StructType([StructField("payload", StringType())]), QUEUE), batch, 99)]
    )


def live(url: Url) -> list[Row]:
    rows: list[Row] = with_store(url.raw, lambda store: store.browse(QUEUE, limit=1000))
    return rows


def test_lots_are_loaded_and_published(url: Url) -> None:
    with open_loader(url, **PLACE) as loader:
        lots = {loader.load(BATCH, table(10)): 10, loader.load(BATCH, table(5, 10)): 5}
    assert live(url) == []
    with_store(url.raw, lambda store: store.publish_lots(BATCH, lots))
    assert sorted(int(row.payload) for row in live(url)) == list(range(15))
    assert all(row.priority == 50 and row.due_us == row.created_us for row in live(url))


def test_a_lost_connection_is_mended(postgres: Url) -> None:
    with open_loader(postgres, **PLACE) as loader:
        loader.load(BATCH, table(1))
        with psycopg.connect(postgres.raw, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND datname = current_database()"
            )
        lot = loader.load(BATCH, table(2))
    assert with_store(postgres.raw, lambda store: store.publish_lots(BATCH, {lot: 2})).new == 2


def test_a_part_is_published_in_one_transaction_and_once(postgres: Url) -> None:
    assert has_parts(postgres)
    with open_part(postgres, BATCH, 3, **PLACE) as part:
        part.load(table(10))
        part.load(table(5, 10))
        assert live(postgres) == []
        written = part.commit([QUEUE])
    assert (written.rows, written.new, written.again) == (15, 15, False)
    with open_part(postgres, BATCH, 3, **PLACE) as part:
        part.load(table(15, 100))
        assert part.commit([QUEUE]).again
    with open_part(postgres, BATCH, 3, **PLACE) as part:
        part.load(table(14))
        with pytest.raises(BatchChanged):
            part.commit([QUEUE])
    with open_part(postgres, BATCH, 4, **PLACE) as part:
        part.load(table(1))
    with_store(postgres.raw, lambda store: store.publish_lots(BATCH, {}))
    with open_part(postgres, BATCH, 4, **PLACE) as part:
        part.load(table(1))
        assert part.commit([]).again, "the whole batch is done"
    assert sorted(int(row.payload) for row in live(postgres)) == list(range(15))


def test_of_two_who_write_a_part_the_first_to_commit_has_published_it(postgres: Url) -> None:
    """As a slow task and its speculative copy do."""
    with open_part(postgres, BATCH, 0, **PLACE) as slow, open_part(postgres, BATCH, 0, **PLACE) as quick:
        slow.load(table(5))
        quick.load(table(5))
        assert quick.commit([QUEUE]).new == 5
        assert slow.commit([QUEUE]).again
    assert sorted(int(row.payload) for row in live(postgres)) == list(range(5))


def test_behind_a_pooler(postgres_server: Postgres, postgres: Url) -> None:
    """Each transaction may be in another session."""
    with PgBouncer(postgres_server, pool_size=2) as bouncer:
        url = Url(bouncer.url_of(postgres.path.removeprefix("/")))
        with open_loader(url, **PLACE) as one, open_loader(url, **PLACE) as other:
            lots = {loader.load(BATCH, table(3)): 3 for loader in (one, other, one)}
        with open_part(url, Batch("parts"), 0, **PLACE) as part:
            part.load(table(3))
            part.commit([QUEUE])
        with_store(url.raw, lambda store: store.publish_lots(BATCH, lots), pooler=True)
    assert len(live(postgres)) == 12


def test_nothing_answers(postgres: Url) -> None:
    nowhere = Url("postgresql://user:hidden-word@127.0.0.1:1/shop")
    for open_ in (open_loader, lambda url, **options: open_part(url, BATCH, 0, **options)):
        with pytest.raises(Unreachable) as error:
            open_(nowhere, **PLACE)
        assert "hidden-word" not in str(error.value)
