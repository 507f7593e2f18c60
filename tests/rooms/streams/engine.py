"""A model of Spark's engine: the order of its calls, its two logs, and an idempotent sink. No JVM.

The order is that of a traced query (tests/spark/stream/test_stream.py compares them). A run may die at any `step`;
there is one between any two events, also between the transactions of shards. The driver acknowledges in parallel with
the engine, at a step of each batch that is random or chosen by the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql.streaming.datasource import ReadMaxRows

from millpond.errors import StreamError, StreamFenced
from millpond.spark.columns import spark_schema, stream_columns
from millpond.spark.stream.driver import Offset, StreamDriver
from millpond.spark.stream.reader import StreamReader

FENCED_VERBS = ("open", "claim", "ack", "recorded", "hand_out")
STEPS = (
    *("after latestOffset", "offset written", "after commit", "after partitions", "after the tasks", "after the sink"),
    "commit written",
)
AS_LATE_AS_CAN_BE = "when the next batch is asked for"


class Crash(Exception):
    """The process is gone."""


class Checkpoint:
    """The durable state of a query: offsets/N, commits/N, and the rows of each batch in its sink."""

    def __init__(self) -> None:
        self.offsets: list[str] = []
        self.commits = 0
        self.sink: dict[int, list[str]] = {}

    def rows(self) -> list[str]:
        return [id_ for n in sorted(self.sink) for id_ in self.sink[n]]


class Life:
    """One process: dies at a random step, with everything in it."""

    def __init__(self, chance: random.Random, probability: float = 0.0) -> None:
        self._chance = chance
        self._probability = probability
        self.dead = False
        self.point = ""
        self.aim: str | None = None
        """Die at this point."""
        self.meanwhile: Callable[[str], Any] = lambda point: None

    def step(self, point: str) -> None:
        self.meanwhile(point)
        if not self.dead and (point == self.aim or self._chance.random() < self._probability):
            self.dead, self.point = True, point
        if self.dead:
            raise Crash(point)

    def revive(self) -> None:
        self.dead, self.aim, self._probability = False, None, 0.0
        self.meanwhile = lambda point: None


class _Store:
    """A store whose process may die before and after each transaction of a stream."""

    def __init__(self, store: Any, life: Life, shard: int) -> None:
        self.streams = _Streams(store.streams, life, shard)
        self.close = store.close


class _Streams:
    def __init__(self, streams: Any, life: Life, shard: int) -> None:
        self._streams = streams
        self._life = life
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._streams, name)
        if name not in FENCED_VERBS:
            return verb

        async def fragile(*arguments: Any, **more: Any) -> Any:
            self._life.step(f"before {name} {self._shard}")
            result = await verb(*arguments, **more)
            self._life.step(f"after {name} {self._shard}")
            return result

        return fragile


class FragileDriver(StreamDriver):
    """Acknowledges in parallel with the engine when the test lets it, at the latest when it is awaited."""

    life: Life

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._let = asyncio.Event()

    async def connect(self, shard: Any) -> Any:
        return _Store(await super().connect(shard), self.life, shard.number)

    async def latest(self, start: Offset, limit: int) -> Offset:
        self._let.set()
        try:
            return await super().latest(start, limit)
        finally:
            self._let.clear()  # the task begun just now has not run yet

    async def ack(self, end: Offset) -> None:
        if asyncio.current_task() is self._acking:
            await self._let.wait()
        await super().ack(end)

    async def ack_beside(self) -> None:
        self._let.set()
        if self._acking is not None:
            await asyncio.wait([self._acking])

    async def close(self) -> None:
        self._let.set()
        await super().close()


class FragileReader(StreamReader):
    """The product's reader, in a process that may die."""

    def __init__(self, options: dict[str, str], life: Life) -> None:
        super().__init__(options, spark_schema(stream_columns()))
        self.life = life

    def make_driver(self) -> FragileDriver:
        driver = FragileDriver(self._shards, self._options)
        driver.life = self.life
        return driver

    def ack_beside(self) -> None:
        assert isinstance(self.driver, FragileDriver)
        self._run(self.driver.ack_beside())


