"""A write of Spark is published once and completely, or it fails and publishes nothing."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

import millpond
import millpond.spark
from millpond.seam.operations import Row
from millpond.transports.database.store import DatabaseStore
from tests.rooms.bulk.test_staging import staged

pytestmark = pytest.mark.slow_on_servers

QUEUE = "orders"


@pytest.fixture(params=["postgres_url", "mariadb_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A migrated database of each kind."""
    url: str = request.getfixturevalue(request.param)
    return migrated(url)


@pytest.fixture
def postgres(postgres_url: str) -> str:
    return migrated(postgres_url)


def migrated(url: str) -> str:
    async def migrate() -> None:
        await (await millpond.connect(url, migrate=True)).close()

    asyncio.run(migrate())
    return url


def save(frame: Any, url: str, **options: str) -> None:
    frame.write.format("millpond").mode("append").option("url", url).options(**options).save()


def live(url: str, queue: str = QUEUE) -> list[Row]:
    async def browse() -> list[Row]:
        store: Any = await millpond.connect(url)
        try:
            return list(await store.operations.browse(queue, limit=10_000))
        finally:
            await store.close()

    return asyncio.run(browse())


def payloads(url: str) -> list[int]:
    return sorted(int(row.payload) for row in live(url))


def left(url: str) -> int:
    """Number of rows in the staging tables."""

    async def look() -> int:
        store: Any = await millpond.connect(url)
        assert isinstance(store, DatabaseStore)
        try:
            return await staged(store)
        finally:
            await store.close()

    return asyncio.run(look())


def numbers(spark: Any, count: int, partitions: int = 2) -> Any:
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) as payload")


# --- messages -------------------------------------------------------------------------------------------


