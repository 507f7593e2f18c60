"""Faults around the queue: findings of the database, and of queues, workers and streams."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.clock import span_text
from millpond.message import State
from millpond.seam.diagnosis import Finding
from millpond.seam.operations import QueueStats, Row
from millpond.seam.streams import StreamStatus
from millpond.seam.workers import WorkerStatus

MANY_ARCHIVED = 100_000
"""Archived messages of a queue from which a missing retention is a finding."""
HELD_FOR = 600.0
"""Seconds after which the open claim of a stream is a finding."""
_WITHOUT_RESULT = 3
"""Deliveries without a result or a crash from which the lease of a client seems too short."""


def of_queues(queues: Sequence[QueueStats]) -> list[Finding]:
    found = []
    for stats in queues:
        kept = [
            state
            for state, keep in ((State.COMPLETED, stats.keep_completed_us), (State.FAILED, stats.keep_failed_us))
            if keep is None and stats.counts.get(state, 0) >= MANY_ARCHIVED
        ]
        if kept:
            found.append(
                Finding(
                    kind="no-retention",
                    severity="warning",
                    text=f"the archive keeps {' and '.join(kept)} messages of the queue {stats.queue!r} without end",
                    remedy=f"millpond retain {stats.queue} --completed 30d --failed 90d",
                )
            )
    return found


def of_workers(workers: Sequence[WorkerStatus]) -> list[Finding]:
    return [
        Finding(
            kind="silent-worker",
            severity="error" if worker.held else "warning",
            text=f"the worker {worker.name} was last heard {span_text(worker.silent_for)} ago, and holds "
            f"{_messages(worker.held)}",
            remedy="a living worker gives them back soon; start one, and look at the log of this one",
        )
        for worker in workers
        if not worker.beats
    ]


def of_streams(streams: Sequence[StreamStatus]) -> list[Finding]:
    return [
        Finding(
            kind="undriven-stream",
            severity="error",
            text=f"the stream {status.name!r} has held {_messages(status.held)} for {span_text(status.held_for or 0)}",
            remedy=f"start its Spark query again, or run: millpond streams release {status.name}",
        )
        for status in streams
        if (status.held_for or 0.0) > HELD_FOR
    ]


def of_messages(rows: Sequence[Row]) -> list[Finding]:
    """`rows`: some live messages."""
    again = [row for row in rows if row.deliveries - row.attempts - row.crashes > _WITHOUT_RESULT]
    if not again:
        return []
    queues = ", ".join(sorted({repr(row.queue) for row in again})[:3])
    return [
        Finding(
            kind="short-lease",
            severity="warning",
            text=f"{len(again)} messages of {queues} were delivered again and again without a result: their lease is "
            "shorter than the work, or their client leaves",
            remedy="lengthen the lease, or extend it while the work runs",
        )
    ]


def _messages(number: int) -> str:
    return f"{number:,} message{'' if number == 1 else 's'}"
