"""Arrow tables are written to each database in its fastest way."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import millpond
from millpond.errors import BatchChanged, Unreachable
from millpond.seam.arrow import PartWriter
from millpond.seam.bulk import Batch
from millpond.seam.operations import Row
from millpond.spark.write.messages import layout, messages
from millpond.transports import open_part_writer, open_writer
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
    with_store(url, lambda store: store.operations.count(), migrate=True)
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


def part_writer(url: Url, batch: Batch, number: int, **options: Any) -> PartWriter:
    writer = open_part_writer(url.raw, batch, number, **options)
    assert writer is not None
    return writer


def live(url: Url) -> list[Row]:
    rows: list[Row] = with_store(url.raw, lambda store: store.operations.browse(QUEUE, limit=1000))
    return rows


def test_lots_are_loaded_and_published(url: Url) -> None:
    with open_writer(url.raw, **PLACE) as writer:
        lots = {writer.load(BATCH, table(10)): 10, writer.load(BATCH, table(5, 10)): 5}
    assert live(url) == []
    with_store(url.raw, lambda store: store.bulk.publish(BATCH, lots))
    assert sorted(int(row.payload) for row in live(url)) == list(range(15))
    assert all(row.priority == 50 and row.due_us == row.created_us for row in live(url))


def test_a_lost_connection_is_mended(postgres: Url) -> None:
    with open_writer(postgres.raw, **PLACE) as writer:
        writer.load(BATCH, table(1))
        with psycopg.connect(postgres.raw, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND datname = current_database()"
            )
        lot = writer.load(BATCH, table(2))
    assert with_store(postgres.raw, lambda store: store.bulk.publish(BATCH, {lot: 2})).new == 2


def test_a_part_is_published_in_one_transaction_and_once(postgres: Url) -> None:
    with part_writer(postgres, BATCH, 3, **PLACE) as part:
        part.load(table(10))
        part.load(table(5, 10))
        assert live(postgres) == []
        written = part.commit([QUEUE])
    assert (written.rows, written.new, written.again) == (15, 15, False)
    with part_writer(postgres, BATCH, 3, **PLACE) as part:
        part.load(table(15, 100))
        assert part.commit([QUEUE]).again
    with part_writer(postgres, BATCH, 3, **PLACE) as part:
        part.load(table(14))
        with pytest.raises(BatchChanged):
            part.commit([QUEUE])
    with part_writer(postgres, BATCH, 4, **PLACE) as part:
        part.load(table(1))
    with_store(postgres.raw, lambda store: store.bulk.publish(BATCH, {}))
    with part_writer(postgres, BATCH, 4, **PLACE) as part:
        part.load(table(1))
        assert part.commit([]).again, "the whole batch is done"
    assert sorted(int(row.payload) for row in live(postgres)) == list(range(15))


def test_of_two_who_write_a_part_the_first_to_commit_has_published_it(postgres: Url) -> None:
    """A slow task and its speculative copy."""
    with part_writer(postgres, BATCH, 0, **PLACE) as slow, part_writer(postgres, BATCH, 0, **PLACE) as quick:
        slow.load(table(5))
        quick.load(table(5))
        assert quick.commit([QUEUE]).new == 5
        assert slow.commit([QUEUE]).again
    assert sorted(int(row.payload) for row in live(postgres)) == list(range(5))


def test_behind_a_pooler(postgres_server: Postgres, postgres: Url) -> None:
    """Each transaction may run in another session."""
    with PgBouncer(postgres_server, pool_size=2) as bouncer:
        url = Url(bouncer.url_of(postgres.path.removeprefix("/")))
        with open_writer(url.raw, **PLACE) as one, open_writer(url.raw, **PLACE) as other:
            lots = {writer.load(BATCH, table(3)): 3 for writer in (one, other, one)}
        with part_writer(url, Batch("parts"), 0, **PLACE) as part:
            part.load(table(3))
            part.commit([QUEUE])
        with_store(url.raw, lambda store: store.bulk.publish(BATCH, lots), pooler=True)
    assert len(live(postgres)) == 12


def test_nothing_answers(postgres: Url) -> None:
    nowhere = "postgresql://user:hidden-word@127.0.0.1:1/shop"
    for open_ in (open_writer, lambda url, **options: part_writer(Url(url), BATCH, 0, **options)):
        with pytest.raises(Unreachable) as error:
            open_(nowhere, **PLACE)
        assert "hidden-word" not in str(error.value)
