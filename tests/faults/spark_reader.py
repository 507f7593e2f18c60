"""The streaming source and sink with points at which they die. Spark's processes import this module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millpond.spark.source import MillpondSource
from millpond.spark.stream.driver import Offset, StreamDriver
from millpond.spark.stream.reader import StreamPartition, StreamReader
from millpond.spark.write.sink import StreamWriter
from tests.faults.spark_plan import Job


class DyingDriver(StreamDriver):
    async def ack(self, end: Offset) -> None:
        await self._open(end)
        pending = min(self._acked) < end["seq"]
        if pending:
            job().reach("ack", "before", end["seq"])
        await super().ack(end)
        if pending:
            job().reach("ack", "after", end["seq"])


class DyingReader(StreamReader):
    def make_driver(self) -> StreamDriver:
        return DyingDriver(self._shards, self._options)

    def latestOffset(self, start: Offset, limit: Any) -> Offset:
        latest = super().latestOffset(start, limit)
        if latest != start:
            job().reach("claim", "after", latest["seq"])
        return latest

    def partitions(self, start: Offset, end: Offset) -> list[StreamPartition]:
        parts = super().partitions(start, end)
        job().reach("partitions", "after", end["seq"])
        return parts

    def read(self, partition: Any) -> Iterator[Any]:
        for batch in super().read(partition):
            yield batch
            job().reach("read", "amid", partition.seq)

    def commit(self, end: Offset) -> None:
        job().reach("commit", "before", end["seq"])
        super().commit(end)
        job().reach("commit", "after", end["seq"])


class DyingWriter(StreamWriter):
    """Batch number n is the stream's claim n + 1."""

    def write(self, iterator: Any) -> Any:
        loaded = super().write(iterator)
        job().reach("write", "after", loaded.batch.number + 1)
        return loaded

    def commit(self, messages: Any, batchId: int) -> None:
        job().reach("publish", "before", batchId + 1)
        super().commit(messages, batchId)
        job().reach("publish", "after", batchId + 1)


class DyingSource(MillpondSource):
    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamReader(self, schema: Any) -> DyingReader:
        return DyingReader(self.options, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> DyingWriter:
        return DyingWriter(self.options, schema, overwrite)


def job() -> Job:
    return Job.of_this_process()
