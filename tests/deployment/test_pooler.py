"""Behind PgBouncer in transaction mode, where two transactions of one client may be in two sessions."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

import millpond
from millpond import Ack, Message
from millpond.errors import InvalidOption
from millpond.spark.columns import batch_columns, spark_schema
from millpond.spark.read.batch import BatchReader
from servers import PgBouncer, Postgres
from tests.cli.conftest import Cli, cli
from tests.conftest import fresh_name
from tests.deployment.work import everything_at_once
from tests.rooms.streams.engine import Checkpoint, Engine, Life
from tests.rooms.streams.pond import Pond, Shards
from tests.spark.cached_readers import close_cached
from tests.spark.lake.conftest import soon
from tests.spark.lake.here import export, lake_rows
from tests.spark.ponds import fill

__all__ = ["cli", "soon"]


@pytest.fixture(scope="module")
def bouncer(postgres_server: Postgres) -> Iterator[PgBouncer]:
    # Fewer sessions than clients: each session changes its client all the time.
    with PgBouncer(postgres_server, pool_size=3) as bouncer:
        yield bouncer


async def test_twenty_tasks_over_five_connections(bouncer: PgBouncer, postgres_url: str) -> None:
    url = bouncer.url_of(postgres_url.rpartition("/")[2])
    store = await millpond.connect(url, pooler=True, pool_size=5, migrate=True)
    await everything_at_once(store, 20)
    await store.close()


async def test_several_stores_share_the_sessions(bouncer: PgBouncer, postgres_url: str) -> None:
    """Each client knows other prepared statements; that must not matter."""
    url = bouncer.url_of(postgres_url.rpartition("/")[2])
    first = await millpond.connect(url, pooler=True, migrate=True)
    others = [await millpond.connect(url, pooler=True) for _ in range(3)]
    messages = [Message(queue="q", payload=bytes([n])) for n in range(200)]
    await asyncio.gather(*(store.publish(messages[n::4]) for n, store in enumerate((first, *others))))

    async def drain(store: millpond.Transport) -> list[int]:
        done: list[int] = []
        while claims := await store.claim(["q"], limit=7):
            assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
            done += [claim.message.payload[0] for claim in claims]
        return done

    drained = await asyncio.gather(*(drain(store) for store in (first, *others)))
    assert sorted(n for done in drained for n in done) == list(range(200))
    for store in (first, *others):
        await store.close()


async def test_settings_do_not_stay_on_shared_sessions(bouncer: PgBouncer, postgres_url: str) -> None:
    url = bouncer.url_of(postgres_url.rpartition("/")[2])
    store = await millpond.connect(url, pooler=True, migrate=True)
    await everything_at_once(store, 5)
    await store.close()
    text = "SELECT setting FROM pg_settings WHERE name IN ('lock_timeout', 'enable_seqscan', 'plan_cache_mode')"
    for _ in range(5):
        connection = await asyncpg.connect(url, statement_cache_size=0)
        assert {row[0] for row in await connection.fetch(text)} == {"0", "on", "auto"}
        await connection.close()


async def test_the_pooler_restarts(postgres_server: Postgres, postgres_url: str) -> None:
    with PgBouncer(postgres_server) as own:
        store = await millpond.connect(own.url_of(postgres_url.rpartition("/")[2]), pooler=True, migrate=True)
        await everything_at_once(store, 3)
        own.kill()
        call = asyncio.create_task(store.publish([Message(queue="q", payload=b"x")]))
        await asyncio.to_thread(own.start)
        assert (await call)[0].new
        await store.close()


def test_a_stream_and_reads_of_spark(bouncer: PgBouncer, postgres_url: str) -> None:
    """The driver of a stream and its tasks, without a JVM; the same code runs in Spark."""
    url = bouncer.url_of(postgres_url.rpartition("/")[2])
    shards = Shards([postgres_url])
    try:
        pond, chance, checkpoint = Pond(shards), random.Random(1), Checkpoint()
        pond.publish(100)
        options = {**pond.options, "url": url}
        engine = Engine(options, checkpoint, Life(chance), chance)
        with pytest.raises(InvalidOption, match="the option pooler=true"):
            engine.run()
        engine.close()
        engine = Engine({**options, "pooler": "true", "maxConnections": "1"}, checkpoint, Life(chance), chance)
        engine.run()
        engine.close()
        pond.exactly_once(checkpoint)
        columns = spark_schema(batch_columns("archive"))
        read = BatchReader({"url": url, "table": "archive", "maxConnections": "1", "minPartitions": "4"}, columns)
        (part,) = read.partitions()
        assert sum(batch.num_rows for batch in read.read(part)) == 100
    finally:
        shards.close()
        close_cached()


@pytest.mark.usefixtures("soon")
def test_an_export_of_two_shards_and_the_commands_of_the_lake(
    bouncer: PgBouncer, postgres_server: Postgres, postgres_url: str, tmp_path: Path, cli: Cli
) -> None:
    """Several URLs: their shard map is read through the pooler too."""
    second = fresh_name()
    direct = [postgres_url, postgres_server.create_database(second)]
    urls = " ".join(bouncer.url_of(url.rpartition("/")[2]) for url in direct)
    for url in direct:
        fill(url, ["orders"])
    with pytest.raises(InvalidOption, match="--pooler"):
        export(tmp_path / "lake", urls)
    assert export(tmp_path / "lake", urls, pooler=True).rows == len(lake_rows(tmp_path / "lake")) == 8
    assert "pooler" in cli.fails(2, "lake", "exports", "--url", urls)
    found = cli.ok("lake", "exports", "--url", urls, "--pooler", "--json").json["exports"]
    assert [one["shard"] for one in found] == [0, 1]
    purged = cli.ok("lake", "purge", "--older-than", "0s", "--url", urls, "--pooler", "--json").json
    assert purged == {"purged": 8}
    postgres_server.drop_database(second)
