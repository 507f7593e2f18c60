"""The connection that a task's process keeps for the next task."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

import millpond
from millpond.errors import StoreError
from millpond.spark.kept import close_kept, kept_fetcher
from millpond.spark.options import Options, Shard


@pytest.fixture
def shard(postgres_url: str) -> Any:
    async def migrate() -> None:
        await (await millpond.connect(postgres_url, migrate=True)).close()

    asyncio.run(migrate())
    yield Options({"url": postgres_url}, (), of="a test").shards()[0]
    close_kept()


def session(shard: Shard) -> int:
    with kept_fetcher(shard) as fetcher:
        ((pid,),) = fetcher.rows("SELECT pg_backend_pid()", {})
    return int(pid)


def test_it_is_used_again_and_rests_outside_of_a_transaction(shard: Shard) -> None:
    first = session(shard)
    assert session(shard) == first
    with psycopg.connect(shard.url.raw) as connection:
        ((state,),) = connection.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [first]).fetchall()
    assert state == "idle"


def test_one_that_the_server_ended_is_replaced(shard: Shard) -> None:
    first = session(shard)
    with psycopg.connect(shard.url.raw) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", [first])
    assert session(shard) != first


def test_after_an_error_it_is_not_kept(shard: Shard) -> None:
    first = session(shard)
    with pytest.raises(StoreError), kept_fetcher(shard) as fetcher:
        fetcher.rows("SELECT 1 / 0", {})
    assert session(shard) != first
