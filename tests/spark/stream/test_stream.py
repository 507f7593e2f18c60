"""Streaming queries on a real session. Tests without a JVM are in tests/rooms/streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.functions import lit, when

import millpond
import millpond.spark
from millpond import Ack, Message, State
from millpond.spark.columns import spark_schema, stream_columns
from millpond.spark.listener import StreamListener
from millpond.spark.source import MillpondSource
from millpond.telemetry import Streamed, Telemetry
from tests.rooms.streams.engine import Checkpoint, Crash, Engine, Life

QUEUE = "o'rders, \U0001f980"


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    made: str = request.getfixturevalue(f"{request.param}_url")
    on(made, lambda store: asyncio.sleep(0))
    return made


@pytest.fixture
def postgres(postgres_url: str) -> str:
    on(postgres_url, lambda store: asyncio.sleep(0))
    return postgres_url


def on(url: str, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        store = await millpond.connect(url, migrate=True)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def publish(url: str, count: int, queue: str = "q", **fields: Any) -> list[str]:
    messages = [Message(queue=queue, payload=b"%d" % n, **fields) for n in range(count)]
    return [str(p.id) for p in on(url, lambda store: store.publish(messages))]


def counts(url: str, queue: str = "q") -> dict[State, int]:
    (stats,) = on(url, lambda store: store.operations.count([queue]))
    return {state: number for state, number in stats.counts.items() if number}


def until(done: Callable[[], bool], query: Any = None) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        assert query is None or query.isActive, query.exception()
        time.sleep(0.05)


class Query:
    """A stream of the queue `q` named `s`, into a list of batches."""

    def __init__(self, spark: Any, url: str, folder: Path, **options: str) -> None:
        self.stream(spark, url, **options)
        self._checkpoint = str(folder / f"checkpoint-{uuid4().hex[:6]}")
        self.batches: dict[int, list[Any]] = {}

    def stream(self, spark: Any, url: str, **options: str) -> Query:
        given = {"url": url, "queue": "q", "stream": "s", **options}
        self._stream = spark.readStream.format("millpond").options(**given).load()
        return self

    def start(self, each: Callable[[Any, int], None] | None = None, **trigger: Any) -> Any:
        def batch(frame: Any, number: int) -> None:
            self.batches[number] = frame.collect()
            if each is not None:
                each(frame, number)

        writer = self._stream.writeStream.foreachBatch(batch).option("checkpointLocation", self._checkpoint)
        return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    def run(self, each: Callable[[Any, int], None] | None = None) -> None:
        """Process all available messages, then stop.

        Spark gives the Python process of a source ten seconds to start. On a busy machine it may need another try.
        """
        for tries_left in (2, 1, 0):
            try:
                self.start(each, availableNow=True).awaitTermination(150)
                return
            except StreamingQueryException as e:
                if not tries_left or "Python worker failed to connect back" not in str(e):
                    raise

    @property
    def ids(self) -> list[str]:
        return [row.id for number in sorted(self.batches) for row in self.batches[number]]


@pytest.mark.slow_on_servers
def test_every_column_of_every_message_and_nothing_left_claimed(spark: Any, url: str, tmp_path: Path) -> None:
    messages = [
        Message(
            queue=QUEUE,
            key=None if n % 3 == 0 else f"key {n} ü",
            priority=n,
            payload=bytes([n]) * n,
            headers={"n": n} if n % 2 else {},
        )
        for n in range(25)
    ]
    published = on(url, lambda store: store.publish(messages))
    query = Query(spark, url, tmp_path, queue=f'["{QUEUE}", "other"]', maxMessagesPerTrigger="10", minPartitions="3")
    query.run()
    assert {number: len(rows) for number, rows in query.batches.items()} == {0: 10, 1: 10, 2: 5}
    stored = {str(row.id): row for row in on(url, lambda store: store.operations.archived(QUEUE, limit=100))}
    assert sorted(query.ids) == sorted(str(p.id) for p in published) == sorted(stored)
    for rows in query.batches.values():
        for row in rows:
            wanted = stored[row.id]
            assert (row.queue, row.key, bytes(row.payload)) == (wanted.queue, wanted.key, wanted.payload)
            assert (row.priority, row.deliveries, row.shard) == (wanted.priority, 1, 0)
            assert row.headers == (f'{{"n":{wanted.headers["n"]}}}' if wanted.headers else None)
            assert row.created_at.astimezone(UTC) == wanted.created_at
            assert row.claimed_at.astimezone(UTC) == wanted.acquired_at
    assert counts(url, QUEUE) == {State.COMPLETED: 25}
    (status,) = on(url, lambda store: store.streams.status())
    assert (status.held, status.acked_seq) == (0, 3)
    publish(url, 2, QUEUE)
    query.run()
    assert len(query.ids) == 27, "a restart goes on where it ended"


@pytest.mark.long
def test_an_idle_query_acknowledges_its_last_batch(spark: Any, postgres: str, tmp_path: Path) -> None:
    publish(postgres, 7)
    seen: list[Streamed] = []
    telemetry = Telemetry()
    telemetry.subscribe(seen.append, Streamed)  # type: ignore[arg-type]
    listener = StreamListener(telemetry)
    spark.streams.addListener(listener)
    query = Query(spark, postgres, tmp_path, includeHeaders="false")
    running = query.start()
    try:
        until(lambda: counts(postgres) == {State.COMPLETED: 7}, running)
        assert "headers" not in query.batches[0][0].asDict()
        publish(postgres, 3)
        until(lambda: counts(postgres) == {State.COMPLETED: 10}, running)
        until(lambda: sum(event.count for event in seen) == 10, running)
        assert {event.stream for event in seen} == {"s"}
    finally:
        running.stop()
        spark.streams.removeListener(listener)
    assert len(query.ids) == len(set(query.ids)) == 10


def test_outcomes_of_a_job_are_applied_when_its_batch_is_committed(spark: Any, postgres: str, tmp_path: Path) -> None:
    url = postgres
    ids = publish(url, 8)
    query = Query(spark, url, tmp_path, ackMode="manual", unsettled="nack", minPartitions="2")
    strangers: list[Any] = []

    def decide(frame: Any, number: int) -> None:
        decided = frame.where(frame.id != ids[7]).select(
            "id",
            when(frame.id == ids[0], "reject").when(frame.id == ids[1], "nack").otherwise("ack").alias("outcome"),
            when(frame.id == ids[1], lit(3600)).alias("delay"),
            when(frame.id == ids[0], lit("no stock")).alias("reason"),
        )
        result = millpond.spark.settle(
            decided.union(spark.createDataFrame([(str(uuid4()), "ack", None, None)], decided.schema)),
            stream="s",
            url=url,
        )
        strangers.append((result.recorded, len(result.unknown)))
        if len(strangers) == 1:
            raise RuntimeError("the job dies after it has decided")

    with pytest.raises(StreamingQueryException, match="the job dies"):
        query.run(decide)
    assert counts(url) == {State.PROCESSING: 8}
    first = sorted(query.ids)
    query.run(decide)
    assert sorted(query.ids) == first, "a replay reads the same rows, whatever was decided before"
    assert strangers == [(7, 1), (7, 1)]
    rows = {str(row.id): row for row in on(url, lambda store: store.operations.find([UUID(id_) for id_ in ids]))}
    assert (rows[ids[0]].state, rows[ids[0]].reason) == (State.FAILED, "no stock")
    assert rows[ids[1]].state is State.RETRYABLE and rows[ids[1]].due_us - rows[ids[1]].last_attempt_us == 3_600_000_000
    assert rows[ids[7]].state is State.RETRYABLE
    assert {rows[id_].state for id_ in ids[2:7]} == {State.COMPLETED}
    assert {(row.deliveries, row.attempts) for row in rows.values()} == {(1, 1)}


@pytest.mark.long
def test_a_released_batch_is_told_and_then_gone_without(spark: Any, postgres: str, tmp_path: Path) -> None:
    ids = publish(postgres, 6)
    query = Query(spark, postgres, tmp_path)

    def die(frame: Any, number: int) -> None:
        raise RuntimeError("the job dies")

    with pytest.raises(StreamingQueryException, match="the job dies"):
        query.run(die)
    assert on(postgres, lambda store: store.streams.release("s")) == 6
    query.batches.clear()
    with pytest.raises(StreamingQueryException, match="failOnDataLoss=false"):
        query.run()
    assert counts(postgres) == {State.PENDING: 6}
    query.stream(spark, postgres, failOnDataLoss="false").run()
    assert {number: len(rows) for number, rows in query.batches.items()} == {0: 0, 1: 6}
    assert sorted(query.ids) == sorted(ids)


@pytest.mark.long
def test_a_stream_over_two_databases(spark: Any, postgres: str, sqlite_url: str, tmp_path: Path) -> None:
    ids = {0: publish(postgres, 30), 1: publish(sqlite_url, 10)}
    query = Query(spark, f"{postgres} {sqlite_url}", tmp_path, maxMessagesPerTrigger="16")
    query.run()
    rows = [row for batch in query.batches.values() for row in batch]
    assert len(rows) == 40
    assert {shard: sorted(row.id for row in rows if row.shard == shard) for shard in ids} == ids
    assert counts(postgres) == {State.COMPLETED: 30}
    assert counts(sqlite_url) == {State.COMPLETED: 10}


@pytest.mark.slow
def test_a_second_query_is_refused_while_the_first_has_a_batch(spark: Any, postgres: str, tmp_path: Path) -> None:
    """No message is in two sinks, and the first query goes on; between two batches the second takes over."""
    publish(postgres, 5)
    first, second, go_on = Query(spark, postgres, tmp_path), Query(spark, postgres, tmp_path), threading.Event()
    running = first.start(lambda frame, number: assert_(go_on.wait(300)))
    until(lambda: 0 in first.batches, running)
    with pytest.raises(StreamingQueryException, match="the open batch of another checkpoint"):
        second.run()
    go_on.set()
    until(lambda: counts(postgres) == {State.COMPLETED: 5}, running)
    second.run()  # an empty batch
    with pytest.raises(StreamingQueryException, match=r"stream 's'.*opened by another"):
        running.awaitTermination(120)
    publish(postgres, 5)
    second.run()
    assert len(first.ids) + len(second.ids) == len(set(first.ids) | set(second.ids)) == 10
    assert counts(postgres) == {State.COMPLETED: 10}


def assert_(true: bool) -> None:
    assert true


@pytest.mark.slow
def test_workers_and_a_stream_share_a_queue(spark: Any, postgres: str, tmp_path: Path) -> None:
    ids = publish(postgres, 20)
    query = Query(spark, postgres, tmp_path, maxMessagesPerTrigger="20")
    running = query.start()
    worked: list[str] = []

    async def work(store: Any) -> None:
        while len(worked) < 100 and (claims := await store.claim(["q"], 5)):
            worked.extend(str(claim.receipt.id) for claim in claims)
            assert await store.settle([Ack(claim.receipt) for claim in claims]) == []

    try:
        until(lambda: len(query.batches) > 0, running)
        ids += publish(postgres, 200)
        on(postgres, work)
        until(lambda: counts(postgres) == {State.COMPLETED: 220}, running)
    finally:
        running.stop()
    assert worked and len(query.ids) > 20
    assert sorted(worked + query.ids) == sorted(ids)


# --- the order of calls -----------------------------------------------------------------------------------


def traced(base: Any, file: str) -> Any:
    """A reader that records each call of the engine, with the numbers of its offsets."""

    class Traced(base):  # type: ignore[misc]
        pass

    def wrap(name: str) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            numbers = [argument["seq"] for argument in arguments if isinstance(argument, dict)]
            with open(file, "a") as out:
                print(name, *numbers, file=out)
            return getattr(base, name)(self, *arguments)

        return call

    for name in ("prepareForTriggerAvailableNow", "initialOffset", "partitions", "commit"):
        setattr(Traced, name, wrap(name))
    note = wrap("latestOffset")

    def latest(self: Any, start: Any, limit: Any) -> Any:  # the engine inspects its parameters
        return note(self, start, limit)

    Traced.latestOffset = latest
    return Traced


def order(file: Path) -> Sequence[str]:
    """The calls without immediate repetitions."""
    lines = file.read_text().splitlines()
    file.unlink()
    return [line for n, line in enumerate(lines) if n == 0 or line != lines[n - 1]]


@pytest.mark.long
def test_the_simulation_makes_the_calls_that_spark_makes(spark: Any, postgres: str, tmp_path: Path) -> None:
    file = tmp_path / "calls"

    class TracedSource(MillpondSource):
        trace = str(file)

        @classmethod
        def name(cls) -> str:
            return "millpond_traced"

        def streamReader(self, schema: Any) -> Any:
            from millpond.spark.stream.reader import StreamReader

            return make(StreamReader, self.trace)(self.options, schema)

    make = traced
    spark.dataSource.register(TracedSource)
    options = {"url": postgres, "queue": "q", "stream": "real", "maxMessagesPerTrigger": "10"}
    real, checkpoint = [], Checkpoint()
    modelled = []
    model = {**options, "stream": "model", "queue": "m"}
    chance = random.Random(0)

    def each(frame: Any, number: int) -> None:
        if dies:
            raise RuntimeError("not this time")

    for count, dies in ((25, False), (0, False), (15, True), (0, False)):
        if count:
            publish(postgres, count)
            publish(postgres, count, "m")
        stream = spark.readStream.format("millpond_traced").options(**options).load()
        writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path / "real"))
        query = writer.trigger(availableNow=True).start()
        if dies:
            with pytest.raises(StreamingQueryException, match="not this time"):
                query.awaitTermination(120)
        else:
            query.awaitTermination(120)
        real.append(order(file))
        engine = Engine(model, checkpoint, Life(chance), chance)
        engine.reader = traced(type(engine.reader), str(file))(model, engine.life)
        engine.life.aim = "after the tasks" if dies else None
        with pytest.raises(Crash) if dies else contextlib.nullcontext():
            engine.run(available_now=True)
        engine.close()
        modelled.append(order(file))
    assert modelled == real
    assert spark_schema(stream_columns()) == stream.schema