def test_columns_become_messages(spark: Any, url: str) -> None:
    given = uuid4()
    frame = spark.sql(
        f"""SELECT '{given}' AS id, '{QUEUE}' AS queue, 'customer-7' AS key, 10 AS priority,
        timestamp '2036-01-02 03:04:05' AS due_at, map('trace', 'x', 'naïve', null) AS headers,
        unhex('00ff') AS payload
        UNION ALL SELECT null, '{QUEUE}', null, null, null, null, binary('plain')"""
    )
    save(frame, url)
    plain, full = sorted(live(url), key=lambda row: row.payload, reverse=True)
    assert (full.id, full.key, full.priority, full.payload) == (given, "customer-7", 10, b"\x00\xff")
    assert full.due_at == datetime(2036, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert dict(full.headers) == {"trace": "x", "naïve": None}
    assert (plain.key, plain.priority, plain.payload, dict(plain.headers)) == (None, 50, b"plain", {})
    assert plain.due_us == plain.created_us
    assert plain.id.version == 7
    assert left(url) == 0


def test_other_columns_are_a_json_body(spark: Any, postgres: str) -> None:
    frame = spark.sql(
        "SELECT 'k' AS key, 7 AS sku, 'é' AS name, cast(1.50 AS decimal(5,2)) AS price, array(1, 2) AS sizes, "
        "named_struct('a', map('x', 1)) AS more, cast(null AS string) AS nothing, date '2026-01-02' AS day"
    )
    save(frame, postgres, queue=QUEUE)
    (row,) = live(postgres)
    assert row.key == "k"
    assert row.payload.decode() == (
        '{"sku":7,"name":"é","price":"1.50","sizes":[1,2],"more":{"a":{"x":1}},"nothing":null,"day":"2026-01-02"}'
    )


def test_what_our_source_reads_can_be_written_again(spark: Any, postgres: str) -> None:
    save(spark.sql("SELECT map('a', 'b') AS headers, 'x' AS payload, 5 AS priority"), postgres, queue=QUEUE)
    read = spark.read.format("millpond").option("url", postgres).load()
    save(read.select("key", "priority", "headers", "payload"), postgres, queue="other")
    (row,) = live(postgres, "other")
    assert (row.payload, row.priority, dict(row.headers)) == (b"x", 5, {"a": "b"})


def test_given_ids_are_published_once(spark: Any, postgres: str) -> None:
    one, other = str(uuid4()), str(uuid4())
    frame = spark.createDataFrame([(one, "1"), (other, "2"), (one, "3")], "id string, payload string").repartition(3)
    save(frame, postgres, queue=QUEUE)
    save(frame, postgres, queue=QUEUE, atomic="false")
    assert sorted(row.id for row in live(postgres)) == sorted([UUID(one), UUID(other)])


# --- once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("atomic", ["true", "false"])
def test_a_named_write_is_done_once(spark: Any, url: str, atomic: str) -> None:
    frame = numbers(spark, 100)
    save(frame, url, queue=QUEUE, txn="monday", atomic=atomic)
    save(frame.repartition(5), url, queue=QUEUE, txn="monday", atomic=atomic)
    assert payloads(url) == list(range(100))
    save(frame, url, queue=QUEUE, txn="tuesday", atomic=atomic)
    save(frame, url, queue=QUEUE, atomic=atomic)
    assert len(live(url)) == 300, "without a name a write is a new one"
    assert left(url) == 0


@pytest.mark.parametrize("atomic", ["true", "false"])
def test_a_batch_of_a_stream_that_comes_again_is_published_once(
    spark: Any, postgres: str, tmp_path: Path, atomic: str
) -> None:
    """Killed between our commit and Spark's record of it; then restarted with other partitions."""
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()

    def run(partitions: int) -> None:
        frame = spark.readStream.schema("payload string").option("maxFilesPerTrigger", 1).json(str(source))
        query = (
            frame.repartition(partitions)
            .writeStream.format("millpond")
            .options(url=postgres, queue=QUEUE, atomic=atomic, checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.exception() is None

    for number in range(3):
        lines = "".join(f'{{"payload": "{n}"}}\n' for n in range(number * 10, number * 10 + 10))
        (source / f"{number}.json").write_text(lines)
    run(2)
    assert payloads(postgres) == list(range(30))
    for log in (checkpoint / "commits").glob("*2*"):
        log.unlink()
    (source / "3.json").write_text('{"payload": "30"}\n')
    run(4)
    assert payloads(postgres) == list(range(31))
    assert left(postgres) == 0


def test_each_batch_is_published_once_and_again_with_a_new_checkpoint(
    spark: Any, sqlite_url: str, tmp_path: Path
) -> None:
    """`txn()` names the writes of foreachBatch by the query, which a checkpoint keeps."""
    url, source = migrated(sqlite_url), tmp_path / "in"
    source.mkdir()
    (source / "0.json").write_text('{"payload": "0"}\n')

    def run(checkpoint: str, *, die: bool = False) -> None:
        def publish(batch: Any, batch_id: int) -> None:
            for queue in (QUEUE, "other"):
                name = millpond.spark.txn(batch, batch_id, queue)
                assert name == millpond.spark.txn(batch, batch_id, queue, checkpoint=str(tmp_path / checkpoint))
                save(batch, url, queue=queue, txn=name)
            if die:
                raise RuntimeError("dies after its writes")

        stream = spark.readStream.schema("payload string").json(str(source)).writeStream.foreachBatch(publish)
        stream = stream.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True)
        stream.start().awaitTermination()

    with pytest.raises(Exception, match="dies after its writes"):
        run("first", die=True)
    run("first")
    assert (payloads(url), len(live(url, "other"))) == ([0], 1)
    run("second")
    assert (payloads(url), len(live(url, "other"))) == ([0, 0], 2)
    with pytest.raises(millpond.Unsupported, match="foreachBatch"):
        millpond.spark.txn(numbers(spark, 1), 0)


def test_several_databases_share_a_batch(spark: Any, postgres: str, sqlite_url: str) -> None:
    urls = f"{postgres} {migrated(sqlite_url)}"
    frame = spark.range(0, 200, 1, 3).selectExpr(
        "cast(id as string) as payload", "case when id % 2 = 0 then concat('key-', id % 10) end as key"
    )
    save(frame, urls, queue=QUEUE, txn="both")
    halves = [live(one) for one in urls.split()]
    assert sorted(int(row.payload) for half in halves for row in half) == list(range(200))
    assert all(len(half) > 40 for half in halves)
    keys = [{row.key for row in half if row.key} for half in halves]
    assert not keys[0] & keys[1]
    save(frame.repartition(7), urls, queue=QUEUE, txn="both")
    assert [len(live(one)) for one in urls.split()] == [len(half) for half in halves]


# --- refused --------------------------------------------------------------------------------------------


def test_a_bad_row_leaves_nothing(spark: Any, url: str) -> None:
    frame = spark.range(0, 100, 1, 4).selectExpr("cast(id as string) as payload", "cast(id + 2 as int) as priority")
    with pytest.raises(Exception, match="priority must be from 0"):
        save(frame, url, queue=QUEUE, txn="bad")
    assert live(url) == []
    # A task that was still loading at the abort leaves an orphan, which the next commit collects.
    tracker = spark.sparkContext.statusTracker()
    while tracker.getActiveStageIds():
        time.sleep(0.01)
    save(frame.where("priority <= 100"), url, queue=QUEUE, txn="bad")
    assert len(live(url)) == 99
    assert left(url) == 0


@pytest.fixture
def refusing(sqlite_url: str) -> str:
    return migrated(sqlite_url)


def test_nothing_is_overwritten(spark: Any, refusing: str, tmp_path: Path) -> None:
    frame = numbers(spark, 1)
    with pytest.raises(Exception, match="only adds messages"):
        frame.write.format("millpond").mode("overwrite").options(url=refusing, queue=QUEUE).save()
    stream = spark.readStream.format("rate").load().selectExpr("cast(value as string) as payload")
    writer = stream.writeStream.format("millpond").options(url=refusing, queue=QUEUE)
    query = (
        writer.option("asyncProgressTrackingEnabled", "true")
        .option("checkpointLocation", str(tmp_path))
        .trigger(processingTime="0 seconds")
    )
    with pytest.raises(Exception, match=r"(?i)async.?progress"):
        query.start().awaitTermination(60)


def test_no_password_is_told(spark: Any) -> None:
    with pytest.raises(Exception, match="postgresql") as error:
        save(numbers(spark, 1), "postgresql://user:hidden-word@127.0.0.1:1/shop", queue=QUEUE)
    assert "hidden-word" not in str(error.value)
