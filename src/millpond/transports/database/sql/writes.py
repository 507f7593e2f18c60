"""How a database takes a batch of messages: `Writes`, and `LockThenWrite` for MySQL, MariaDB and SQLite.

PostgreSQL locks, checks and writes in one statement (`postgres/one_statement.py`). No other code asks which one it is.

`token` stays on a row after nack and give-back: the same settle, repeated because its reply was lost, then recognises
its own work. A reaper clears it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any, Protocol
from uuid import UUID

import msgspec

from millpond.message import SUSPECT, Claim, Draft
from millpond.outcome import Change
from millpond.seam.transport import NEVER_US
from millpond.transports.database.sql.columns import (
    ARCHIVED,
    CLAIMED,
    CRASHES,
    DUE,
    GIVEN,
    ID,
    INSERTED,
    PRIORITY,
    as_archived,
    back_to_waiting,
    claims,
    names,
    new_message,
    new_records,
    times,
)
from millpond.transports.database.sql.dialect import NOW, Dialect, Floor, Named
from millpond.transports.database.sql.statement import LONGEST_LIST, Many, Query, Rows, Step, Steps

Key = tuple[Any, int]
"""A receipt as the database takes it: the id and the token. Looked up much faster than a receipt itself."""


class Stamp(msgspec.Struct, frozen=True):
    """The values that one claim writes on its rows."""

    token: int
    worker: int | None
    lease: int
    now: int | None
    ahead: int = 0
    by_worker: bool = False
    """The beats of the worker extend the lease. Otherwise the message has its own lease."""

    @property
    def own_lease(self) -> int | None:
        return None if self.by_worker else self.lease


class Taken(msgspec.Struct, frozen=True):
    """The part of a stream's claim that came from one lane."""

    messages: int
    last_due: int | None
    expired: list[Any]
    """Messages that must not run, also of lanes before."""


InsertGiven = Callable[..., Steps[set[UUID]]]
"""Drafts, mark, now, dedupe_for, notify; returns the ids that are new."""


class Writes(Protocol):
    """How a database takes a batch. Each settling method returns the keys that were not written."""

    def is_one_statement(self, drafts: Sequence[Draft], *, new: bool, own_connection: bool) -> bool:
        """Whether one statement publishes these, and no transaction is needed around it. `new`: see `are_new`."""

    @property
    def insert_given(self) -> InsertGiven | None:
        """Stores messages with given ids unless they are known. None: the database has no statement for this."""

    def insert(self, drafts: Sequence[Draft], now: int | None, *, own_connection: bool, notify: bool) -> Steps[None]:
        """Store new messages. `notify`: also notify their queues."""

    def load(self, table: str, columns: Sequence[str], records: Sequence[Sequence[Any]]) -> Steps[None]:
        """Store rows in the fastest way, on one of our connections."""

    def notify(self, queues: Collection[str]) -> Steps[None]:
        """Notify workers that wait for these queues, where the database can."""

    def claim_lane(
        self, queue: str, lane: int, limit: int, stamp: Stamp, floor: Floor | None
    ) -> Steps[list[Claim]]: ...

    def claim_ids(self, queues: Sequence[str], ids: Sequence[Any], limit: int, stamp: Stamp) -> Steps[list[Claim]]: ...

    def extend(self, keys: Sequence[Key], lease: int, now: int | None) -> Steps[list[Key]]: ...

    def detach(self, keys: Sequence[Key], now: int | None, *, abandoned: bool) -> Steps[list[Key]]:
        """Give messages their own lease, which begins now and which no beat extends. `abandoned`: no worker's."""

    def attach(self, keys: Sequence[Key]) -> Steps[list[Key]]:
        """Let the beats of their worker extend the leases again."""

    def archive(self, change: Change, keys: Sequence[Key], now: int | None, *, wait: bool) -> Steps[list[Key]]:
        """Move messages into the archive, or delete them if the change keeps none. `wait`: for locked rows."""

    def archive_each(self, rows: Sequence[tuple[Key, Change]], now: int | None, *, wait: bool) -> Steps[list[Key]]:
        """Move messages into the archive, each with its own reason and error."""

    def requeue(
        self, rows: Sequence[tuple[Key, Change]], now: int | None, *, wait: bool, notify: bool
    ) -> Steps[list[Key]]:
        """Give messages back to waiting, each with its own delay and error. `notify`: their queues too, if due soon."""

    def take_for_stream(self, params: dict[str, Any], before: int) -> Steps[Taken]:
        """Claim from one lane for a stream; `before`: messages that the claim has already."""

    def settle_stream(self, chosen: dict[str, Any]) -> Steps[None]:
        """Move the messages of a stream's claim with one outcome into the archive."""


