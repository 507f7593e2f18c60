"""The seam: what every backend does, and what only a database can do besides.

One conformance suite runs over every implementation. What a backend cannot do is said by its `Capability`
flags and raises `Unsupported`; it is never a silent no-op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Flag, auto
from typing import Any, Literal, Protocol, runtime_checkable
from uuid import UUID

import msgspec

from millpond import clock
from millpond.clock import Seconds
from millpond.message import Claim, Message, Published, Receipt, State
from millpond.outcome import MAX_CRASHES, SUSPECT, Outcome

DEFAULT_LEASE = 30.0
NEVER_US = 253_402_300_799_000_000
"""When the lease of what a stream holds ends: with the year 9999, so that no reaper finds it and people can read it."""


class Capability(Flag):
    """What a transport can do beyond the six verbs."""

    TRANSACTIONS = auto()
    """publish and settle within the caller's own database transaction"""
    CLAIM_BY_ID = auto()
    PRIORITY = auto()
    ORDER = auto()
    """claims come by due time and id, also of what was published late or given back"""
    DEDUPE = auto()
    """publishing a caller-given id twice is recognised"""
    EXTEND = auto()
    """extend lengthens a lease by a chosen time"""
    BROWSE = auto()
    """browse and count live messages"""
    RESCHEDULE = auto()
    """reschedule and cancel"""
    ARCHIVE = auto()
    """settled messages are kept, read, purged and replayed"""
    DEAD_LETTERS = auto()
    """FAILED messages are kept, listed and published again"""
    PAUSE = auto()
    PRESENCE = auto()
    """a dead worker's claims come back before their lease ends"""
    STREAMS = auto()
    """Spark queries consume its queues exactly once"""
    FREE_RECEIPTS = auto()
    """any handle may settle and extend what another has claimed"""
    SHARED = auto()
    """several processes can use it at once"""
    DURABLE = auto()
    """messages survive the process"""


class Row(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A message as an operator sees it, live or archived."""

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
    reason: str | None = None
    error: str | None = None

    def __getattr__(self, name: str) -> datetime | None:
        """`created_at`, `due_at`, … as datetimes; the stored facts are microseconds."""
        if name.endswith("_at") and f"{name[:-3]}_us" in self.__struct_fields__:
            us = getattr(self, f"{name[:-3]}_us")
            return None if us is None else clock.as_datetime(us)
        raise AttributeError(name)

    @property
    def suspect(self) -> bool:
        """So many deliveries came to no result that the message is claimed alone."""
        return self.deliveries - self.attempts - (self.state is State.PROCESSING) >= SUSPECT

    @property
    def position(self) -> tuple[Any, ...]:
        """Where the row stands in `browse`, or in `archived`: what `after` takes. Plain values, for any face.

        Live messages stand in the order of claims, queue by queue; archived ones newest first.
        """
        if self.archived_us is not None:
            return (self.archived_us, self.id)
        return (self.queue, self.suspect, self.priority, self.due_us, self.id)


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages of a queue are in each state."""

    queue: str
    counts: Mapping[State, int]
    approximate: bool = False
    """The archive's counts stopped at the counting limit; ask for exact ones to have the rest."""
    paused: bool = False
    oldest_due_us: int | None = None
    """When the longest waiting message fell due; None while nothing is due."""
    keep_completed_us: int | None = None
    keep_failed_us: int | None = None
    """How long the archive keeps them; None: for ever."""


class Transport(Protocol):
    """Six verbs. Everything above holds one of these, never a backend."""

    @property
    def capabilities(self) -> Capability: ...

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        """Store messages, all or none; says of each whether it is new."""

    async def claim(
        self,
        queues: Sequence[str],
        limit: int = 1,
        lease: Seconds = DEFAULT_LEASE,
        *,
        ids: Sequence[UUID] | None = None,
        max_crashes: int | None = MAX_CRASHES,
        max_deliveries: int | None = None,
        suspects: bool = True,
    ) -> list[Claim]:
        """Take up to `limit` due messages, first by priority, then by due time, then by id.

        A message past `max_crashes` or `max_deliveries`, or expired, is FAILED and not returned. One with
        two or more unfinished deliveries is returned alone; `suspects=False` leaves such ones where they are.
        """

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        """Let the leases end `lease` from now; returns the stale receipts."""

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any = None) -> list[Receipt]:
        """Write outcomes, each fenced by its receipt; returns the stale receipts. One never fails the others."""

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        """Return when something may be due, at latest after `timeout`. A hint: claim tells the truth."""

    async def close(self) -> None:
        """Give back connections; every later call raises `Closed`."""


