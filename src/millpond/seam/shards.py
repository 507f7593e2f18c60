"""Values of the commands that show and change the shards of a pond."""

from __future__ import annotations

import msgspec


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A shard as an operator sees it."""

    name: str
    """Empty if it does not answer and its name is not known."""
    url: str
    ranges: list[str]
    version: int | None
    answers: bool
    error: str | None = None
    """The reason why it does not answer."""
    seconds: float | None = None
    """Time of its answer: a slow shard shows here."""
    live: int | None = None
    """Messages that wait or run: a hot shard shows here."""
    incoming: int | None = None
    """Copies of messages that are moving here."""
    change: str | None = None
    """The pending change of the map, on its coordinator, the first shard."""


class MapChange(msgspec.Struct, frozen=True):
    """A change of the map: a key range goes from one shard to another one."""

    range: str
    source: str
    target: str

    def __str__(self) -> str:
        return f"move {self.range} from {self.source} to {self.target}"


class MoveProgress(msgspec.Struct, frozen=True):
    """The state of a move, for the operator."""

    change: MapChange
    step: str
    moved: int = 0
    """Messages that were moved by this mover."""
    left: int = 0
    """Messages of the range that still wait at the old owner."""
    claimed: int = 0
    """Messages of the range that are claimed there: they move when they wait again, or are settled there."""