# --- publish --------------------------------------------------------------------------------------------

# One message alone: the statement reads the clock itself and needs no transaction around it.
_INSERT_ONE = "INSERT INTO {{message}} ({}) VALUES ({})".format(*new_message(":", **times(":")))


def _insert(table: str, names_: Sequence[str]) -> str:
    return f"INSERT INTO {{{table}}} ({names(names_)}) VALUES ({', '.join(f':{name}' for name in names_)})"


# --- claim: lock, then stamp, in one short transaction ---------------------------------------------------

# The values after the stamp.
_TO_CLAIM = f"""
{names(CLAIMED, "m.").replace("m.deliveries", "m.deliveries + 1")}, {{now}}, {{now}} + :lease
"""
_LOCK_LANE = f"""
SELECT {_TO_CLAIM} FROM {{message}} m {{claim_index}}
WHERE m.queue = :queue AND {{ready}} AND m.lane = :lane AND m.due_at <= {{now}} {{from_floor}}
AND NOT EXISTS (SELECT 1 FROM {{queue}} q WHERE q.name = :queue AND q.paused = 1)
ORDER BY m.due_at, m.id LIMIT :limit {{locked}}
"""
_LOCK_IDS = f"""
SELECT {_TO_CLAIM} FROM {{message}} m {{id_index}}
WHERE m.id {{ids}} AND {{ready}} AND m.queue {{queues}} AND m.due_at <= {{now}}
AND NOT EXISTS (SELECT 1 FROM {{queue}} q WHERE q.name = m.queue AND q.paused = 1)
ORDER BY m.lane, m.due_at, m.id LIMIT :limit {{locked}}
"""
_STAMP = """
UPDATE {message} SET state = 'PROCESSING', deliveries = deliveries + 1, token = :token, worker = :worker,
ahead = :ahead, acquired_at = :at, lease = :lease, lease_until = :until WHERE id {ids}
"""


def by_lane(row: Sequence[Any]) -> tuple[Any, ...]:
    """The order of claims; a suspect comes after the others."""
    return row[CRASHES] >= SUSPECT, row[PRIORITY], row[DUE], row[ID]


# --- extend and settle: each write is fenced by (id, token) ----------------------------------------------

# By the index of ids also where the table is small: InnoDB would read, and lock, rows of other claims.
_CLAIMED = "SELECT id, token FROM {message} {id_index} WHERE id {ids} AND state = 'PROCESSING'"
EXTENDED = "lease = :lease, lease_until = CASE WHEN lease_until IS NULL THEN NULL ELSE {now} + :lease END"
DETACHED = "lease_until = {now} + lease"
# Without a worker the end of the lease is no crash.
ABANDONED = f"{DETACHED}, worker = NULL"
# A claim without a worker keeps its own lease: no beat would extend it.
ATTACHED = "lease_until = CASE WHEN worker IS NULL THEN lease_until ELSE NULL END"
_EXTEND, _DETACH, _ABANDON, _ATTACH = (
    f"UPDATE {{message}} {{id_index}} SET {change} WHERE id {{ids}}"
    for change in (EXTENDED, DETACHED, ABANDONED, ATTACHED)
)

