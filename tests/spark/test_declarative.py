"""Spark Declarative Pipelines: a table from a stream, run twice, then refreshed whole."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import millpond
from millpond import Message
from servers import SparkConnect
from tests.spark.ponds import rows

SPEC = """
name: orders
storage: file://{storage}
libraries:
  - glob:
      include: transformations/**
"""
TABLE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

@dp.table
def orders():
    options = {{"url": "{url}", "queue": "orders", "stream": "pipeline", "maxMessagesPerTrigger": "4"}}
    return SparkSession.active().readStream.format("millpond").options(**options).load()
"""


async def publish(url: str, bodies: list[bytes]) -> None:
    store: Any = await millpond.connect(url, migrate=True)
    await store.publish([Message(queue="orders", payload=body) for body in bodies])
    await store.close()


def in_table(warehouse: Path) -> list[bytes]:
    files = warehouse.rglob("*.parquet")
    return sorted(body for file in files for body in pq.read_table(file)["payload"].to_pylist())


@pytest.mark.java
@pytest.mark.long
def test_two_runs_and_a_full_refresh(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "orders.py").write_text(TABLE.format(url=sqlite_url))
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(storage=tmp_path / "storage"))
    batches = [[b"%d" % (10 * turn + n) for n in range(10)] for turn in range(3)]
    with SparkConnect() as server:  # its catalog knows the table in the second run
        program = str(Path(sys.executable).with_name("spark-pipelines"))
        command = [program, "run", "--remote", server.url, "--spec", "spark-pipeline.yml"]
        for turn, more in enumerate(([], [], ["--full-refresh-all"])):
            asyncio.run(publish(sqlite_url, batches[turn]))
            run([*command, *more], tmp_path)
            # A full refresh empties the table and the checkpoint: only messages that wait are delivered again.
            expected = batches[2] if more else [body for batch in batches[: turn + 1] for body in batch]
            assert in_table(server.folder / "warehouse") == sorted(expected)
            assert not rows(sqlite_url, "messages")
    archived = sorted(row.payload for row in rows(sqlite_url, "archive").values())
    assert archived == sorted(body for batch in batches for body in batch)


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
