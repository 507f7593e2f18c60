"""The row by which a database knows that it is a shard: its name, and the shard map.

A publish locks the row in share mode until it commits, and checks that its messages belong here. A change of the map
locks the row exclusively: no publish commits on a shard that no longer owns the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from millpond.errors import ShardMapChanged, ShardMapMismatch
from millpond.message import Draft
from millpond.transports import shard_map
from millpond.transports.database.runner import Room, read, write
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.shard_map import ShardMap, ShardRecord

_READ = "SELECT name, map FROM {shard} WHERE id = 1"
_ENTER = "INSERT INTO {shard} (id, name, pond, version, map) VALUES (1, :name, :pond, :version, :map) {or_skip}"
_LOCK_VERSION = "SELECT pond, version FROM {shard} WHERE id = 1 {share}"
_LOCK_RECORD = f"{_READ} {{share}}"
_LIVE_OR_ARCHIVED = """
SELECT id FROM {message} {id_index} WHERE id {ids} UNION ALL SELECT id FROM {archive} {archive_id_index} WHERE id {ids}
UNION ALL SELECT id FROM {moved} WHERE id {ids}
"""
_MARKED = "SELECT id, publisher FROM {dedupe} WHERE id {ids}"


def read_record(d: Dialect) -> Steps[ShardRecord | None]:
    return _as_record((yield Query(d.sql(_READ), {})))


def lock_record(d: Dialect) -> Steps[ShardRecord | None]:
    """Read the row. It cannot change before this transaction ends."""
    yield from d.lock_map(alone=False)
    return _as_record((yield Query(d.sql(_LOCK_RECORD), {})))


def lock_if_shard(d: Dialect) -> Steps[ShardRecord | None]:
    """`lock_record`, but without a lock in a database that is no shard."""
    if (yield from read_record(d)) is None:
        return None
    return (yield from lock_record(d))


def check_routed(d: Dialect, routed: ShardRecord | None, database: str) -> Steps[None]:
    """Lock the row, and raise unless messages that were routed by `routed` still belong here."""
    shard_map.check_routed((yield from lock_record(d)), routed, database)


def _as_record(rows: Sequence[Sequence[str]]) -> ShardRecord | None:
    return ShardRecord(rows[0][0], ShardMap.decode(rows[0][1])) if rows else None


class Placed(NamedTuple):
    """The key and the id of a message, which decide its place."""

    key: str | None
    id: UUID


def misplaced(record: ShardRecord, drafts: Iterable[Draft | Placed]) -> tuple[Draft | Placed, str] | None:
    """The first message that belongs to another shard, and the name of that one."""
    for one in drafts:
        owner = record.map.place_draft(one) if type(one) is Draft else record.map.place(one.key, one.id.bytes)
        if owner != record.name:
            return one, owner
    return None


def check_owned(d: Dialect, messages: Iterable[Placed]) -> Steps[None]:
    """Lock the row, and raise unless all messages belong here, as in a database that is no shard."""
    record = yield from lock_if_shard(d)
    if record is not None and (wrong := misplaced(record, messages)) is not None:
        raise _moved_away(record, *wrong)


def _moved_away(
    record: ShardRecord, message: Draft | Placed, owner: str, stored: Sequence[UUID] = ()
) -> ShardMapChanged:
    return ShardMapChanged(
        f"{describe(message)} belongs to shard {owner!r} by version {record.map.version} of the shard map, not to "
        f"shard {record.name!r}; nothing was published there. Call again, or connect again with all URLs; if this goes "
        "on, look at millpond shards status",
        record.map,
        stored,
    )


class PlacementCheck:
    """Checks within each publish of a routed handle that the messages belong to the shard."""

    def __init__(self, d: Dialect, record: ShardRecord) -> None:
        self._d = d
        self._record = record
        """As it was read last. A read of its version alone is enough while it stays the same."""

    def steps(self, drafts: Sequence[Draft], earlier: Sequence[int] | None) -> Steps[None]:
        """Raise unless all drafts belong here. `earlier`: marks of tries whose reply was lost; None: there are none."""
        yield from self._d.lock_map(alone=False)
        rows = yield Query(self._d.sql(_LOCK_VERSION), {})
        known = self._record.map
        if not rows or tuple(rows[0]) != (known.pond, known.version):
            record = yield from lock_record(self._d)
            if record is None or record.map.pond != known.pond:
                raise ShardMapMismatch(
                    f"the database of shard {self._record.name!r} no longer belongs to this shard map; connect again"
                )
            self._record = record
        wrong = misplaced(self._record, drafts)
        if wrong is None:
            return
        raise _moved_away(self._record, *wrong, [] if earlier is None else (yield from self._stored(drafts, earlier)))

    def _stored(self, drafts: Sequence[Draft], earlier: Sequence[int]) -> Steps[list[UUID]]:
        """Ids that a lost try stored. It held the row's lock, so it ended before the map was changed."""
        d = self._d
        ids = [d.id_in(draft.id) for draft in drafts]
        marked = {d.id_out(id_) for id_, mark in (yield Query(d.sql(_MARKED), {"ids": ids})) if mark in earlier}
        made = [d.id_in(draft.id) for draft in drafts if not draft.given]
        rows = (yield Query(d.sql(_LIVE_OR_ARCHIVED), {"ids": made})) if made else ()
        return sorted(marked | {d.id_out(row[0]) for row in rows})


def describe(draft: Draft | Placed) -> str:
    return f"the key {draft.key!r}" if draft.key is not None else f"the id {draft.id}"


class DatabaseShards(Room):
    """Reads and enters the row."""

    @read
    def record(self) -> Steps[ShardRecord | None]:
        """The shard's name and map; None: the database is no shard."""
        return read_record(self.d)

    @write
    def enter(self, record: ShardRecord) -> Steps[None]:
        """Make the database a shard. Entering the same record twice is harmless."""
        row = {"name": record.name, "pond": record.map.pond, "version": record.map.version}
        yield Query(self.d.sql(_ENTER), {**row, "map": record.map.encode()})
        found = yield from read_record(self.d)
        if found != record:
            name = "" if found is None else found.name
            raise ShardMapMismatch(
                f"the database at {self.runner.url} is already shard {name!r} of another shard map; give an empty "
                "database, or all URLs of its own map"
            )