# The payload moves inside the server.
_KEEP = f"INSERT INTO {{archive}} ({names(ARCHIVED)}) SELECT {as_archived()} FROM {{message}} WHERE id"
KEEP_IDS = f"{_KEEP} {{ids}}"
_KEEP_EACH = Named("keep each", f"{_KEEP} = :id")

_REQUEUE = Named("requeue", f"UPDATE {{message}} SET {back_to_waiting()} WHERE id = :id")


def archived_as(change: Change, now: int | None) -> dict[str, Any]:
    """The parameters of `as_archived`."""
    return {
        "attempts": change.attempts,
        "state": change.state.value,
        "reason": change.reason,
        "error": change.error,
        "attempt": change.attempt,
        "failure": change.failure,
        "now": now,
    }


def requeued_as(change: Change, now: int | None) -> dict[str, Any]:
    """The parameters of `back_to_waiting`."""
    return {
        "state": change.state.value,
        "attempts": change.attempts,
        "deliveries": change.deliveries,
        "crashes": change.crashes,
        "now": now,
    }


def archive_locked(d: Dialect, change: Change, ids: Sequence[Any], now: int | None) -> Steps[None]:
    """Move rows that this transaction has locked, or written, into the archive."""
    if change.keep:
        yield Query(d.sql(KEEP_IDS), {"ids": ids, **archived_as(change, now)})
    yield d.remove(ids)


# --- streams: a table has the ids of a claim, so neither ids nor payloads travel ---------------------------

DUE_FOR_STREAM = """
m.queue = :queue AND {ready} AND m.lane = :lane AND m.due_at <= {now} AND m.due_at <= :until AND m.created_at <= :until
{from_floor} AND NOT EXISTS (SELECT 1 FROM {queue} q WHERE q.name = :queue AND q.paused = 1)
"""
_TAKE = f"""
INSERT INTO {{stream_message}} (stream, seq, id) SELECT :stream, :seq, m.id FROM {{message}} m {{claim_index}}
WHERE {DUE_FOR_STREAM} ORDER BY m.due_at, m.id LIMIT :limit {{locked}}
"""
# Without a token: no receipt of an earlier claim settles the messages of a stream.
STREAM_STAMP = f"""
state = 'PROCESSING', deliveries = deliveries + 1, token = NULL, worker = NULL, acquired_at = {{now}},
lease_until = {NEVER_US}
"""
_STAMP_STREAM = Named(
    "stamp for stream",
    f"""
UPDATE {{message}} {{id_index}} SET {STREAM_STAMP} WHERE id {{in_select}} SELECT s.id FROM {{stream_message}} s
WHERE s.stream = :stream AND s.seq = :seq {{end_select}} AND state <> 'PROCESSING'
""",
)

OF_CLAIM = "{stream_message} s {inner} {message} m ON m.id = s.id WHERE s.stream = :stream AND s.seq = :seq"
EXPIRED = "m.expires_at <= {now}"
_TAKEN = f"""
SELECT count(*), max(CASE WHEN m.queue = :queue AND m.lane = :lane THEN m.due_at END),
count(CASE WHEN {EXPIRED} THEN 1 END) FROM {OF_CLAIM}
"""
_EXPIRED = f"SELECT m.id FROM {OF_CLAIM} AND {EXPIRED}"

