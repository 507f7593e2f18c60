"""The diagnosis room: the circumstances of one message, and the state of the database around the queue."""

from __future__ import annotations

from typing import Literal, Protocol
from uuid import UUID

import msgspec

from millpond.seam.operations import Row
from millpond.seam.workers import WorkerStatus

MOST_AHEAD = 1000
"""Messages before one in its queue that are counted."""

Severity = Literal["error", "warning"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that hurts the queue, or soon will."""

    kind: str
    """A short name for programs, e.g. `held-transaction`."""
    severity: Severity
    text: str
    remedy: str


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that decide whether a message runs, read together."""

    row: Row | None
    now_us: int
    remembered: bool = False
    """Its id was given by a caller and is remembered, although there is no such message."""
    paused: bool = False
    ahead: int = 0
    """Due messages that are claimed before it, counted up to `MOST_AHEAD`."""
    locked: bool = False
    """Another transaction holds a lock on it."""
    worker_id: int | None = None
    """The worker that has claimed it; None: none, or a client without a worker."""
    workers: tuple[WorkerStatus, ...] = ()
    """Workers of the database that has the message, while it is live: those of other shards do not help it."""
    stream: str | None = None
    """The stream that holds it."""
    missing: tuple[str, ...] = ()
    """Shards that did not answer. The message may be on one of them."""

    @property
    def worker(self) -> WorkerStatus | None:
        """The row of the worker that has claimed it, if it has one."""
        return next((status for status in self.workers if status.id == self.worker_id), None)


class ShardHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A shard as an operator sees it."""

    name: str
    key_ranges: tuple[str, ...]
    answers: bool
    seconds: float | None = None
    """Time of its answer: a slow shard shows here."""
    live: int | None = None
    """Messages that wait or run: a hot shard shows here."""


class Diagnosis(Protocol):
    """Read the reasons of delays. Nothing is changed."""

    async def circumstances(self, id: UUID) -> Circumstances: ...

    async def shards(self) -> list[ShardHealth]:
        """The shards of a pond of several databases, in the order of its map; none of one database."""

    async def examine(self) -> list[Finding]:
        """Examine the database: held transactions, dead rows, clocks, versions, partitions, sessions."""
