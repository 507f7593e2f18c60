"""The steps of a mover on one shard. Each write checks the mover's epoch first, and may be repeated.

The fence is a row of its own: publishers do not lock it. A mover locks it until its transaction ends, so a second try
waits for a first one whose reply was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from millpond.clock import SECOND
from millpond.errors import MoverFenced, ShardMapMismatch
from millpond.seam.shards import MapChange
from millpond.transports.database.runner import Room, read, write
from millpond.transports.database.sql.columns import WAITING, as_body, as_text, names
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Many, Query, Rows, Steps
from millpond.transports.shard_map import ShardMap

_KEEP_MOVED = 86_400 * SECOND

_MAKE_FENCE = "INSERT INTO {moving} (id, epoch, pending) VALUES (1, 0, NULL) {or_skip}"
_FENCE = "SELECT epoch, pending FROM {moving} WHERE id = 1"
_LOCK_FENCE = f"{_FENCE} {{lock}}"
_RAISE = "UPDATE {moving} SET epoch = :epoch WHERE id = 1"
_PLAN = "UPDATE {moving} SET epoch = :epoch, pending = :pending WHERE id = 1"

_LOCK_MAP = "SELECT name, map FROM {shard} WHERE id = 1 {lock}"
_SWITCH = "UPDATE {shard} SET version = :version, map = :map WHERE id = 1"

_TEXTS = frozenset(
    (
        *("queue", "key", "headers", "last_error", "history", "scope"),
        *("name", "schedule", "timezone", "missed", "declared"),
    )
)
"""Columns that hold any text. One that is no UTF-8, which another program wrote, must not stop a move."""


def _read(columns: Sequence[str]) -> str:
    return ", ".join(f"{{raw}}{names([column])}{{end_raw}}" if column in _TEXTS else column for column in columns)


# Values without a message that is live, or a window, are free.
_UNIQUE_PAGE = """
SELECT u.id, u.message, u.until, m.id, {raw}m.{key}{end_raw} FROM {unique} u LEFT JOIN {message} m ON m.id = u.message
WHERE u.id > :after AND u.message IS NOT NULL AND (m.id IS NOT NULL OR u.until > {now}) ORDER BY u.id LIMIT :limit
"""
_ARCHIVED_KEYS = "SELECT id, {raw}{key}{end_raw} FROM {archive} {archive_id_index} WHERE id {ids}"
_LOCK_UNIQUE = "SELECT id, until FROM {unique} WHERE id {ids} {lock}"
_DROP_UNIQUE = "DELETE FROM {unique} WHERE id {ids}"
_KEEP_UNIQUE = "INSERT INTO {unique} (id, message, until, source) VALUES (:id, :message, :until, :source)"
_AWAITED = "SELECT id, message FROM {unique} WHERE id > :after AND source = :source ORDER BY id LIMIT :limit"
_ARRIVED = "UPDATE {unique} SET source = NULL WHERE id {ids}"
_INCOMING_IDS = "SELECT id FROM {incoming} WHERE id {ids}"

_SCHEDULE = (
    *("name", "queue", "schedule", "timezone", "missed", "priority", "payload", "headers"),
    *("paused", "declared", "next_at", "last_at"),
)
_SCHEDULES = f"SELECT {_read(_SCHEDULE)} FROM {{periodic}} ORDER BY name"
_KEEP_SCHEDULE = f"""
INSERT INTO {{periodic}} ({", ".join(_SCHEDULE)}) VALUES ({", ".join(f":{name}" for name in _SCHEDULE)})
"""
_DROP_SCHEDULE = "DELETE FROM {periodic} WHERE name = :name"

_PAGE = f"""
SELECT {_read(("id", "key", "state", "created_at"))} FROM {{message}} {{id_index}}
WHERE id > :after ORDER BY id LIMIT :limit
"""
_WAITING = f"SELECT {_read(WAITING)} FROM {{message}} {{id_index}} WHERE id {{ids}} AND state <> 'PROCESSING'"
_LOCK_WAITING = f"{_WAITING} {{locked}}"
_ONCE_COLUMNS = ("id", "key", "token", "at")
_ONCE = f"SELECT {_read(_ONCE_COLUMNS)} FROM {{once}} WHERE id {{ids}}"
_KEEP_ONCE = "INSERT INTO {once} (id, {key}, token, at) VALUES (:id, :key, :token, :at) {or_skip}"
_STEP_COLUMNS = ("message", "id", "scope", "name", "token", "result", "at")
# Steps without a result belong to deliveries that have ended.
_STEPS = f"SELECT {_read(_STEP_COLUMNS)} FROM {{step}} WHERE message {{ids}} AND result IS NOT NULL"
_KEEP_STEP = """
INSERT INTO {step} (message, id, scope, name, token, result, at)
VALUES (:message, :id, :scope, :name, :token, :result, :at) {or_skip}
"""
# Steps of deliveries that ended here, when the range was here before: they must not hide results of the other shard.
_OWNERLESS_STEPS = """
SELECT s.id FROM {step} s WHERE s.id {ids} AND s.result IS NULL AND NOT EXISTS (
  SELECT 1 FROM {message} m {id_index} WHERE m.id = s.message AND m.token = s.token AND m.state = 'PROCESSING')
