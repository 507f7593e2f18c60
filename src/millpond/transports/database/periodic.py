"""The periodic room. One transaction locks a row, publishes its times and stores the next one.

Ids follow from the name and the time, so a time is published once, also after a lost reply.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import SECOND, as_datetime, utc_text
from millpond.errors import DataRefused, InvalidOption, StoreError
from millpond.ids import id_from
from millpond.message import Draft, decode_headers
from millpond.schedule import CATCH_UP, MISSED_AFTER, Missed, Periodic, PeriodicRow, due_times, stored, times_of
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.messages.publish import insert_drafts
from millpond.transports.database.runner import Room, Runner, read, write
from millpond.transports.database.shards import Placed, check_owned, lock_if_shard, read_record
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Many, Query, Rows, Steps

log = logging.getLogger("millpond.periodic")

NAME, AT = "periodic", "periodic-at"
"""Headers of a periodic message: its name and time."""

_FIELDS = ("name", "queue", "schedule", "timezone", "missed", "priority", "payload", "headers")
_COLUMNS = ", ".join(_FIELDS)
_SELECT = f"SELECT {_COLUMNS}, paused, next_at, last_at FROM {{periodic}}"
_ALL = f"{_SELECT} ORDER BY name"
_ONE = f"{_SELECT} WHERE name = :name {{lock}}"
_DECLARED = "SELECT declared, schedule, timezone, paused, next_at FROM {periodic} WHERE name = :name {lock}"
_INSERT = f"""
INSERT INTO {{periodic}} ({_COLUMNS}, paused, declared, next_at)
VALUES ({", ".join(f":{field}" for field in _FIELDS)}, 0, :declared, :next_at)
{{or_update}} name = :name
"""
_CHANGE = f"""
UPDATE {{periodic}} SET {", ".join(f"{field} = :{field}" for field in _FIELDS[1:])}, paused = :paused,
declared = coalesce(:declared, declared), next_at = :next_at WHERE name = :name
"""
_REMOVE = "DELETE FROM {periodic} WHERE name = :name"
# Those that are behind come last: others would miss their times.
_DUE = f"""
{_SELECT} WHERE paused = 0 AND next_at <= :at
ORDER BY CASE WHEN next_at < :missed THEN 1 ELSE 0 END, next_at, name LIMIT :limit {{locked}}
"""
_DONE = "UPDATE {periodic} SET next_at = :next_at, last_at = coalesce(:last_at, last_at) WHERE name = :name"
_DUE_ALONE = f"{_SELECT} WHERE name = :name AND paused = 0 AND next_at <= :at {{locked}}"
_DUE_NAMES = "SELECT name FROM {periodic} WHERE paused = 0 AND next_at <= :at ORDER BY next_at, name LIMIT :limit"
_WAITING = f"{_SELECT} WHERE paused = 0 AND next_at > :at ORDER BY name"
_EARLIER = "UPDATE {periodic} SET next_at = :next_at WHERE name = :name AND next_at = :before"
_NEXT = "SELECT name, next_at FROM {periodic} WHERE paused = 0 ORDER BY next_at, name LIMIT :limit"
_AT_ONCE = 100
"""Maximum number of schedules that one transaction publishes."""
_LOCKED_FOR = 1.0
"""Seconds to wait while other transactions have locked all rows that are due."""


class DatabasePeriodic(Room):
    def __init__(self, runner: Runner, hints: Hints) -> None:
        super().__init__(runner)
        self._hints = hints
        self._unreadable: set[str] = set()
        """Names of schedules that this process cannot compute, such as one in a time zone that its machine lacks."""
        self._refused: list[str] = []
        """Names of schedules whose messages the database refused. The first is tried again, then the others."""
        self._published_at: int | None = None
        """The database's time of the last `publish_due`."""

    async def declare(self, periodics: Sequence[Periodic]) -> None:
        if periodics:
            self.runner.check_whole()
        for periodic in periodics:
            await self._declare(periodic)

    @write
    def _declare(self, periodic: Periodic) -> Steps[None]:
        d = self.d
        yield from _check_name(d, periodic.name)
        declared = msgspec.json.encode(periodic).decode()
        at = (yield Query(d.sql(NOW), {"now": self.now}))[0][0]
        next_at = times_of(periodic.schedule, periodic.timezone).after(at)
        values = _values(periodic, declared=declared, next_at=next_at)
        rows = yield Query(d.sql(_DECLARED), {"name": periodic.name})
        if not rows:
            yield Query(d.sql(_INSERT), values)
            return
        before, schedule, timezone, paused, stored_at = rows[0]
        if before != declared:
            # A time that is due already stays due: a new body does not skip the run that a deploy delayed.
            if (schedule, timezone) == (periodic.schedule, periodic.timezone):
                values["next_at"] = stored_at
            yield Query(d.sql(_CHANGE), {**values, "paused": paused})

    @read
    def all(self) -> Steps[list[PeriodicRow]]:
        """Without those that another shard owns: rows may be older than the shard map."""
        record = yield from read_record(self.d)
        rows = [_row(row) for row in (yield Query(self.d.sql(_ALL), {}))]
        return [row for row in rows if record is None or record.owns(row.periodic.name)]

    async def change(
        self,
        name: str,
        *,
        schedule: str | None = None,
        timezone: str | None = None,
        missed: Missed | None = None,
        queue: str | None = None,
        paused: bool | None = None,
    ) -> bool:
        given = {"schedule": schedule, "timezone": timezone, "missed": missed, "queue": queue}
        changes = {field: value for field, value in given.items() if value is not None}
        if not changes and paused is None:
            raise InvalidOption("nothing to change: give schedule, timezone, missed, queue or paused")
        return await self._change(name, changes, paused)

    @write
    def _change(self, name: str, changes: dict[str, Any], paused: bool | None) -> Steps[bool]:
        d = self.d
        yield from _check_name(d, name)
        rows = yield Query(d.sql(_ONE), {"name": name})
        if not rows:
            return False
        row = _row(rows[0])
        periodic = msgspec.structs.replace(row.periodic, **changes) if changes else row.periodic
        next_at = row.next_us
        if changes.keys() & {"schedule", "timezone"} or (row.paused and paused is False):
            at = (yield Query(d.sql(NOW), {"now": self.now}))[0][0]
            next_at = times_of(periodic.schedule, periodic.timezone).after(at)
        stays = row.paused if paused is None else paused
        yield Query(d.sql(_CHANGE), {**_values(periodic, declared=None, next_at=next_at), "paused": int(stays)})
        return True

    @write
    def remove(self, name: str) -> Steps[bool]:
        yield from _check_name(self.d, name)
        rows = yield Query(self.d.sql(_ONE), {"name": name})
        yield Query(self.d.sql(_REMOVE), {"name": name})
        return bool(rows)

    async def publish_due(self) -> float | None:
        if self._refused and await self._publish_alone(self._refused[0]):
            self._refused.clear()
        try:
            return await self._publish(None)
        except StoreError as e:
            if not _may_concern_one(e):
                raise
        # A message that the database refuses fails the transaction of all: each has one of its own.
        for name in await self._due_names():
            await self._publish_alone(name)
        return await self._publish(None)

    async def _publish(self, name: str | None) -> float | None:
        at, wait, drafts = await self._publish_due(name)
        if drafts:
            self._hints.published(drafts)
        # Also at the first time: the step may have happened while no worker ran.
        was_set_back = self._published_at is None or at < self._published_at - MISSED_AFTER
        if was_set_back and await self._follow_clock():
            wait = 0.0
        self._published_at = at
        return wait

    async def _publish_alone(self, name: str) -> bool:
        """False if the database refuses it."""
        try:
            await self._publish(name)
        except StoreError as e:
            if not _may_concern_one(e):
                raise
            if name in self._refused:
                self._refused.remove(name)
            else:
                log.error("periodic message %r is not published: %s", name, e)
            self._refused.append(name)
            return False
        return True

    @read
    def _due_names(self) -> Steps[list[str]]:
        at = (yield Query(self.d.sql(NOW), {"now": self.now}))[0][0]
        rows = yield Query(self.d.sql(_DUE_NAMES), {"at": at, "limit": _AT_ONCE + len(self._refused)})
        return [name for (name,) in rows if name not in self._refused]

    async def _follow_clock(self) -> int:
        """Correct next times that were computed before the database's clock was set back; returns their number.

        They are computed outside of the transaction that writes: SQLite has one writer at a time.
        """
        at, rows = await self._waiting()
        earlier: list[tuple[str, int, int]] = []
        for values in rows:
            try:
                row = _row(values)
                next_at = times_of(row.periodic.schedule, row.periodic.timezone).after(at)
            except Exception:  # it is logged when it is due
                continue
            if next_at < row.next_us:
                earlier.append((row.periodic.name, next_at, row.next_us))
        return await self._correct(earlier) if earlier else 0

    @read
    def _waiting(self) -> Steps[tuple[int, Rows]]:
        at = (yield Query(self.d.sql(NOW), {"now": self.now}))[0][0]
        return at, (yield Query(self.d.sql(_WAITING), {"at": at}))

    @write
    def _correct(self, earlier: Sequence[tuple[str, int, int]]) -> Steps[int]:
        record = yield from lock_if_shard(self.d)
        mine = [values for values in earlier if record is None or record.owns(values[0])]
        if mine:
            yield Many(self.d.sql(_EARLIER), ("name", "next_at", "before"), mine)
        return len(mine)

    @write
    def _publish_due(self, alone: str | None) -> Steps[tuple[int, float | None, list[Draft]]]:
        """(database's time, seconds until the next time, published). `alone`: this one; None: all but refused ones."""
        d = self.d
        drafts: list[Draft] = []
        unreadable: set[str] = set()
        found_any = False
        at = (yield Query(d.sql(NOW), {"now": self.now}))[0][0]
        first = yield Query(d.sql(_NEXT), {"limit": 1})
        if not first or first[0][1] > at:
            return at, (first[0][1] - at) / SECOND if first else None, []
        # Before rows of schedules: other transactions lock them in this order too.
        record = yield from lock_if_shard(d)
        keyed = record is not None and len(record.map.shards) > 1
        if alone is None:
            limit = _AT_ONCE + len(self._unreadable) + len(self._refused)
            found = yield Query(d.sql(_DUE), {"at": at, "missed": at - MISSED_AFTER, "limit": limit})
            if len(found) == limit:  # others may not have been read this time
                unreadable |= self._unreadable - {values[0] for values in found}
        else:
            found = yield Query(d.sql(_DUE_ALONE), {"at": at, "name": alone})
        # A transaction with all times of many schedules would exceed its timeout.
        share = max(1, CATCH_UP // max(1, len(found)))
        for values in found:
            name = values[0]
            if (alone is None and name in self._refused) or (record is not None and not record.owns(name)):
                unreadable.add(name)
                continue
            try:
                row = _row(values)
                row.periodic.check()
                times, next_at = due_times(row, at, share)
                drafts += [_draft(row.periodic, time, keyed=keyed) for time in times]
            except Exception as e:  # the row may hold anything: one that cannot be read delays no other one
                unreadable.add(name)
                if name not in self._unreadable:
                    log.error("periodic message %r is not published: %s", name, e)
                continue
            last = times[-1] if times else None
            yield Query(d.sql(_DONE), {"name": name, "next_at": next_at, "last_at": last})
            found_any = True
        if alone is None:
            self._unreadable = unreadable
        if drafts:
            yield from insert_drafts(
                d,
                drafts,
                now=self.now,
                dedupe_for=self.runner.dedupe_for,
                own_connection=True,
                notify=self.runner.options.notify,
            )
        nexts = yield Query(d.sql(_NEXT), {"limit": 1 + len(unreadable)})
        next_us = min((next_at for name, next_at in nexts if name not in unreadable), default=None)
        if next_us is None:
            return at, None, drafts
        if next_us <= at and not found_any:
            return at, _LOCKED_FOR, drafts
        return at, max(next_us - at, 0) / SECOND, drafts


def _may_concern_one(error: StoreError) -> bool:
    """Whether the database may take the messages of other schedules: a value or a user's trigger is the cause."""
    return type(error) in (StoreError, DataRefused)


def _check_name(d: Dialect, name: str) -> Steps[None]:
    """Raise if the schedule belongs to another shard. None can take it over before this transaction ends."""
    yield from check_owned(d, [Placed(name, UUID(int=0))])


def _values(periodic: Periodic, **more: Any) -> dict[str, Any]:
    return {**{field: getattr(periodic, field) for field in _FIELDS}, **more}


def _row(values: Sequence[Any]) -> PeriodicRow:
    fields = dict(zip(_FIELDS, values, strict=False))
    paused, next_us, last_us = values[len(_FIELDS) :]
    periodic = stored({**fields, "payload": bytes(fields["payload"])})
    return PeriodicRow(periodic=periodic, paused=bool(paused), next_us=next_us, last_us=last_us)


def _draft(periodic: Periodic, at: int, *, keyed: bool) -> Draft:
    """`keyed`: the name is the key, so that the message belongs to the shard of the schedule."""
    headers = {**decode_headers(periodic.headers), NAME: periodic.name, AT: utc_text(as_datetime(at))}
    return Draft(
        id_from(NAME, periodic.name, at),
        True,
        periodic.queue,
        periodic.name if keyed else None,
        periodic.priority,
        0,
        at,
        None,
        None,
        msgspec.json.encode(headers).decode(),
        periodic.payload,
    )
