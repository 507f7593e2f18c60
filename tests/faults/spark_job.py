"""A streaming query in its own process: `python -m tests.faults.spark_job`.

It starts its session, waits for the file to go, and processes the queue. A second one that waits saves its start time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import millpond.spark
from tests.faults.history import History
from tests.faults.spark_plan import DRIVER, QUEUE, STREAM, TARGET, Job
from tests.faults.spark_reader import DyingSource

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # No process outlives its test; the JVM ends with its Python process.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ[DRIVER] = str(os.getpid())
    job = Job.of_this_process()
    folder = Path(job.folder)
    history = History(folder / "history")
    spark = millpond.spark.session("faults", job.master, settings(folder) | job.settings)
    spark.dataSource.register(DyingSource)
    while not (folder / f"go-{os.getpid()}").exists():
        time.sleep(0.02)

    query = start(spark, job)
    history.write(began=True)
    query.awaitTermination()
    history.write(ended=True)


def start(spark: Any, job: Job) -> Any:
    """Start the query, on a session of this process or of a test."""
    place = Path(job.place)

    def to_files(frame: Any, number: int) -> None:
        rows = frame.selectExpr("cast(payload as string) as number", "deliveries")
        rows.write.mode("overwrite").parquet(str(place / "files" / str(number)))
        job.reach("sink", "after", number + 1)

    # Processes of a cluster do not have the plan.
    name = "dying" if job.aim else "millpond"
    stream = spark.readStream.format(name).options(
        url=job.url, queue=QUEUE, stream=STREAM, maxMessagesPerTrigger=str(job.per_trigger), minPartitions="2"
    )
    if job.sink == "files":
        writer = stream.load().writeStream.foreachBatch(to_files)
    else:
        writer = stream.load().select("payload").writeStream.format(name).options(url=job.url, queue=TARGET)
    trigger: dict[str, Any] = {"processingTime": "0 seconds"} if job.forever else {"availableNow": True}
    return writer.option("checkpointLocation", str(place / "checkpoint")).trigger(**trigger).start()


def settings(folder: Path) -> dict[str, str]:
    return {
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
    }


if __name__ == "__main__":
    main()