OF_STREAM = {"attempt": "", "failure": "CASE WHEN :state = 'FAILED' THEN 0 END"}
"""Rejects of streams have one fingerprint: their reasons are not read."""
SETTLED_AS = "coalesce(s.outcome, :unsettled) = :outcome"
REASON = "coalesce(s.reason, CASE WHEN s.outcome IS NULL THEN :reason ELSE 'rejected' END)"
CHOSEN = f"""
{{in_select}} SELECT s.id FROM {{stream_message}} s WHERE s.stream = :stream AND s.seq = :seq AND {SETTLED_AS}
{{end_select}}
"""
# Each with the reason that was recorded for it.
_KEEP_STREAM = f"""
INSERT INTO {{archive}} ({names(ARCHIVED)})
SELECT {as_archived("m.", ran="1", reason=f"CASE WHEN :state = 'FAILED' THEN {REASON} END", error="", **OF_STREAM)}
FROM {OF_CLAIM} AND {SETTLED_AS}
"""
_REMOVE_STREAM = Named("remove of stream", f"DELETE FROM {{message}} WHERE id {CHOSEN}")


class LockThenWrite:
    """Lock the rows that receipts own, then write them: two or three statements of one transaction."""

    def __init__(self, d: Dialect) -> None:
        self._d = d

    def is_one_statement(self, drafts: Sequence[Draft], *, new: bool, own_connection: bool) -> bool:
        return new and len(drafts) == 1

    insert_given = None

    def insert(self, drafts: Sequence[Draft], now: int | None, *, own_connection: bool, notify: bool) -> Steps[None]:
        d = self._d
        if len(drafts) == 1:
            (draft,) = drafts
            params = {"now": now, "id": d.id_in(draft.id)}
            for name, field in GIVEN.items():
                params[name] = getattr(draft, field)
            yield Query(d.sql(_INSERT_ONE), params)
            return
        at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
        yield from self.load("message", INSERTED, new_records(drafts, at, d.id_in))

    def load(self, table: str, columns: Sequence[str], records: Sequence[Sequence[Any]]) -> Steps[None]:
        yield Many(self._d.sql(_insert(table, columns)), columns, records)

    def notify(self, queues: Collection[str]) -> Steps[None]:
        yield from ()

    def claim_lane(self, queue: str, lane: int, limit: int, stamp: Stamp, floor: Floor | None) -> Steps[list[Claim]]:
        rows = yield Query(self._d.sql(_LOCK_LANE), in_lane(self._d, queue, lane, limit, stamp, floor))
        return (yield from self._stamp(rows, stamp))

    def claim_ids(self, queues: Sequence[str], ids: Sequence[Any], limit: int, stamp: Stamp) -> Steps[list[Claim]]:
        params = {"ids": ids, "queues": queues, "limit": limit, "now": stamp.now, "lease": stamp.lease}
        rows = yield Query(self._d.sql(_LOCK_IDS), params)
        if len(ids) > LONGEST_LIST:  # asked in parts, each in its own order and with its own limit
            rows = sorted(rows, key=by_lane)[:limit]
        return (yield from self._stamp(rows, stamp))

    def _stamp(self, rows: Rows, stamp: Stamp) -> Steps[list[Claim]]:
        if not rows:
            return []
        at, until = rows[0][-2:]
        params = {"ids": list(map(itemgetter(ID), rows)), "token": stamp.token, "worker": stamp.worker}
        lease = {"at": at, "lease": stamp.lease, "until": None if stamp.by_worker else until}
        yield Query(self._d.sql(_STAMP), {**params, **lease, "ahead": stamp.ahead})
        return claims(rows, stamp.token, self._d.id_out)

    def extend(self, keys: Sequence[Key], lease: int, now: int | None) -> Steps[list[Key]]:
        return self._change(_EXTEND, keys, {"lease": lease, "now": now})

    def detach(self, keys: Sequence[Key], now: int | None, *, abandoned: bool) -> Steps[list[Key]]:
        return self._change(_ABANDON if abandoned else _DETACH, keys, {"now": now})

    def attach(self, keys: Sequence[Key]) -> Steps[list[Key]]:
        return self._change(_ATTACH, keys, {})

    def _change(self, text: str, keys: Sequence[Key], params: dict[str, Any]) -> Steps[list[Key]]:
        ours, missing = yield from self._lock(keys, wait=False)
        if ours:
            step = Query(self._d.sql(text), {"ids": [id_ for id_, _ in ours], **params})
            yield from self._write([step], wait=False)
        return missing

    def archive(self, change: Change, keys: Sequence[Key], now: int | None, *, wait: bool) -> Steps[list[Key]]:
        ours, missing = yield from self._lock(keys, wait, archives=change.keep)
        if ours:
            yield from self._write(archive_locked(self._d, change, [id_ for id_, _ in ours], now), wait)
        return missing

    def archive_each(self, rows: Sequence[tuple[Key, Change]], now: int | None, *, wait: bool) -> Steps[list[Key]]:
        ours, missing = yield from self._lock([key for key, _ in rows], wait, archives=True)
        if ours:
            c, gone = rows[0][1], set(missing)
            shared = {"attempts": c.attempts, "state": c.state.value, "now": now}
            each = [(key[0], c.reason, c.error, c.attempt, c.failure) for key, c in rows if key not in gone]
            columns = ("id", "reason", "error", "attempt", "failure")
            yield from self._write(self._d.many(_KEEP_EACH, shared, columns, each), wait)
            yield from self._write([self._d.remove([id_ for id_, _ in ours])], wait)
        return missing

    def requeue(
        self, rows: Sequence[tuple[Key, Change]], now: int | None, *, wait: bool, notify: bool
    ) -> Steps[list[Key]]:
        ours, missing = yield from self._lock([key for key, _ in rows], wait)
        if ours:
            gone = set(missing)
            each = [(key[0], c.delay_us, c.error, c.attempt) for key, c in rows if key not in gone]
            many = self._d.many(_REQUEUE, requeued_as(rows[0][1], now), ("id", "delay", "error", "attempt"), each)
            yield from self._write(many, wait)
        return missing

    def _lock(self, keys: Sequence[Key], wait: bool, *, archives: bool = False) -> Steps[tuple[list[Key], list[Key]]]:
        """Lock the rows that receipts still own; returns those, and the others. The locks make this check hold."""
        text = f"{_CLAIMED} {self._d.and_locks_archive}" if archives else _CLAIMED
        locking = f"{text} {{lock}}" if wait else f"{text} {{locked}}"
        rows = yield Query(self._d.sql(locking), {"ids": [id_ for id_, _ in keys]})
        held = {(bytes(id_), token) for id_, token in rows}
        ours = [key for key in keys if key in held]
        return ours, [key for key in keys if key not in held] if len(ours) < len(keys) else []

    def _write(self, steps: Iterable[Step], wait: bool) -> Steps[None]:
        """Run steps without results. Without `wait`, a lock of a user's trigger or foreign key is not waited for."""
        for step in steps:
            yield step if wait else self._d.without_waiting(step)

    def take_for_stream(self, params: dict[str, Any], before: int) -> Steps[Taken]:
        d = self._d
        yield Query(d.sql(_TAKE), params)
        yield Query(d.sql(_STAMP_STREAM), params)
        ((total, last, expired),) = yield Query(d.sql(_TAKEN), params)
        rows = (yield Query(d.sql(_EXPIRED), params)) if expired else ()
        return Taken(int(total) - before, last, [bytes(row[0]) for row in rows])

    def settle_stream(self, chosen: dict[str, Any]) -> Steps[None]:
        yield from self._d.lock_archive()
        yield Query(self._d.sql(_KEEP_STREAM), chosen)
        yield Query(self._d.sql(_REMOVE_STREAM), chosen)


def in_lane(d: Dialect, queue: str, lane: int, limit: int, stamp: Stamp, floor: Floor | None) -> dict[str, Any]:
    """The parameters of a claim from one lane."""
    due, id_ = floor or d.no_floor
    return {
        "queue": queue,
        "lane": lane,
        "limit": limit,
        "now": stamp.now,
        "lease": stamp.lease,
        "own_lease": stamp.own_lease,
        "floor_due": due,
        "floor_id": id_,
    }
