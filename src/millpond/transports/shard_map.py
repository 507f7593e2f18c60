"""The shard map: which key range is on which shard. Every shard stores it, with its own name."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from millpond.errors import InvalidOption, ShardMapChanged, ShardMapMismatch, WrongShard
from millpond.message import Draft
from millpond.transports.key_range import KeyRange, is_range
from millpond.transports.routing import RING, ring_point

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,62}")


class ShardMap(msgspec.Struct, frozen=True, dict=True):
    """Key ranges that cover the ring, each on one shard.

    >>> map_ = ShardMap.even("pond", ["a", "b"])
    >>> map_.ranges, map_.shard_of(2**63)
    ((('-80', 'a'), ('80-', 'b')), 'b')
    """

    pond: str
    """Made when the map was: the maps of other ponds have another one."""
    version: int
    shards: tuple[str, ...]
    """Names. The position is the shard's number in lakes and streams, so names are only ever added at the end."""
    ranges: tuple[tuple[str, str], ...]
    """Pairs of key range and shard, in the order of the ring."""

    @classmethod
    def even(cls, pond: str, names: Sequence[str]) -> ShardMap:
        """Ranges of equal size in the order of the names, with the boundaries that Vitess would choose."""
        _check_new(names)
        digits = 2 if len(names) <= 256 else 4
        steps = 16**digits
        starts = [(n * steps // len(names)) * (RING // steps) for n in range(len(names))]
        stops = [*starts[1:], RING]
        ranges = [str(KeyRange(start, stop)) for start, stop in zip(starts, stops, strict=True)]
        return cls(pond, 1, tuple(names), tuple(zip(ranges, names, strict=True))).checked()

    @classmethod
    def decode(cls, text: str | bytes) -> ShardMap:
        try:
            return msgspec.json.decode(text, type=cls).checked()
        except (msgspec.MsgspecError, InvalidOption) as e:
            raise ShardMapMismatch(f"the stored shard map cannot be read ({e}); restore it from another shard") from e

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    def checked(self) -> ShardMap:
        check_names(self.shards)
        at = 0
        for text, shard in self.ranges:
            found = KeyRange.parse(text)
            if found.start != at or shard not in self.shards:
                raise InvalidOption(f"the key range {text} of shard {shard!r} leaves a gap, overlaps, or has no shard")
            at = found.stop
        if at != RING:
            raise InvalidOption("the key ranges do not cover all keys")
        return self

    @cached_property
    def _starts(self) -> list[int]:
        return [KeyRange.parse(text).start for text, _ in self.ranges]

    def shard_of(self, point: int) -> str:
        """Name of the shard that owns a point of the ring."""
        return self.ranges[bisect_right(self._starts, point) - 1][1]

    def place(self, key: str | None, id_: bytes) -> str:
        """Name of the shard of a message."""
        return self.shard_of(ring_point(key, id_))

    def place_draft(self, draft: Draft) -> str:
        """The same for a draft, whose point is computed once: its sender and the check of its shard both need it."""
        point = draft.point
        if point is None:
            point = ring_point(draft.key, draft.id.bytes)
            msgspec.structs.force_setattr(draft, "point", point)
        return self.shard_of(point)

    def ranges_of(self, shard: str) -> list[str]:
        return [text for text, owner in self.ranges if owner == shard]

    def parts_of(self, wanted: KeyRange) -> list[tuple[KeyRange, str]]:
        """The parts of a range that have one owner each, in the order of the ring."""
        found = []
        for text, owner in self.ranges:
            part = KeyRange.parse(text)
            start, stop = max(part.start, wanted.start), min(part.stop, wanted.stop)
            if start < stop:
                found.append((KeyRange(start, stop), owner))
        return found

    def moved(self, wanted: KeyRange, target: str) -> ShardMap:
        """The next version, in which the range belongs to the target. Neighbours of one owner become one range.

        >>> ShardMap.even("pond", ["a", "b"]).moved(KeyRange.parse("40-80"), "b").ranges
        (('-40', 'a'), ('40-', 'b'))
        """
        before, after = KeyRange(0, wanted.start), KeyRange(wanted.stop, RING)
        parts = [*self.parts_of(before), (wanted, target), *self.parts_of(after)]
        joined: list[tuple[KeyRange, str]] = []
        for part, owner in parts:
            if joined and joined[-1][1] == owner:
                part = KeyRange(joined.pop()[0].start, part.stop)
            joined.append((part, owner))
        ranges = tuple((str(part), owner) for part, owner in joined)
        return ShardMap(self.pond, self.version + 1, self.shards, ranges).checked()

    def with_shard(self, name: str) -> ShardMap:
        """The next version, with one more shard, which owns no range yet."""
        _check_new([name])
        return ShardMap(self.pond, self.version + 1, (*self.shards, name), self.ranges).checked()

    def select(self, wanted: Iterable[str]) -> list[str]:
        """The shards that are named, or that own exactly a key range; in the order of the map."""
        chosen: set[str] = set()
        for one in wanted:
            chosen |= {one} if one in self.shards else self._owners(one)
        return [shard for shard in self.shards if shard in chosen]

    def _owners(self, text: str) -> set[str]:
        if "-" not in text:
            raise InvalidOption(f"there is no shard {text!r}; there are {', '.join(self.shards)}")
        wanted = KeyRange.parse(text)
        owners = {shard for part, shard in self.ranges if wanted.contains(KeyRange.parse(part).start)}
        parts = [KeyRange.parse(part) for part, shard in self.ranges if shard in owners]
        if (
            not parts
            or min(parts).start != wanted.start
            or max(part.stop for part in parts) != wanted.stop
            or not all(wanted.contains(part.start) for part in parts)
        ):
            ranges = ", ".join(f"{part} ({shard})" for part, shard in self.ranges)
            raise InvalidOption(f"the key range {text} does not match the shard map exactly; it has {ranges}")
        return owners


class ShardRecord(msgspec.Struct, frozen=True):
    """The row of a shard: its own name, and the map."""

    name: str
    map: ShardMap

    def owns(self, key: str) -> bool:
        """Whether the messages of a key belong here."""
        return self.map.place(key, b"") == self.name


def alone(record: ShardRecord, database: str) -> WrongShard:
    """The error of a publish by the URL of one shard. `database` names its database."""
    return WrongShard(
        f"{database} is shard {record.name!r} of {len(record.map.shards)}: a message may belong to another one. Give "
        "the URLs of all shards"
    )


def check_routed(record: ShardRecord | None, routed: ShardRecord | None, database: str) -> None:
    """Raise unless all messages that were routed to a shard by an earlier read of its record still belong there.

    `record` is the shard's own, which decides. `routed`: name and map that routed them; None: they were not routed, for
    the database was no shard.
    """
    if routed is None:
        if record is not None and len(record.map.shards) > 1:
            raise alone(record, database)
        return
    if record is None or record.name != routed.name or record.map.pond != routed.map.pond:
        raise ShardMapMismatch(
            f"{database} is no longer shard {routed.name!r} of the shard map by which the messages were routed; "
            "nothing was published there. Give the URLs of all shards of one map, and write again"
        )
    for text in routed.map.ranges_of(routed.name):
        for part, owner in record.map.parts_of(KeyRange.parse(text)):
            if owner != record.name:
                raise ShardMapChanged(
                    f"the key range {part} belongs to shard {owner!r} by version {record.map.version} of the shard "
                    f"map; the messages were routed by version {routed.map.version} to shard {record.name!r}, and "
                    "nothing was published there. Write again, or restart the query: it reads the map when it begins",
                    record.map,
                )


def _check_new(names: Sequence[str]) -> None:
    """Refuse the name of a new shard that commands would read as a key range."""
    for name in names:
        if isinstance(name, str) and is_range(name):
            raise InvalidOption(f"the shard name {name} is also a key range; choose another one, such as s{name}")


def check_names(names: Sequence[Any]) -> None:
    if not names:
        raise InvalidOption("a shard map needs at least one shard")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidOption(
                f"the shard name {str(name)[:80]!r} must begin with a letter or digit and hold at most 63 letters, "
                "digits and _ . : -"
            )
    if len(set(names)) < len(names):
        raise InvalidOption(f"two shards have the same name: {', '.join(names)}")