@runtime_checkable
class Store(Transport, Protocol):
    """What only a database can do besides."""

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        """`publish` on the caller's synchronous connection; needs no event loop."""

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        """`settle` on the caller's synchronous connection; needs no event loop."""

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        """True for the first transaction that asks for (id, key) and commits."""

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool: ...

    async def count(self, queues: Sequence[str] | None = None, *, exact: bool = False) -> list[QueueStats]:
        """Messages per queue and state, all five of them; archive counts stop at a million unless `exact`.

        Without `queues` every queue that has messages or settings, by name; with, each of those, in that order.
        """

    async def browse(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        """Live messages in the order of claims, queue by queue; `after` is the `position` of the last row seen."""

    async def archived(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        """Archived messages, newest first; `after` is the `position` of the last row seen.

        `since` is the first moment that counts, `until` the first that no longer does.
        """

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        """These messages, wherever they are: live first, then archived."""

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

        `attempts` sets the deliveries to the same number: the message is no longer suspect.
        """

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        """FAIL waiting messages without running them; returns the ids that were."""

    async def pause(self, queue: str) -> None:
        """No claim takes from this queue until it is resumed; publishing goes on."""

    async def resume(self, queue: str) -> None: ...

    async def retain(self, queue: str, *, completed: Seconds | None, failed: Seconds | None) -> None:
        """How long the archive keeps this queue's messages; None keeps them for ever."""

    async def record(self, rows: Sequence[Row]) -> int:
        """Enter messages that another transport has settled into the archive; returns how many are new.

        One that the archive has in the same state since `dedupe_for` is not entered again. The database says when
        it was archived; all else is as the row tells.
        """

    async def purge(
        self,
        queue: str | None = None,
        *,
        older_than: Seconds | None = None,
        states: Sequence[State] | None = None,
    ) -> int:
        """Delete from the archive what is older, or what each queue's retention no longer keeps."""

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        """Publish archived messages again under ids derived from (id, name): running it twice is harmless."""

    async def reap(self) -> int:
        """Give back what lapsed leases and dead workers hold; returns how many."""

    async def join(self, name: str | None = None) -> Presence:
        """Become a worker whose death others notice; later claims carry its mark."""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A part of a stream's claim: so many messages, from the first id up to, and without, the stop."""

    first: UUID
    stop: UUID | None
    messages: int


class StreamClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream holds under one number; the same whenever it is asked for."""

    stream: int
    """The stream's own small number in this database."""
    seq: int
    messages: int
    slices: tuple[Slice, ...]
    claimed_us: int


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as an operator sees it."""

    name: str
    epoch: int
    """How often it was opened or released."""
    acked_seq: int
    """The last claim that was acknowledged."""
    held: int
    """Messages of claims that are not."""
    held_for: float | None
    """Seconds since the oldest of these claims; None: there is none."""
    opened_us: int | None


Settlement = Literal["ack", "nack", "reject"]


class Recorded(msgspec.Struct, frozen=True):
    """What a job has decided about a message of its stream's claim; applied when the claim is acknowledged."""

    id: UUID
    outcome: Settlement
    delay: Seconds | None = None
    """With nack: due so much later."""
    reason: str | None = None


class Waiting(msgspec.Struct, frozen=True):
    """How many messages are due and not claimed, counted up to a limit, and when this was."""

    messages: int
    at_us: int


@runtime_checkable
class Streams(Protocol):
    """What a Spark query needs of a store. Its claims never expire: they are acknowledged, or released by hand.

    Each verb of the driver is fenced by the epoch: `StreamFenced` once somebody else has opened the stream.
    """

    async def open_stream(self, name: str, *, epoch: int | None = None, above: int = 0) -> tuple[int, int]:
        """Become the stream's one driver; returns the epoch, and the last acknowledged claim.

        Draws an epoch higher than `above` and any before; or takes the given one if that is the highest.
        """

    async def claim_for_stream(
        self,
        name: str,
        epoch: int,
        seq: int,
        queues: Sequence[str],
        limit: int,
        *,
        slices: int = 1,
        until_us: int | None = None,
        max_crashes: int | None = MAX_CRASHES,
    ) -> StreamClaim | None:
        """The claim of this number: as it was recorded, or else anew, in the order of claims; None: nothing is due.

        The one before it may still be open. Expired messages and those past `max_crashes` are FAILED; a suspect is
        claimed alone. `until_us`: only what was published, and due, by then.
        """

    async def stream_claim(self, name: str, epoch: int, seq: int) -> StreamClaim | None:
        """The claim of this number as it was recorded."""

    async def ack_stream(
        self, name: str, epoch: int, seq: int, *, unsettled: Settlement = "ack", messages: int | None = None
    ) -> None:
        """Apply the outcomes of all claims up to this number; `unsettled` stands for those not recorded.

        `messages`: what the claim held when it was handed out; `ClaimLost` if it no longer does. Again is harmless;
        a number below what was acknowledged is `StreamBehind`.
        """

    async def record_outcomes(self, name: str, outcomes: Sequence[Recorded]) -> list[UUID]:
        """Note what shall become of messages of the last claim, the last word counts; returns ids not of it."""

    async def release_stream(self, name: str) -> int:
        """Fence out whoever drives the stream and give back what it holds; returns how many messages."""

    async def streams(self) -> list[StreamStatus]: ...

    async def waiting(self, queues: Sequence[str], limit: int = 100_000) -> Waiting: ...


class Presence(Protocol):
    """A worker's sign of life."""

    @property
    def id(self) -> int: ...

    async def beat(self) -> bool:
        """Renew the sign of life, retaking the lock if the session was lost; False while neither is possible."""

    async def leave(self) -> None: ...
