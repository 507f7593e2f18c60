"""Why a message does not run: all reasons, the one to act on first at the beginning."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from millpond.clock import SECOND, as_datetime, span_text, utc_text
from millpond.message import RETRY, State, replayed_id
from millpond.seam.diagnosis import MOST_AHEAD, Circumstances
from millpond.seam.operations import Row
from millpond.seam.workers import WorkerStatus

ORDER = (
    *("shard-missing", "unknown", "settled", "stream", "running", "worker-down", "client"),
    *("paused", "no-worker", "locked", "suspect", "expired", "not-due", "behind", "ready"),
)
"""Kinds of reasons. Those that need an action come before those that time resolves."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a message does not run."""

    kind: str
    text: str
    remedy: str = ""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons of one message. The first is the one to act on."""

    id: UUID
    queue: str | None
    state: State | None
    reasons: list[Reason]


def explain(id: UUID, facts: Circumstances) -> Why:
    row = facts.row
    if row is None:
        return Why(id=id, queue=None, state=None, reasons=[*_missing(facts), _unknown(facts)])
    if row.state in (State.COMPLETED, State.FAILED):
        reasons = [_settled(row)]
    elif row.state is State.PROCESSING:
        reasons = [_held(row, facts)]
    else:
        reasons = _waiting(row, facts)
    return Why(
        id=id, queue=row.queue, state=row.state, reasons=sorted(reasons, key=lambda reason: ORDER.index(reason.kind))
    )


def _missing(facts: Circumstances) -> list[Reason]:
    if not facts.missing:
        return []
    return [
        Reason(
            kind="shard-missing",
            text=f"it may be on a shard that does not answer: {', '.join(facts.missing)}",
            remedy="start the database of the shard; its messages wait for it",
        )
    ]


def _unknown(facts: Circumstances) -> Reason:
    if facts.remembered:
        return Reason(
            kind="unknown",
            text="a message with this id was published and is gone: settled without a copy, or its copy was purged",
            remedy="publish it under another id; this one is remembered, and a second publish would be dropped",
        )
    return Reason(
        kind="unknown",
        text="there is no message with this id: its transaction was never committed, it was purged, it was dropped "
        "because its id was used before, or it is in another database",
        remedy="check the id and the URL, and that the publisher's transaction was committed",
    )


def _settled(row: Row) -> Reason:
    at = "" if row.archived_at is None else f" at {utc_text(row.archived_at, 'seconds')}"
    if row.state is State.COMPLETED:
        return Reason(kind="settled", text=f"it was completed{at}", remedy="millpond replay publishes it again")
    why = ": ".join(text for text in (row.reason, row.error) if text)
    if row.retried:
        return Reason(
            kind="settled",
            text=f"it failed{at}, and was retried already, under a new id: {why or 'no reason was given'}",
            remedy=f"millpond why {replayed_id(row.id, RETRY)}",
        )
    return Reason(
        kind="settled", text=f"it failed{at}: {why or 'no reason was given'}", remedy=f"millpond retry {row.id}"
    )


def _held(row: Row, facts: Circumstances) -> Reason:
    since = _ago(row.acquired_us, facts.now_us)
    if facts.stream is not None:
        return Reason(
            kind="stream",
            text=f"the stream {facts.stream!r} has held it for {since}",
            remedy=f"if its Spark query will not return: millpond streams release {facts.stream}",
        )
    worker = facts.worker
    if worker is not None and worker.beats:
        return Reason(kind="running", text=f"the worker {worker.name} claimed it {since} ago and is alive")
    if worker is not None or facts.worker_id is not None:
        name = "a worker without a row" if worker is None else f"the worker {worker.name}"
        silent = "" if worker is None else f", and was last heard {span_text(worker.silent_for)} ago"
        return Reason(
            kind="worker-down",
            text=f"{name} claimed it {since} ago{silent}",
            remedy="any other worker gives it back soon; start one, or run: millpond run",
        )
    until = "" if row.lease_at is None else f", until {utc_text(row.lease_at, 'seconds')}"
    return Reason(
        kind="client",
        text=f"a client of the server, or a program without a worker, claimed it {since} ago{until}",
        remedy="it comes back when the lease ends",
    )


def _waiting(row: Row, facts: Circumstances) -> list[Reason]:
    found = []
    if facts.paused:
        found.append(Reason(kind="paused", text="its queue is paused", remedy=f"millpond resume {row.queue}"))
    found += _no_worker(row, facts.workers)
    if facts.locked:
        found.append(
            Reason(
                kind="locked",
                text="another transaction holds a lock on its row",
                remedy="millpond doctor lists transactions that are held open",
            )
        )
    if row.suspect:
        found.append(
            Reason(
                kind="suspect",
                text=f"it crashed its worker {row.crashes} times: it runs alone, in a child process of a worker",
                remedy="look at the worker's log; millpond cancel ends it, millpond reschedule --attempts 0 clears it",
            )
        )
    if row.expires_us is not None and row.expires_us <= facts.now_us:
        found.append(
            Reason(
                kind="expired",
                text=f"it expired {_ago(row.expires_us, facts.now_us)} ago: the next claim makes it FAILED",
            )
        )
    if row.due_us > facts.now_us:
        wait = (row.due_us - facts.now_us) / SECOND
        attempts = f"{row.attempts} failed attempt{'' if row.attempts == 1 else 's'}"
        cause = f" after {attempts}" if row.state is State.RETRYABLE else ""
        cause += f": {row.error}" if cause and row.error else ""
        found.append(
            Reason(
                kind="not-due",
                text=f"it is due in {span_text(wait)}, at {utc_text(as_datetime(row.due_us), 'seconds')}{cause}",
                remedy=f"millpond reschedule {row.id} --delay 0s makes it due now",
            )
        )
    elif facts.ahead:
        number = f"{MOST_AHEAD} or more" if facts.ahead >= MOST_AHEAD else str(facts.ahead)
        found.append(
            Reason(
                kind="behind",
                text=f"{number} due messages of its queue are claimed before it",
                remedy="add workers, raise max_workers, or give it a lower priority number",
            )
        )
    if not found:
        found.append(Reason(kind="ready", text="nothing is in its way: the next claim takes it"))
    return found


def _no_worker(row: Row, workers: Sequence[WorkerStatus]) -> list[Reason]:
    """A worker that recorded no queues may consume any."""
    able = [worker for worker in workers if worker.queues is None or row.queue in worker.queues]
    if not able:
        return [
            Reason(
                kind="no-worker",
                text=f"no worker and no gRPC stream consumes the queue {row.queue!r}",
                remedy="start a worker of this queue: millpond run MODULE:POND; clients of HTTP and SQL "
                "are not recorded",
            )
        ]
    if any(worker.beats for worker in able):
        return []
    silent = min(worker.silent_for for worker in able)
    return [
        Reason(
            kind="no-worker",
            text=f"no worker of the queue {row.queue!r} is alive; the last was heard {span_text(silent)} ago",
            remedy="start one, and look at the log of the last one",
        )
    ]


def _ago(us: int | None, now_us: int) -> str:
    return "some time" if us is None else span_text(max(0, now_us - us) / SECOND)
