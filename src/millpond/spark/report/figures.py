"""The figures of a report: formulas for one message and for many, and their descriptions.

A test compares the descriptions with docs/reference/report.md. Durations are microseconds while Spark counts, and
seconds in the tables.
"""

from __future__ import annotations

from datetime import timedelta

from pyspark.sql import Column
from pyspark.sql import functions as f

ARCHIVE_COLUMNS = (
    "id",
    "queue",
    "state",
    "reason",
    "error",
    "deliveries",
    "attempts",
    "due_at",
    "acquired_at",
    "last_attempt_at",
    "archived_at",
)
"""Columns of settled messages that a report reads, from the lake or the archive."""
LIVE_COLUMNS = ("queue", "state", "due_at", "crashes")
"""Columns of live messages that a report reads."""

ERROR_SHOWN = 200
"""Characters of an error in a list."""
LISTED = 10
"""Number of slowest messages listed for each queue, and of poisonous ones."""
POISONOUS = 2
"""Number of unfinished deliveries from which a settled message is listed here."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SKETCH_SIZE = 2000
"""Size of a KLL sketch. Percentiles of up to this many messages are exact; of more, off by 0.25 % of the ranks."""

_EXCEPTION = r"^([A-Za-z_][A-Za-z0-9_.]{0,99})(?::|$)"


def waiting() -> Column:
    """Waiting time before the last delivery; null if the message was cancelled or never claimed."""
    return _unless_negative(f.unix_micros("acquired_at") - f.unix_micros("due_at"))


def handling() -> Column:
    """Duration of the last attempt; null if the last delivery never ran, as with expired messages."""
    return _unless_negative(f.unix_micros("last_attempt_at") - f.unix_micros("acquired_at"))


def unfinished() -> Column:
    return f.greatest(f.col("deliveries") - f.col("attempts"), f.lit(0))


def failed() -> Column:
    return f.col("state") == "FAILED"


def exception() -> Column:
    """The class that an error begins with: `ValueError: …`."""
    found = f.regexp_extract("error", _EXCEPTION, 1)
    return f.when(failed() & (found != ""), found)


def period_start(every: timedelta) -> Column:
    """Start of the period in which the message was settled; periods are counted from 1970 in UTC."""
    size = every // timedelta(microseconds=1)
    settled = f.unix_micros("archived_at")
    return f.timestamp_micros(settled - f.pmod(settled, f.lit(size)))


def _unless_negative(duration: Column) -> Column:
    return f.when(duration >= 0, duration)


def sums() -> list[Column]:
    """Sums over messages with the columns above."""
    return [
        f.count("*").alias("settled"),
        f.count_if(f.col("attempts") > 1).alias("retried"),
        f.sum(f.greatest(f.col("attempts") - 1, f.lit(0))).alias("retries"),
        f.sum(f.greatest(f.col("deliveries") - 1, f.lit(0))).alias("redeliveries"),
        f.sum("unfinished").alias("unfinished"),
        *(f.kll_sketch_agg_bigint(name, f.lit(_SKETCH_SIZE)).alias(name) for name in ("waiting", "handling")),
        *(f.max(name).alias(f"{name}_max") for name in ("waiting", "handling")),
        f.min("archived_at").alias("first_at"),
        f.max("archived_at").alias("last_at"),
    ]


def merged_sums() -> list[Column]:
    """The same over groups."""
    counted = ("settled", "retried", "retries", "redeliveries", "unfinished")
    return [
        *(f.sum(name).alias(name) for name in counted),
        f.sum(f.when(failed(), f.col("settled")).otherwise(0)).alias("failed"),
        *(f.kll_merge_agg_bigint(name, f.lit(_SKETCH_SIZE)).alias(name) for name in ("waiting", "handling")),
        *(f.max(f"{name}_max").alias(f"{name}_max") for name in ("waiting", "handling")),
        f.min("first_at").alias("first_at"),
        f.max("last_at").alias("last_at"),
    ]


def table_columns() -> list[Column]:
    """The columns of the tables, from these sums."""
    return [
        f.col("settled"),
        (f.col("settled") - f.col("failed")).alias("completed"),
        *map(f.col, ("failed", "retried", "retries", "redeliveries", "unfinished")),
        *(column for name in ("waiting", "handling") for column in _percentiles(name)),
        *map(f.col, ("first_at", "last_at")),
    ]


def _percentiles(name: str) -> list[Column]:
    # An empty sketch raises an error instead of a percentile.
    some = f.kll_sketch_get_n_bigint(name) > 0
    found = [
        (suffix, f.when(some, f.kll_sketch_get_quantile_bigint(name, f.lit(rank))))
        for suffix, rank in QUANTILES.items()
    ]
    return [seconds(value, f"{name}_{suffix}_s") for suffix, value in [*found, ("max", f.col(f"{name}_max"))]]


def seconds(micros: Column, name: str) -> Column:
    return (micros / 1e6).alias(name)


_PERCENTILES = {
    f"{time}_{suffix}_s": f"{words} of {time} time, in seconds"
    for time in ("waiting", "handling")
    for suffix, words in {"p50": "median", "p90": "90th percentile", "p99": "99th percentile", "max": "longest"}.items()
}
_SUMS = {
    "settled": "messages that were settled: COMPLETED or FAILED",
    "completed": "of them COMPLETED",
    "failed": "of them FAILED",
    "retried": "of them with more than one attempt",
    "retries": "attempts after the first, in all",
    "redeliveries": "deliveries after the first, in all: retries, and claims again after crashes",
    "unfinished": "deliveries that came to no attempt, in all: crashes, and messages that failed without running",
    **_PERCENTILES,
    "first_at": "when the first of them was settled",
    "last_at": "when the last of them was settled",
}
_QUEUE = {"queue": "the queue"}
_AT = {"at": "when the period began"}
_MESSAGE = {
    "queue": "the queue",
    "id": "the message's id",
    "state": "COMPLETED or FAILED",
    "reason": "why it FAILED",
    "error": f"the first {ERROR_SHOWN} characters of its last error",
    "deliveries": "how often it was claimed",
    "attempts": "how often a handler came to a result",
    "waiting_s": "its waiting time, in seconds",
    "handling_s": "its handling time, in seconds",
    "archived_at": "when it was settled",
}

TABLES: dict[str, dict[str, str]] = {
    "summary": {"per_second": "settled messages per second of the report's time", **_SUMS},
    "by_queue": {**_QUEUE, "per_second": "settled messages per second of the report's time", **_SUMS},
    "by_time": {**_AT, **_SUMS},
    "by_queue_and_time": {**_QUEUE, **_AT, **_SUMS},
    "failures": {
        **_QUEUE,
        "reason": "why they FAILED",
        "exception": "the class that their last error names, if any",
        "failed": "how many messages",
        "first_at": "when the first of them failed",
        "last_at": "when the last of them failed",
        "example_id": "the id of one that failed last",
        "error": f"the first {ERROR_SHOWN} characters of its last error",
    },
    "slowest": _MESSAGE,
    "poisonous": _MESSAGE,
    "backlog": {
        **_QUEUE,
        "pending": "PENDING messages",
        "processing": "PROCESSING messages",
        "retryable": "RETRYABLE messages",
        "due": "PENDING and RETRYABLE ones that are due",
        "scheduled": "PENDING and RETRYABLE ones that are not due yet",
        "suspect": "messages with two or more crashes",
        "oldest_due_at": "when the one that waits longest was due",
        "overdue_s": "how long that is ago, in seconds; null if none is due",
    },
}
"""Table -> column -> description, in order."""
