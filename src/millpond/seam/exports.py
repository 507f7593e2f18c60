"""The exports room: the lakes that an archive is exported to, and the progress of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from uuid import UUID

import msgspec

from millpond.clock import Seconds


class Export(msgspec.Struct, frozen=True):
    """Progress of the export of an archive to one lake."""

    lake: str
    shard: int
    until_us: int | None
    """The lake durably holds everything archived before this time; None: nothing yet."""
    at_us: int
    path: str


class ClosedUntil(msgspec.Struct, frozen=True):
    """No more rows will appear in the archive before `until_us`."""

    until_us: int
    held: bool = False
    """True if an open transaction that has archived messages keeps this time from being later."""


class ExportedRange(msgspec.Struct, frozen=True):
    """A range of the archive that a lake durably holds, and its number of messages."""

    since_us: int | None
    """None: from the beginning."""
    until_us: int
    messages: int


class Exports(Protocol):
    """The verbs of an export's driver. Every verb may be repeated after a lost connection."""

    async def open(self, lake: str, *, shard: int, path: str, until: int | None) -> int | None:
        """Enter a lake, or check that it is the one entered before. From now on purge spares rows it does not hold.

        Returns the recorded time up to which it holds the archive. After a crash the lake may be ahead of it.
        """

    async def close_archive(self, since: int | None, *, margin: Seconds = 0) -> ClosedUntil:
        """A time, usually `margin` before now, before which no more rows will be archived. `since` was closed before.

        Messages settled a margin before the call are archived before that time, unless an open transaction holds it
        back. After a failover to a server whose clock is behind by less than the margin, the time is still closed.
        """

    async def advance(self, lake: str, ranges: Sequence[ExportedRange]) -> None:
        """Record that the lake durably holds these ranges, which follow each other and the recorded time.

        Purge deletes from a range only if the archive has as many of its messages as were exported and not purged.
        """

    async def redate(self, lake: str, rows: Sequence[tuple[UUID, int]]) -> None:
        """Give archived messages, by id and time of archiving, the present time: the next export takes them.

        Raises `LakeIncomplete` if there is another lake: it may hold them, and would then get them twice.
        """

    async def recount(self, lake: str, until: int, messages: int, later: Sequence[ExportedRange]) -> bool:
        """Take the archived messages before `until` for those that the lake holds, after each was found in it.

        `messages` is the number of those found; with another number in the archive it raises `LakeIncomplete`. `later`
        are the ranges that the lake holds from `until` on. Returns False, and changes nothing, if an export has
        recorded more than those meanwhile.
        """

    async def status(self) -> list[Export]: ...

    async def forget(self, lake: str) -> bool:
        """Let purge wait no longer for this lake; returns whether it was known."""
