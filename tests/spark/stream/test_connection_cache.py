"""The reader that a task's process caches for the next task."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg
import pytest

import millpond
from millpond.errors import StoreError
from millpond.spark.connection_cache import cached_reader
from millpond.spark.options import SparkOptions, SparkShard
from millpond.transports.database.arrow.reader import DatabaseReader
from tests.spark.cached_readers import close_cached
from tests.waiting import until


@pytest.fixture
def shard(postgres_url: str) -> Any:
    async def migrate() -> None:
        await (await millpond.connect(postgres_url, migrate=True)).close()

    asyncio.run(migrate())
    yield SparkOptions({"url": postgres_url}, (), of="a test").shards()[0]
    close_cached()


def session(shard: SparkShard) -> int:
    with cached_reader(shard) as reader:
        assert isinstance(reader, DatabaseReader)
        ((pid,),) = reader.rows("SELECT pg_backend_pid()", {})
    return int(pid)


def test_it_is_used_again_and_rests_outside_of_a_transaction(shard: SparkShard) -> None:
    first = session(shard)
    assert session(shard) == first
    with psycopg.connect(shard.url.raw) as connection:
        ((state,),) = connection.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [first]).fetchall()
    assert state == "idle"


def test_one_that_the_server_ended_is_replaced(shard: SparkShard) -> None:
    first = session(shard)
    with psycopg.connect(shard.url.raw) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [first])
    assert session(shard) != first


def test_one_that_no_task_uses_is_closed_after_a_while(shard: SparkShard) -> None:
    with cached_reader(shard, idle=0.05) as reader:
        assert isinstance(reader, DatabaseReader)
        ((pid,),) = reader.rows("SELECT pg_backend_pid()", {})
    count = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    with psycopg.connect(shard.url.raw, autocommit=True) as connection:
        asyncio.run(until(lambda: connection.execute(count, [pid]).fetchone() == (0,), "the session has ended"))
    assert session(shard) != pid
    # A reader that is used again and again is not closed by the timer of an earlier use.
    for _ in range(20):
        with cached_reader(shard, idle=0.05):
            time.sleep(0.01)


def test_after_an_error_it_is_not_kept(shard: SparkShard) -> None:
    first = session(shard)
    with pytest.raises(StoreError), cached_reader(shard) as reader:
        assert isinstance(reader, DatabaseReader)
        reader.rows("SELECT 1 / 0", {})
    assert session(shard) != first


def test_a_reader_of_a_file_passes_from_thread_to_thread(sqlite_url: str) -> None:
    """One thread at a time has it."""

    async def in_threads() -> list[Any]:
        await (await millpond.connect(sqlite_url, migrate=True)).close()
        file = SparkOptions({"url": sqlite_url}, (), of="a test").shards()[0]

        def read() -> Any:
            with cached_reader(file) as reader:
                assert isinstance(reader, DatabaseReader)
                reader.rows("SELECT 1", {})
                return reader

        return [read(), await asyncio.to_thread(read)]

    here, there = asyncio.run(in_threads())
    assert here is there
    close_cached()