"""
_DROP_STEPS = "DELETE FROM {step} WHERE id {ids} AND result IS NULL"
_FORGET_MOVED = "DELETE FROM {moved} WHERE id {ids}"
_RECORD_MOVED = "INSERT INTO {moved} (id, epoch, target, at) VALUES (:id, :epoch, :target, :at)"
_MOVED_BY = "SELECT id FROM {moved} WHERE id {ids} AND epoch = :epoch"
_MOVED = "SELECT id, epoch FROM {moved} WHERE id {ids}"
_FORGET_OLD = "DELETE FROM {moved} WHERE at < :until"

_PRESENT = "SELECT id FROM {message} {id_index} WHERE id {ids}"
_DROP = "DELETE FROM {incoming} WHERE id {ids}"
_COPY = f"""
INSERT INTO {{incoming}} (source, epoch, {names(WAITING)})
VALUES (:source, :epoch, {", ".join(f":{column}" for column in WAITING)})
"""
_INCOMING = "SELECT id, source, epoch FROM {incoming} WHERE id > :after ORDER BY id LIMIT :limit"
_COUNT_INCOMING = "SELECT count(*) FROM {incoming}"
_QUEUES = "SELECT DISTINCT queue FROM {incoming} WHERE id {ids}"
_ACTIVATE = f"INSERT INTO {{message}} ({names(WAITING)}) SELECT {names(WAITING)} FROM {{incoming}} WHERE id {{ids}}"

_DEDUPE_PAGE = """
SELECT id, publisher, expires_at FROM {dedupe}
WHERE expires_at >= :low AND expires_at <= :high AND (expires_at > :low OR id > :after)
ORDER BY expires_at, id LIMIT :limit
"""
_COUNT_DEDUPE = "SELECT count(*) FROM {dedupe} WHERE expires_at > :low AND expires_at <= :high"
_NEVER = (1 << 63) - 1
_FORGET_EXPIRED = "DELETE FROM {dedupe} WHERE id {ids} AND expires_at <= {now}"
# The ids of these messages were awaited (`awaited_ids.py`). Now the messages make them known.
_HAVE_ARRIVED = "UPDATE {dedupe} SET expires_at = -publisher, publisher = :mark WHERE id {ids} AND publisher < 0"
_KNOWN = "SELECT id, publisher, expires_at FROM {dedupe} WHERE id {ids}"
_ENDS_LATER = "UPDATE {dedupe} SET expires_at = :expires_at WHERE id = :id AND publisher >= 0"
# The row of an awaited id keeps the negative time at which it ends when its message has come.
_WILL_END_LATER = "UPDATE {dedupe} SET publisher = :negative WHERE id = :id AND publisher < 0"
MOVED_MARK = 1
"""Publisher of a dedupe row that a mover wrote: no publish has this mark."""
_REMEMBER = "INSERT INTO {dedupe} (id, publisher, expires_at) VALUES (:id, :publisher, :expires_at) {or_skip}"


class UniqueValue(msgspec.Struct, frozen=True):
    """A unique value that is taken."""

    id: UUID
    message: UUID
    until: int | None
    live: bool
    """Whether the message is live at the old owner."""
    keyed: bool
    """Whether the message is known, and so its key."""
    key: str | None


class LiveMessage(NamedTuple):
    """The facts that decide whether a message moves."""

    id: UUID
    key: str | None
    waits: bool
    created_at: int


class Pending(msgspec.Struct, frozen=True):
    """The fence of a shard. The coordinator, the first shard of the map, also has the pending change."""

    epoch: int
    change: MapChange | None


def _end(mark: int, expires_at: int) -> int:
    """The end of a dedupe row. `mark`: its publisher, or negative if its message is awaited."""
    return -mark if mark < 0 else expires_at


def _pending(rows: Rows) -> Pending:
    if not rows:
        return Pending(0, None)
    epoch, text = rows[0]
    return Pending(int(epoch), msgspec.json.decode(text, type=MapChange) if text else None)


def check_epoch(d: Dialect, epoch: int) -> Steps[None]:
    """Raise if a later mover has begun. It cannot begin here before this transaction ends."""
    found = _pending((yield Query(d.sql(_LOCK_FENCE), {})))
    if found.epoch != epoch:
        raise MoverFenced(
            f"another operator has taken over this change of the shard map (epoch {found.epoch}, not {epoch}); nothing "
            "was lost. Let that one finish: millpond shards status"
        )


class DatabaseMoving(Room):
    """The verbs of a mover."""

    @read
    def pending(self) -> Steps[Pending]:
        return _pending((yield Query(self.d.sql(_FENCE), {})))

    @write
    def begin(self, change: MapChange | None, above: int = 0, *, undo: bool = False) -> Steps[Pending]:
        """Become the mover: the highest epoch, and the pending change. None: continue, whatever is pending.

        `above`: the highest epoch of any shard. `undo`: only if this change is still pending.
        """
        yield Query(self.d.sql(_MAKE_FENCE), {})
        found = _pending((yield Query(self.d.sql(_LOCK_FENCE), {})))
        if undo and found.change != change:
            raise ShardMapMismatch(
                "another operator has ended that change meanwhile; nothing was undone. Look at millpond shards status"
            )
        if change is not None and found.change not in (None, change):
            raise ShardMapMismatch(
                f"another change of the shard map is pending: {found.change}; finish it with the same command, or "
                "undo it: millpond shards abort"
            )
        change = change or found.change
        text = None if change is None else msgspec.json.encode(change).decode()
        epoch = max(found.epoch, above) + 1
        yield Query(self.d.sql(_PLAN), {"epoch": epoch, "pending": text})
        return Pending(epoch, change)

    @write
    def fence(self, epoch: int) -> Steps[None]:
        """Refuse all writes of earlier movers from now on."""
        yield Query(self.d.sql(_MAKE_FENCE), {})
        found = _pending((yield Query(self.d.sql(_LOCK_FENCE), {})))
        if found.epoch > epoch:
            yield from check_epoch(self.d, epoch)
        yield Query(self.d.sql(_RAISE), {"epoch": epoch})

    @write
    def end(self, epoch: int) -> Steps[None]:
        """The change is complete, or undone."""
        yield from check_epoch(self.d, epoch)
        yield Query(self.d.sql(_PLAN), {"epoch": epoch, "pending": None})

    @write
    def switch(self, epoch: int, map_: ShardMap) -> Steps[None]:
        """Give the shard a newer version of the map. Waits for publishes that have checked the old one."""
        yield from check_epoch(self.d, epoch)
        yield from self.d.lock_map(alone=True)
        ((_, text),) = yield Query(self.d.sql(_LOCK_MAP), {})
        found = ShardMap.decode(text)
        if found.pond != map_.pond or found.version > map_.version:
            raise ShardMapMismatch(f"the database at {self.runner.url} has another shard map than the mover expected")
        if found.version < map_.version:
            yield Query(self.d.sql(_SWITCH), {"version": map_.version, "map": map_.encode()})

    # --- at the old owner -----------------------------------------------------------------------------

    @read
    def page(self, after: UUID, limit: int) -> Steps[list[LiveMessage]]:
        """Live messages in the order of ids."""
        rows = yield Query(self.d.sql(_PAGE), {"after": self.d.id_in(after), "limit": limit})
        return [
            LiveMessage(self.d.id_out(id_), as_text(key), state != "PROCESSING", at) for id_, key, state, at in rows
        ]

    @read
    def waiting(self, ids: Sequence[UUID]) -> Steps[tuple[list[list[Any]], list[list[Any]], list[list[Any]]]]:
        """Messages that wait, what their handlers did once, and results of their steps. Ids are the first column."""
        keys = {"ids": [self.d.id_in(id_) for id_ in ids]}
        rows = yield Query(self.d.sql(_WAITING), keys)
        once = yield Query(self.d.sql(_ONCE), keys)
        steps = yield Query(self.d.sql(_STEPS), keys)
        results = [[message, self.d.id_out(id_), *rest] for message, id_, *rest in self._neutral(_STEP_COLUMNS, steps)]
        return self._neutral(WAITING, rows), self._neutral(_ONCE_COLUMNS, once), results

    @write
    def remove(self, epoch: int, target: str, rows: Sequence[Sequence[Any]]) -> Steps[set[UUID]]:
        """Delete messages that are as they were copied, and record them as moved. Returns the ids of these."""
        d = self.d
        yield from check_epoch(d, epoch)
        keys = {"ids": [d.id_in(row[0]) for row in rows]}
        copied = {row[0]: list(row) for row in rows}
        found = self._neutral(WAITING, (yield Query(d.sql(_LOCK_WAITING), keys)))
        same = {"ids": [d.id_in(row[0]) for row in found if row == copied[row[0]]]}
        if same["ids"]:
            at = (yield Query(d.sql(NOW), {"now": self.now}))[0][0]
            yield d.remove(same["ids"])
            yield Query(d.sql(_FORGET_MOVED), same)
            columns = ("id", "epoch", "target", "at")
            yield Many(d.sql(_RECORD_MOVED), columns, [(id_, epoch, target, at) for id_ in same["ids"]])
        moved = yield Query(d.sql(_MOVED_BY), {**keys, "epoch": epoch})
        return {d.id_out(row[0]) for row in moved}

    @read
    def moved(self, ids: Sequence[UUID]) -> Steps[dict[UUID, int]]:
        """Ids that were removed here, with the epochs of their movers."""
        rows = yield Query(self.d.sql(_MOVED), {"ids": [self.d.id_in(id_) for id_ in ids]})
        return {self.d.id_out(id_): int(epoch) for id_, epoch in rows}

    @write
    def forget(self, epoch: int, ids: Sequence[UUID]) -> Steps[None]:
        """Delete the records of ids that live here again."""
        yield from check_epoch(self.d, epoch)
        yield Query(self.d.sql(_FORGET_MOVED), {"ids": [self.d.id_in(id_) for id_ in ids]})

    @write
    def forget_moved(self) -> Steps[None]:
        at = (yield Query(self.d.sql(NOW), {"now": self.now}))[0][0]
        yield Query(self.d.sql(_FORGET_OLD), {"until": at - _KEEP_MOVED})

    @read
    def clock(self) -> Steps[int]:
        return int((yield Query(self.d.sql(NOW), {"now": self.now}))[0][0])

    @read
    def dedupe_page(self, low: int, after: UUID, high: int | None, limit: int) -> Steps[list[tuple[UUID, int, int]]]:
        """Dedupe rows in the order of expiry and id, after (low, after), that expire until `high`."""
        given = {"low": low, "after": self.d.id_in(after), "high": _NEVER if high is None else high, "limit": limit}
        rows = yield Query(self.d.sql(_DEDUPE_PAGE), given)
        return [(self.d.id_out(id_), publisher, expires) for id_, publisher, expires in rows]

    @read
    def count_dedupe(self, low: int, high: int | None) -> Steps[int]:
        """Number of dedupe rows that expire in (low, high]."""
        found = yield Query(self.d.sql(_COUNT_DEDUPE), {"low": low, "high": _NEVER if high is None else high})
        return int(found[0][0])

    @read
    def unique_page(self, after: UUID, limit: int) -> Steps[list[UniqueValue]]:
        """Unique values that are taken, in the order of their ids, with the keys of their messages."""
        d = self.d
        rows = yield Query(d.sql(_UNIQUE_PAGE), {"after": d.id_in(after), "limit": limit, "now": self.now})
        ended = [message for _, message, _, live, _ in rows if live is None]
        found = (yield Query(d.sql(_ARCHIVED_KEYS), {"ids": ended})) if ended else ()
        keys = {id_: as_text(key) for id_, key in found}
        return [
            UniqueValue(
                d.id_out(id_),
                d.id_out(message),
                until,
                live is not None,
                live is not None or message in keys,
                keys.get(message) if live is None else as_text(key),
            )
            for id_, message, until, live, key in rows
        ]

    @read
    def present(self, ids: Sequence[UUID]) -> Steps[set[UUID]]:
        """Messages that are live here."""
        rows = yield Query(self.d.sql(_PRESENT), {"ids": [self.d.id_in(id_) for id_ in ids]})
        return {self.d.id_out(row[0]) for row in rows}

    @read
    def schedules(self) -> Steps[list[list[Any]]]:
        """Schedules of periodic messages. The name is the first column."""
        return [[*map(_plain, _SCHEDULE, row)] for row in (yield Query(self.d.sql(_SCHEDULES), {}))]

    @write
    def drop_schedules(self, epoch: int, names: Sequence[str]) -> Steps[None]:
        yield from check_epoch(self.d, epoch)
        yield from self._drop_schedules(names)

    def _drop_schedules(self, names: Sequence[str]) -> Steps[None]:
        if names:
            yield Many(self.d.sql(_DROP_SCHEDULE), ("name",), [(name,) for name in names])

    # --- at the new owner -----------------------------------------------------------------------------

    @write
    def keep_unique(self, epoch: int, source: str, values: Sequence[UniqueValue]) -> Steps[None]:
        """Store values, before the shard accepts their key range. A live message is on its way from the old owner."""
        d = self.d
        yield from check_epoch(d, epoch)
        keys = {"ids": [d.id_in(one.id) for one in values]}
        found = {d.id_out(id_): until for id_, until in (yield Query(d.sql(_LOCK_UNIQUE), keys))}
        # A row of an earlier time, when the range was here, is old. Without a key the range is not known.
        wanted = [one for one in values if one.keyed or (found.get(one.id) or 0) < (one.until or 0)]
        if wanted:
            yield Query(d.sql(_DROP_UNIQUE), {"ids": [d.id_in(one.id) for one in wanted]})
            rows = [(d.id_in(one.id), d.id_in(one.message), one.until, source if one.live else None) for one in wanted]
            yield Many(d.sql(_KEEP_UNIQUE), ("id", "message", "until", "source"), rows)

    @write
    def keep_schedules(self, epoch: int, rows: Sequence[Sequence[Any]], old: Sequence[str]) -> Steps[None]:
        """Store schedules in place of old ones, before the shard accepts their key range."""
        yield from check_epoch(self.d, epoch)
        yield from self._drop_schedules(old)
        if rows:
            yield Many(self.d.sql(_KEEP_SCHEDULE), _SCHEDULE, rows)

    @read
    def awaited(self, source: str, after: UUID, limit: int) -> Steps[list[tuple[UUID, UUID]]]:
        """Unique values whose message is on its way from another shard: id, message."""
        given = {"source": source, "after": self.d.id_in(after), "limit": limit}
        rows = yield Query(self.d.sql(_AWAITED), given)
        return [(self.d.id_out(id_), self.d.id_out(message)) for id_, message in rows]

    @write
    def arrived(self, epoch: int, ids: Sequence[UUID]) -> Steps[None]:
        """The messages of these unique values are here, or were settled at the old owner."""
        yield from check_epoch(self.d, epoch)
        yield Query(self.d.sql(_ARRIVED), {"ids": [self.d.id_in(id_) for id_ in ids]})

    @write
    def keep_dedupe(self, epoch: int, rows: Sequence[tuple[UUID, int, int]]) -> Steps[None]:
        yield from check_epoch(self.d, epoch)
        values = [(self.d.id_in(id_), publisher, expires) for id_, publisher, expires in rows]
        keys = {"ids": [value[0] for value in values]}
        yield Query(self.d.sql(_FORGET_EXPIRED), {**keys, "now": self.now})
        known = {id_: (mark, until) for id_, mark, until in (yield Query(self.d.sql(_KNOWN), keys))}
        later = [(id_, expires) for id_, _, expires in values if id_ in known and _end(*known[id_]) < expires]
        if own := [row for row in later if known[row[0]][0] >= 0]:
            yield Many(self.d.sql(_ENDS_LATER), ("id", "expires_at"), own)
        if awaited := [(id_, -expires) for id_, expires in later if known[id_][0] < 0]:
            yield Many(self.d.sql(_WILL_END_LATER), ("id", "negative"), awaited)
        yield Many(self.d.sql(_REMEMBER), ("id", "publisher", "expires_at"), values)

    @write
    def copy(
        self,
        epoch: int,
        source: str,
        rows: Sequence[Sequence[Any]],
        once: Sequence[Sequence[Any]],
        steps: Sequence[Sequence[Any]],
    ) -> Steps[set[UUID]]:
        """Store copies that no claim sees. Returns the ids that are taken here by other messages: those must wait."""
        d = self.d
        yield from check_epoch(d, epoch)
        keys = {"ids": [d.id_in(row[0]) for row in rows]}
        taken = {d.id_out(row[0]) for row in (yield Query(d.sql(_PRESENT), keys))}
        yield Query(d.sql(_DROP), keys)
        values = [(source, epoch, d.id_in(row[0]), *row[1:]) for row in rows if row[0] not in taken]
        if values:
            yield Many(d.sql(_COPY), ("source", "epoch", *WAITING), values)
        if once:
            yield Many(d.sql(_KEEP_ONCE), _ONCE_COLUMNS, [(d.id_in(row[0]), *row[1:]) for row in once])
        if steps:
            stored = [(d.id_in(row[0]), d.id_in(row[1]), *row[2:]) for row in steps]
            found = yield Query(d.sql(_OWNERLESS_STEPS), {"ids": [row[1] for row in stored]})
            if ownerless := [row[0] for row in found]:
                yield Query(d.sql(_DROP_STEPS), {"ids": ownerless})
            yield Many(d.sql(_KEEP_STEP), _STEP_COLUMNS, stored)
        return taken

    @write
    def activate(self, epoch: int, moved: Sequence[UUID], others: Sequence[UUID]) -> Steps[None]:
        """Make copies messages, and delete the copies of `others`, which are still at the old owner."""
        d = self.d
        yield from check_epoch(d, epoch)
        wanted = {"ids": [d.id_in(id_) for id_ in moved]}
        if moved:
            # An id that another message has meanwhile, with another key, stays a copy until that one is settled.
            taken = {d.id_out(row[0]) for row in (yield Query(d.sql(_PRESENT), wanted))}
            wanted = {"ids": [d.id_in(id_) for id_ in moved if id_ not in taken]}
        if wanted["ids"]:
            queues = {row[0] for row in (yield Query(d.sql(_QUEUES), wanted))}
            yield Query(d.sql(_ACTIVATE), wanted)
            yield Query(d.sql(_HAVE_ARRIVED), {**wanted, "mark": MOVED_MARK})
            if self.runner.options.notify:
                yield from d.writes.notify(queues)
        if done := [*wanted["ids"], *map(d.id_in, others)]:
            yield Query(d.sql(_DROP), {"ids": done})

    @read
    def incoming(self, after: UUID, limit: int) -> Steps[list[tuple[UUID, str, int]]]:
        """Copies that are not messages yet, in the order of ids: id, old owner, epoch of the mover."""
        rows = yield Query(self.d.sql(_INCOMING), {"after": self.d.id_in(after), "limit": limit})
        return [(self.d.id_out(id_), source, int(epoch)) for id_, source, epoch in rows]

    @read
    def copies(self, ids: Sequence[UUID]) -> Steps[set[UUID]]:
        """Those of the ids that are copies, and no messages yet."""
        rows = yield Query(self.d.sql(_INCOMING_IDS), {"ids": [self.d.id_in(id_) for id_ in ids]})
        return {self.d.id_out(row[0]) for row in rows}

    @read
    def count_incoming(self) -> Steps[int]:
        return int((yield Query(self.d.sql(_COUNT_INCOMING), {}))[0][0])

    def _neutral(self, columns: Sequence[str], rows: Rows) -> list[list[Any]]:
        """Rows that every kind of database takes: ids as UUIDs, bodies as bytes."""
        return [[self.d.id_out(row[0]), *map(_plain, columns[1:], row[1:])] for row in rows]


def _plain(column: str, value: Any) -> Any:
    if column in _TEXTS:
        return as_text(value)
    if column == "payload":
        return as_body(value)
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


async def become_mover(
    coordinator: DatabaseMoving, rooms: Iterable[DatabaseMoving], change: MapChange | None, *, undo: bool = False
) -> Pending:
    """`begin` on the coordinator. A restored one may have a lower epoch than the others."""
    above = max([(await room.pending()).epoch for room in rooms])
    return await coordinator.begin(change, above, undo=undo)