class Engine:
    """One run of a query: from a start, or a restart, to its end or death."""

    def __init__(self, options: dict[str, str], checkpoint: Checkpoint, life: Life, chance: random.Random) -> None:
        self.options = options
        self.checkpoint = checkpoint
        self.life = life
        self.reader = FragileReader(options, life)
        self._tasks = FragileReader(options, Life(chance))  # a copy in other processes
        self._chance = chance
        self._asked: Offset | None = None
        self.ack_at: str | None = None
        """The step at which the previous batch is acknowledged during this one; None: a random one."""
        self._acks_at = ""

    def run(self, *, available_now: bool = False, batches: int | None = None) -> None:
        """Run until nothing is due, or for a number of batches."""
        log = self.checkpoint
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        if len(log.offsets) > log.commits:
            self._batch(self._start(log.commits), json.loads(log.offsets[-1]))
        done = 0
        while batches is None or done < batches:
            start = self._asked = self._start(len(log.offsets))
            self._acks_at = self.ack_at or self._chance.choice((*STEPS, AS_LATE_AS_CAN_BE))
            end = _through_json(
                self.reader.latestOffset(start, ReadMaxRows(int(self.options["maxMessagesPerTrigger"])))
            )
            self._step("after latestOffset")
            if end == start:
                return
            self.reader.reportLatestOffset()
            log.offsets.append(json.dumps(end))
            self._step("offset written")
            if log.commits:
                self.reader.commit(json.loads(log.offsets[-2]))
                self._step("after commit")
            self._batch(self._start(log.commits), end)  # no log has the first start: it is requested again
            done += 1

    def _step(self, point: str) -> None:
        self.life.step(point)
        if point == self._acks_at:
            self.reader.ack_beside()
            if self.life.dead:
                raise Crash(self.life.point)

    def _start(self, batch: int) -> Offset:
        if batch == 0:
            return _through_json(self.reader.initialOffset())
        start: Offset = json.loads(self.checkpoint.offsets[batch - 1])
        return start

    def _batch(self, start: Offset, end: Offset) -> None:
        log, number = self.checkpoint, self.checkpoint.commits
        parts = pickle.loads(pickle.dumps(self.reader.partitions(start, end)))  # noqa: S301 - as Spark sends them
        self._step("after partitions")
        rows = [id_ for part in parts for id_ in self._task(part)]
        self._step("after the tasks")
        if number in log.sink:
            assert sorted(log.sink[number]) == sorted(rows), "a replay reads what was read before"
        log.sink[number] = rows
        self._step("after the sink")
        log.commits = number + 1
        self._step("commit written")

    def _task(self, part: Any) -> Sequence[str]:
        attempts = 2 if self._chance.random() < 0.1 else 1
        read = [
            [id_ for batch in self._tasks.read(part) for id_ in batch.column("id").to_pylist()] for _ in range(attempts)
        ]
        assert sorted(read[0]) == sorted(read[-1])
        return read[-1]

    # --- after death --------------------------------------------------------------------------------

    @property
    def was_open(self) -> bool:
        return self.reader.driver._epoch > 0

    def wake(self) -> bool:
        """Make the calls of a JVM that outlives its driver; returns whether it was fenced."""
        self.life.revive()
        try:
            self.reader.latestOffset(self._asked or self.reader.initialOffset(), ReadMaxRows(10))
        except StreamFenced:
            return True
        return False

    def close(self) -> None:
        with contextlib.suppress(Crash, StreamError):  # of the acknowledgement during the batch in which it died
            self.reader.stop()
        self._tasks.stop()


def _through_json(offset: Offset) -> Offset:
    read: Offset = json.loads(json.dumps(offset))
    return read
