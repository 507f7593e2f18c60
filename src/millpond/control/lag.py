"""The lag of streams: due messages that wait in the queues of the messages that a stream holds.

A database does not record the queues of a stream. They are those of its open claims, of which the first message of each
slice is looked up; a stream that holds nothing has an unknown lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

import msgspec

from millpond.clock import SECOND
from millpond.errors import StreamError
from millpond.seam.operations import Row
from millpond.seam.streams import Streams, StreamStatus

MOST_COUNTED = 10_000
"""Waiting messages of a stream that are counted at most."""


class _Found(Protocol):
    async def find(self, ids: Sequence[UUID]) -> Sequence[Row]: ...


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """A stream with its lag."""

    status: StreamStatus
    queues: tuple[str, ...] = ()
    """Queues of messages that it holds."""
    waiting: int | None = None
    """Due messages of these queues that are not claimed, counted up to `MOST_COUNTED`; None if it holds nothing."""
    behind: float | None = None
    """Seconds since the first of them was due."""

    @property
    def complete(self) -> bool:
        """False: more messages wait than were counted."""
        return self.waiting is None or self.waiting < MOST_COUNTED


async def with_lag(streams: Streams, operations: _Found) -> list[StreamView]:
    """All streams, each with its lag as far as it is known."""
    return [await _view(streams, operations, status) for status in await streams.status()]


async def _view(streams: Streams, operations: _Found, status: StreamStatus) -> StreamView:
    firsts: list[UUID] = []
    try:
        for seq, _ in status.open_claims:
            if (claim := await streams.recorded(status.name, status.epoch, seq)) is not None:
                firsts += [part.first for part in claim.slices]
    except StreamError:  # it was opened or released meanwhile
        return StreamView(status=status)
    queues = tuple(sorted({row.queue for row in await operations.find(firsts)})) if firsts else ()
    if not queues:
        return StreamView(status=status)
    counted = await streams.waiting(queues, MOST_COUNTED)
    behind = None if counted.oldest_us is None else max(0.0, (counted.at_us - counted.oldest_us) / SECOND)
    return StreamView(status=status, queues=queues, waiting=counted.messages, behind=behind)
