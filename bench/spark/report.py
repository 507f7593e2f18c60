"""A report on a large lake: the number of passes over the messages, and its time relative to one full scan."""

import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measure import Measurement, Work, ratio, single, take_turns
from bench.spark.passes import records_read
from bench.spark.setup import PAYLOAD, Setup
from millpond.spark.report import ARCHIVE_COLUMNS, report

ROWS = 5_000_000
"""Default size of the lake; larger than in the other measurements."""
DAYS, QUEUES = 7, 5
_MICROS = f"{DAYS} * 86400000000"
# Waiting and handling times from a millisecond to minutes; one in twenty fails, one in ten has been retried.
_MESSAGES = f"""
SELECT uuid() AS id, concat('queue-', id % {QUEUES}) AS queue, if(id % 20 = 0, 'FAILED', 'COMPLETED') AS state,
if(id % 20 = 0, 'retries used up', NULL) AS reason,
if(id % 20 = 0, concat('TimeoutError: no answer for order ', id), NULL) AS error,
if(id % 10 = 0, 3, 1) AS deliveries, if(id % 10 = 0, 3, 1) AS attempts,
timestamp_micros(due) AS due_at, timestamp_micros(due + waited) AS acquired_at,
timestamp_micros(due + waited + ran) AS last_attempt_at, timestamp_micros(due + waited + ran) AS archived_at,
cast(repeat('x', {PAYLOAD}) AS binary) AS payload
FROM (SELECT id, 1767225600000000 + cast(id * ({_MICROS} / :rows) AS bigint) AS due,
cast(exp(rand(1) * 11) * 1000 AS bigint) AS waited, cast(exp(rand(2) * 9) * 1000 AS bigint) AS ran FROM range(:rows))
"""


async def measure_report(setup: Setup, rows: int, rounds: int) -> list[Measurement]:
    """Both sides read the columns of a report from the same files; the first round is a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "lake")
        setup.spark.sql(_MESSAGES, args={"rows": rows}).write.parquet(path)
        messages = setup.spark.read.parquet(path)
        with records_read(setup.spark) as read:
            found = report(messages)
        assert found.rows("summary")[0]["settled"] == rows
        scan = messages.select(*ARCHIVE_COLUMNS)
        took = await take_turns(
            {
                "report": _timed(lambda: report(messages)),
                "scan": _timed(lambda: scan.write.format("noop").mode("overwrite").save()),
            },
            rounds + 1,
        )
    passes = read[0] / rows
    return [
        single(
            "spark-report-passes",
            f"records read for a report of {rows:,} messages",
            "its messages",
            passes,
            "ratio",
            # The rest are its own groups.
            at_most=1.01,
        ),
        ratio(
            "spark-report",
            f"report of {rows:,} messages in a lake",
            "one full scan of the same columns into nothing",
            took["report"][1:],
            took["scan"][1:],
            rows,
        ),
    ]


def _timed(work: Any) -> Work:
    async def timed() -> float:
        began = time.monotonic()
        work()
        return time.monotonic() - began

    return timed
