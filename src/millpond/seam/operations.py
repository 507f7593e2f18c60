"""The operations room: messages as operators see and change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

import msgspec

from millpond import clock
from millpond.clock import Seconds
from millpond.failed_attempts import Attempt, attempts
from millpond.message import SUSPECT, Published, State
from millpond.retry import Retry
from millpond.seam.settings import QueueSettings


class Row(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A message as an operator sees it, live or archived. Times are stored in microseconds."""

    id: UUID
    queue: str
    key: str | None
    priority: int
    state: State
    headers: Mapping[str, Any]
    payload: bytes
    deliveries: int
    attempts: int
    due_us: int
    created_us: int
    expires_us: int | None = None
    first_attempt_us: int | None = None
    last_attempt_us: int | None = None
    acquired_us: int | None = None
    lease_us: int | None = None
    archived_us: int | None = None
    crashes: int = 0
    """Deliveries of a live message since its last result that ended because their worker died or hung."""
    reason: str | None = None
    error: str | None = None
    retried: bool = False
    """True if this FAILED message was published again by a retry."""
    history: str | None = None
    """Failed attempts as stored. Only `find` reads them; a page of `browse` or `archived` has None."""

    @property
    def failed_attempts(self) -> list[Attempt]:
        """The last attempts that failed, oldest first, of a message that `find` returned."""
        return attempts(self.history)

    @property
    def due_at(self) -> datetime:
        return clock.as_datetime(self.due_us)

    @property
    def created_at(self) -> datetime:
        return clock.as_datetime(self.created_us)

    @property
    def expires_at(self) -> datetime | None:
        return _datetime(self.expires_us)

    @property
    def first_attempt_at(self) -> datetime | None:
        return _datetime(self.first_attempt_us)

    @property
    def last_attempt_at(self) -> datetime | None:
        return _datetime(self.last_attempt_us)

    @property
    def acquired_at(self) -> datetime | None:
        return _datetime(self.acquired_us)

    @property
    def lease_at(self) -> datetime | None:
        """End of the lease."""
        return _datetime(self.lease_us)

    @property
    def archived_at(self) -> datetime | None:
        return _datetime(self.archived_us)

    @property
    def suspect(self) -> bool:
        """True after two crashes; such a message is claimed alone."""
        return self.crashes >= SUSPECT

    @property
    def position(self) -> tuple[Any, ...]:
        """Place of the row in `browse` or `archived`, as plain values: the argument `after` of the next page.

        Live messages are in the order of claims, queue by queue; archived ones newest first.
        """
        if self.archived_us is not None:
            return (self.archived_us, self.id)
        return (self.queue, self.suspect, self.priority, self.due_us, self.id)


def _datetime(us: int | None) -> datetime | None:
    return None if us is None else clock.as_datetime(us)


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Number of messages of a queue in each state."""

    queue: str
    counts: Mapping[State, int]
    """A state is missing if the transport cannot count it."""
    approximate: bool = False
    """True if the archive's counts stopped at the counting limit; exact counts have the rest."""
    paused: bool = False
    oldest_due_us: int | None = None
    """Due time of the message that has waited longest; None while no message is due."""
    keep_completed_us: int | None = None
    keep_failed_us: int | None = None
    """Retention of the archive; None keeps messages permanently."""
    missing: tuple[str, ...] = ()
    """Names of shards that did not answer: their messages are not counted."""
    retried: int = 0
    """FAILED messages that were published again; `counts` has the others."""


class QueueRates(msgspec.Struct, frozen=True, kw_only=True):
    """Number of messages of a queue that were archived in the last `over` seconds."""

    queue: str
    completed: int
    failed: int
    over: float
    at_us: int
    """Time of the count, by the database's clock."""
    approximate: bool = False
    """True if a count stopped at a limit: the number is then that at the rate of the newest messages."""


class SettledBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that were archived in a time of fixed length."""

    begin_us: int
    completed: int
    failed: int
    at_least: bool = False
    """True if a count stopped at the limit: there may be more."""


class QueueHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a queue that were archived in each bucket from `since_us` to `until_us`."""

    queue: str
    every_us: int
    """Length of a bucket. Buckets begin at multiples of it since 1970."""
    since_us: int
    until_us: int
    at_us: int
    """Time of the count, by the database's clock."""
    buckets: tuple[SettledBucket, ...]
    """Oldest first, without empty ones."""
    missing: tuple[str, ...] = ()
    """Names of shards that did not answer: their messages are not counted."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """FAILED messages of a queue with alike errors, without those that were published again."""

    queue: str
    fingerprint: int
    messages: int
    oldest_us: int
    newest_us: int
    id: UUID
    """The newest of them."""
    reason: str | None
    error: str | None


class Operations(Protocol):
    """Browse, count, change, purge, replay and record messages."""

    async def count(self, queues: Sequence[str] | None = None, *, exact: bool = False) -> list[QueueStats]:
        """Messages per queue and state, in a database all five; archive counts stop at a million unless `exact`.

        Without `queues`: every queue that has messages or settings, by name. With `queues`: these, in that order.
        """

    async def rates(self, queues: Sequence[str], *, over: Seconds = 60) -> list[QueueRates]:
        """Messages of these queues that were archived in the last `over` seconds."""

    async def history(
        self, queue: str, *, every: Seconds = 60, number: int = 60, until: datetime | None = None, limit: int = 100_000
    ) -> QueueHistory:
        """Messages of a queue that were archived in each of the last `number` buckets of `every` seconds.

        `until`: the last one is that before this time; None: it is the present one. At most `limit` rows of each state
        are read, newest first: with more, the reply begins later, and a bucket with more has `at_least`.
        """

    async def failures(self, queue: str | None = None, *, limit: int = 100) -> list[Failure]:
        """FAILED messages that were not published again, grouped by queue and likeness of errors, newest first."""

    async def has_queue(self, queue: str) -> bool:
        """Whether the queue has a message, live or archived, or settings. On a broker: whether it exists."""

    async def browse(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        worker: int | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        """Live messages in the order of claims, queue by queue; `after` is the `position` of the last row seen.

        `worker`: only those that this worker has claimed.
        """

    async def archived(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        failure: int | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        """Archived messages in [since, until), newest first; `after` is the `position` of the last row seen.

        `failure`: only open failures with this fingerprint.
        """

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        """These messages, live or archived; live ones first."""

    async def reschedule(
        self,
        ids: Sequence[UUID],
        *,
        priority: int | None = None,
        due_at: datetime | None = None,
        delay: Seconds | None = None,
        attempts: int | None = None,
    ) -> list[UUID]:
        """Change waiting messages; returns the ids that were changed (not those being processed).

        `attempts` sets the deliveries to the same number and the crashes to zero: the message is no longer suspect.
        """

    async def done(self, ids: Sequence[UUID], *, force: bool = False) -> list[UUID]:
        """Make waiting messages COMPLETED without running them; returns their ids.

        `force`: also claimed ones, whose receipts become stale; not those of streams.
        """

    async def mark_retried(self, ids: Sequence[UUID]) -> None:
        """Mark FAILED messages as published again: they no longer count as FAILED. `Control.retry` does it."""

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        """FAIL waiting messages without running them; returns the cancelled ids."""

    async def pause(self, queue: str) -> None:
        """Stop claims from this queue until it is resumed. Publishing continues."""

    async def resume(self, queue: str) -> None: ...

    async def retain(self, queue: str, *, completed: Seconds | None, failed: Seconds | None) -> None:
        """Set how long the archive keeps this queue's messages; None keeps them permanently."""

    async def settings(self, queues: Sequence[str] | None = None) -> list[QueueSettings]:
        """The settings of all queues that have any, by name, or of these, in that order."""

    async def configure(
        self,
        queue: str,
        *,
        lease: Seconds | msgspec.UnsetType | None = msgspec.UNSET,
        retry: Retry | msgspec.UnsetType | None = msgspec.UNSET,
        max_crashes: int | msgspec.UnsetType | None = msgspec.UNSET,
        max_deliveries: int | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> None:
        """Change settings of a queue; workers follow within a second. None is the default, a limit of 0 no limit."""

    async def purge(
        self,
        queue: str | None = None,
        *,
        older_than: Seconds | None = None,
        until: datetime | None = None,
        states: Sequence[State] | None = None,
    ) -> int:
        """Delete archived messages by age, those archived before `until`, or those past each queue's retention.

        Returns the number.
        """

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        """Publish archived messages again under ids derived from (id, name): running it twice is harmless."""

    async def record(self, rows: Sequence[Row]) -> int:
        """Enter messages that another transport has settled into the archive; returns the number of new ones.

        A message that the archive has in the same state since `dedupe_for` is not entered again. `archived_at` is
        the database's time; all other values are those of the row.
        """
