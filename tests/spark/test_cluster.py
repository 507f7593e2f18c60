"""On a real cluster: executors are separate processes that import the package and connect by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servers import SparkCluster
from tests.spark.ponds import fill, rows
from tests.spark.write.test_sink import left

pytestmark = [pytest.mark.slow, pytest.mark.long]

JOB = """
import json, os, signal, sys, time
import millpond.spark
from millpond.spark.source import MillpondSource
from pyspark import TaskContext

master, settings, url, file, folder = json.loads(sys.argv[1])
spark = millpond.spark.session("cluster", master, settings)
read = spark.read.format("millpond").options(url=url, table="archive", minPartitions="4")
found = read.load().where("state = 'COMPLETED'").select("id").collect()
try:
    spark.read.format("millpond").options(url=file).load().collect()
    refused = ""
except Exception as e:
    refused = str(e)

def slow(batches):
    task = TaskContext.get()
    if task.partitionId() == 0 and task.attemptNumber() == 0:
        time.sleep(600)  # longer than the test: only its copy can end
    yield from batches

class Dying(MillpondSource):
    @classmethod
    def name(cls):
        return "dying"

    def writer(self, schema, overwrite):
        from millpond.spark.write.sink import BatchWriter

        class Writer(BatchWriter):
            def write(self, iterator):
                loaded = super().write(iterator)
                task = TaskContext.get()
                if task.partitionId() == 1 and task.attemptNumber() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return loaded

        return Writer(self.options, schema, overwrite)

spark.dataSource.register(Dying)
frame = spark.range(0, 400, 1, 4).selectExpr("cast(id as string) as payload").mapInArrow(slow, "payload string")
for atomic in ("true", "false"):
    options = {"url": url, "queue": f"atomic {atomic}", "atomic": atomic}
    frame.write.format("dying").mode("append").options(**options).save()

stream = spark.readStream.format("millpond").options(url=url, queue="atomic true", stream="s", minPartitions="2")
stream.option("maxMessagesPerTrigger", 250).load().select("payload").writeStream.format("millpond").options(
    url=url, queue="out", checkpointLocation=folder
).trigger(availableNow=True).start().awaitTermination()
print(json.dumps([sorted(row.id for row in found), refused]))
spark.stop()
"""
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1",
}


def on_cluster(script: str, *arguments: Any, timeout: float = 250) -> Any:
    """Run a script in a separate process; its last line is the result, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(arguments)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_executors_read_and_write_the_database_and_no_file(
    spark_cluster: SparkCluster, postgres_url: str, tmp_path: Path
) -> None:
    fill(postgres_url)
    file = f"sqlite:///{tmp_path / 'pond.db'}"
    fill(file, ["orders"])
    before = rows(postgres_url, "archive")
    settings = spark_cluster.settings | SPECULATION
    found, refused = on_cluster(JOB, spark_cluster.url, settings, postgres_url, file, str(tmp_path / "checkpoint"))
    assert found == sorted(str(id_) for id_, row in before.items() if row.state == "COMPLETED")
    assert "is a file of one machine" in refused
    everything = sorted(str(n).encode() for n in range(400))
    live = rows(postgres_url, "messages").values()
    assert left(postgres_url) == 0
    for queue in ("atomic false", "out"):  # once, also for the task that hangs and the one that dies after its write
        assert sorted(row.payload for row in live if row.queue == queue) == everything
    assert not [row for row in live if row.queue == "atomic true"]
    done = [row for row in rows(postgres_url, "archive").values() if row.queue == "atomic true"]
    assert sorted(row.payload for row in done) == everything
