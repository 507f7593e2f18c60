"""The streams room: queues that a Spark query consumes exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol
from uuid import UUID

import msgspec

from millpond.clock import Seconds


class ClaimSlice(msgspec.Struct, frozen=True, array_like=True):
    """A part of a stream's claim: the messages with ids in [first, stop)."""

    first: UUID
    stop: UUID | None
    messages: int


class StreamClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a stream holds under one number; the same at every read."""

    stream: int
    """The stream's own small number in this database."""
    seq: int
    messages: int
    slices: tuple[ClaimSlice, ...]
    claimed_us: int
    checkpoint: str | None = None
    """The checkpoint whose batch it is. None: no task has read it, and any checkpoint may take it over."""


class StreamStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as an operator sees it."""

    name: str
    epoch: int
    """Number of times it was opened or released."""
    acked_seq: int
    """The last claim that was acknowledged."""
    held: int
    """Messages of claims that are not acknowledged."""
    held_for: float | None
    """Seconds since the oldest of these claims; None without a claim."""
    opened_us: int | None
    shard: int | None = None
    """Position of this database among the URLs of the query that opened it."""
    open_claims: tuple[tuple[int, str | None], ...] = ()
    """Number and checkpoint of each claim that is not acknowledged."""


Settlement = Literal["ack", "nack", "reject"]


class RecordedOutcome(msgspec.Struct, frozen=True):
    """A job's decision about one message of its stream's claim; applied when the claim is acknowledged."""

    id: UUID
    outcome: Settlement
    delay: Seconds | None = None
    """With nack: seconds until the message is due again."""
    reason: str | None = None


class Waiting(msgspec.Struct, frozen=True):
    """Number of messages that are due and not claimed, counted up to a limit, and the time of the count."""

    messages: int
    at_us: int
    oldest_us: int | None = None
    """When the one that waits longest was due."""


class Streams(Protocol):
    """The verbs of a Spark query. Its claims never expire: they are acknowledged, or released by an operator.

    Each verb of the driver is fenced by the epoch: `StreamFenced` once another driver has opened the stream.
    Every verb may be repeated after a lost connection.
    """

    async def open(
        self, name: str, *, epoch: int | None = None, above: int = 0, shard: int | None = None
    ) -> tuple[int, int]:
        """Become the stream's only driver; returns the epoch and the number of the last acknowledged claim.

        Draws an epoch higher than `above` and all earlier ones, or takes the given one if that is the highest. `shard`:
        position of this database among the URLs, recorded once.
        """

    async def claim(
        self,
        name: str,
        epoch: int,
        seq: int,
        queues: Sequence[str],
        limit: int,
        *,
        slices: int = 1,
        until_us: int | None = None,
        max_bytes: int | None = None,
        checkpoint: str | None = None,
    ) -> StreamClaim | None:
        """The claim of this number: the recorded one, or a new one in the order of claims. None: no message is due.

        The claim before it may still be open. Expired messages are FAILED; a suspect is claimed alone.
        `until_us`: only messages that were published, and due, by then. `max_bytes`: total size of the bodies, unless
        the first one is larger. `checkpoint`: recorded with a new claim.
        """

    async def hand_out(self, name: str, epoch: int, seq: int, checkpoint: str) -> None:
        """Record that the claim is a batch of this checkpoint, before a task reads it."""

    async def recorded(self, name: str, epoch: int, seq: int) -> StreamClaim | None:
        """The claim of this number, if it was recorded."""

    async def ack(
        self, name: str, epoch: int, seq: int, *, unsettled: Settlement = "ack", messages: int | None = None
    ) -> None:
        """Apply the outcomes of all claims up to this number; `unsettled` is the outcome of unrecorded messages.

        `messages`: size of the claim when it was handed out; `ClaimLost` if it is smaller now. A repeated ack is
        harmless; a number below the last acknowledged one raises `StreamBehind`.
        """

    async def record(self, name: str, outcomes: Sequence[RecordedOutcome]) -> list[UUID]:
        """Record outcomes of messages of the last claim; the last one counts. Returns the ids not in the claim."""

    async def release(self, name: str) -> int:
        """Fence out the stream's driver and give back its messages; returns the number of messages."""

    async def status(self) -> list[StreamStatus]: ...

    async def waiting(self, queues: Sequence[str], limit: int = 100_000) -> Waiting: ...
