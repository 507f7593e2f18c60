"""A Spark job that is killed where it hurts. `python dying.py URL`; its process group dies with it.

Its writer is ours, with a death at one point: of a task after its write, or of the driver before its commit.
"""

import os
import signal
import sys
from typing import Any

from pyspark import TaskContext

import millpond.spark
from millpond.spark.sink import BatchWriter
from millpond.spark.source import MillpondSource

ROWS = 1000
GROUP = os.getpgrp()


class DyingTask(BatchWriter):
    def write(self, iterator: Any) -> Any:
        loaded = super().write(iterator)
        task = TaskContext.get()
        assert task is not None
        if task.partitionId() == 0 and task.attemptNumber() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return loaded


class DyingDriver(BatchWriter):
    group: int

    def commit(self, messages: Any) -> None:
        os.killpg(self.group, signal.SIGKILL)
        signal.pause()


class Dying(MillpondSource):
    @classmethod
    def name(cls) -> str:
        return "dying"

    def writer(self, schema: Any, overwrite: bool) -> Any:
        options = dict(self.options)
        dies = options.pop("dies")
        if dies == "task":
            return DyingTask(options, schema, overwrite)
        writer = DyingDriver(options, schema, overwrite)
        writer.group = int(dies)
        return writer


def main(url: str) -> None:
    spark = millpond.spark.session("dying", "local[2,3]", {"spark.driver.memory": "1g"})
    spark.dataSource.register(Dying)
    frame = spark.range(0, ROWS, 1, 3).selectExpr("cast(id as string) as payload")

    def save(queue: str, dies: str, atomic: bool = True) -> None:
        options = {"url": url, "queue": queue, "txn": queue, "dies": dies, "atomic": str(atomic).lower()}
        frame.write.format("dying").mode("append").options(**options).save()

    save("retried", "task")
    save("retried-loose", "task", atomic=False)
    print("retried", flush=True)
    save("driver", str(GROUP))


if __name__ == "__main__":
    main(sys.argv[1])
