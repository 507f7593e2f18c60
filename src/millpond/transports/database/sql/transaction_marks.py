"""Waiting messages, as a database finds them by the transactions that wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from millpond.transports.database.sql.dialect import Floor
from millpond.transports.database.sql.statement import Steps


class MarkRange(NamedTuple):
    """A part of a lane, from `low` up to `high`, without `high`."""

    lane: int
    low: Floor
    high: Floor


class FirstDue(msgspec.Struct, frozen=True):
    """The first due message of each lane that has one, from its floor on."""

    at: int
    """The database's time."""
    places: Mapping[int, Floor]


class Below(msgspec.Struct, frozen=True):
    """A question for waiting messages below the floors of their lanes, or in lanes without a floor."""

    floors: Mapping[int, Floor]
    since: str
    """Snapshot: messages of all transactions that it does not show as completed."""
    ranges: Sequence[MarkRange] = ()
    """Messages in these ranges too."""
    swept: tuple[int, int] | None = None
    """Messages of any lane due in this time too, from the first up to the second."""
    ids: Sequence[Any] = ()
    """These messages too, if they wait."""


class Appeared(msgspec.Struct, frozen=True):
    """Waiting messages below the floors."""

    snapshot: str
    """Snapshot of the answer, for the next question."""
    first: FirstDue
    messages: Sequence[tuple[int, Floor]]
    """Lane and place of each message, in order."""
    is_complete: bool
    """Whether all of them are here: not if they are too many, or if this is not the server of the last answer."""


class Marks(Protocol):
    """Questions about waiting messages by the transactions that wrote them."""

    def snapshot(self) -> Steps[str]:
        """The transactions that are completed now, and those that are not."""

    def first_due(self, queue: str, floors: Mapping[int, Floor], now: int | None) -> Steps[FirstDue]:
        """The first due message of each of these lanes."""

    def below(self, queue: str, asked: Below, now: int | None) -> Steps[Appeared]:
        """Waiting messages below the floors, and the first due message of each lane."""
