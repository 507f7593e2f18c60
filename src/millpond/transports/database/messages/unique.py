"""Unique messages, as steps. One row for each unique value is locked first, so publishers of a value go one by one.

The message of that row is locked too: it cannot be claimed between the decision and the commit. A message that is kept
runs after the publisher's commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond.errors import ShardMapChanged
from millpond.message import Draft, Published, State
from millpond.transports.database.messages.repeated_publish import count_delivery, present_ids
from millpond.transports.database.sql.columns import GIVEN, PLAIN, TIMES, names, times
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Many, Query, Steps

# The conflict locks the row exclusively. A lock after a skipped insert would begin as a shared one in InnoDB, and two
# publishers would deadlock.
_ENTER = "INSERT INTO {unique} (id, message, until) VALUES (:id, NULL, NULL) {or_lock}"
# Locking reads: in MySQL's REPEATABLE READ a plain read would be as old as the caller's transaction.
_LAST = "SELECT message, until, source FROM {unique} WHERE id = :id {lock}"
_STATE = "SELECT state, created_at, expires_at FROM {message} {id_index} WHERE id = :id {lock}"
# A message within its window was archived within it, too: older parts of the archive are not read.
_ARCHIVED = """
SELECT created_at FROM {archive} {archive_id_index} WHERE id = :id AND archived_at > :since
"""
_HANDLED_HERE = "SELECT id FROM {archive} {archive_id_index} WHERE id = :id"
_HOLD = "UPDATE {unique} SET message = :message, until = :until, source = NULL WHERE id = :id"
_DUE = times(":")["due_at"]
_EXPIRES = times(":")["expires_at"]
_REPLACED = ", ".join(f"{names([column])} = :{column}" for column in PLAIN if column != "queue")
# The attempts were those of the body before: the new one has all of its own. Crashes stay, as they guard the workers.
_REPLACE = f"""
UPDATE {{message}} SET {_REPLACED},
due_at = {_DUE}, expires_at = {_EXPIRES}, state = 'PENDING', attempts = 0, first_attempt_at = NULL, last_error = NULL
WHERE id = :id
"""
# With the new expiry: a message that is postponed beyond its old one would never run.
_POSTPONE = f"UPDATE {{message}} SET due_at = {_DUE}, expires_at = {_EXPIRES} WHERE id = :id"
_FORGETTABLE = """
SELECT u.id, u.message FROM {unique} u WHERE (u.until IS NULL OR u.until <= {now}) AND u.message IS NOT NULL
AND u.source IS NULL AND NOT EXISTS (SELECT 1 FROM {message} m WHERE m.id = u.message) LIMIT :limit
"""
# With the message that was read: a publisher may have stored a new one meanwhile.
_FORGET = "DELETE FROM {unique} WHERE id = :id AND message = :message"


def publish_unique(
    d: Dialect,
    drafts: Sequence[Draft],
    now: int | None,
    *,
    known_for: int | None = None,
    own_connection: bool,
    notify: bool,
) -> Steps[dict[UUID, Published]]:
    """Publish each draft unless its unique value is taken; returns the result by the id of the draft.

    `known_for`: given if an earlier try may have been committed. Its messages are then looked for, also in the archive
    of that many microseconds.
    """
    results = {}
    # In the same order everywhere: two publishers of the same values wait for each other and do not deadlock.
    for draft in sorted(drafts, key=_row_id):
        results[draft.id] = yield from _publish_one(
            d, draft, now, known_for=known_for, own_connection=own_connection, notify=notify
        )
    return results


def _row_id(draft: Draft) -> UUID:
    assert draft.unique is not None
    return draft.unique.id


def _publish_one(
    d: Dialect, draft: Draft, now: int | None, *, known_for: int | None, own_connection: bool, notify: bool
) -> Steps[Published]:
    unique = draft.unique
    assert unique is not None
    row, id_ = d.id_in(unique.id), d.id_in(draft.id)
    yield Query(d.sql(_ENTER), {"id": row})
    ((message, until, source),) = yield Query(d.sql(_LAST), {"id": row})
    last = None if message is None else d.id_out(message)
    if last == draft.id:  # an earlier try was committed, and its reply lost
        return Published(draft.id)
    # The value may have had other messages since, or its free row may have been deleted.
    if known_for is not None and (yield from present_ids(d, [id_], now, known_for)):
        return Published(draft.id)
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    if last is not None:
        rows = yield Query(d.sql(_STATE), {"id": message})
        if source is not None and not rows:
            yield from _check_arrived(d, draft, message, source, in_window=until is not None and until > at)
        state, created, expires = (State(rows[0][0]), *rows[0][1:]) if rows else (None, None, None)
        waits = state in (State.PENDING, State.RETRYABLE)
        if unique.window_us is None:
            expired = expires is not None and expires <= at  # it waits to be FAILED, and never runs
            taken = (waits and not expired) or (state is State.PROCESSING and unique.unfinished)
        else:
            taken = until is not None and until > at
            if not taken:  # its publisher gave another rule, or a shorter window
                taken = yield from _is_within(d, message, created, at, unique.window_us)
        if taken:
            result = yield from _resolve(d, draft, message, now, waits=waits, notify=notify)
            return Published(last, False, result)
    yield from d.writes.insert([draft], now, own_connection=own_connection, notify=notify)
    if known_for is not None:
        yield from count_delivery(d, [id_])
    ends = None if unique.window_us is None else at + unique.window_us
    yield Query(d.sql(_HOLD), {"id": row, "message": id_, "until": ends})
    return Published(draft.id)


def _check_arrived(d: Dialect, draft: Draft, message: Any, source: str, *, in_window: bool) -> Steps[None]:
    """Raise if the state of the message is not known here: its key range came here, and it is still on the way."""
    unique = draft.unique
    assert unique is not None
    if in_window and unique.window_us is not None and unique.on_conflict in ("keep", "raise"):
        return  # its state does not count
    if (yield Query(d.sql(_HANDLED_HERE), {"id": message})):
        return
    raise ShardMapChanged(
        f"the last message with this unique value is on its way from shard {source!r}, and claimed messages "
        "are waited for there; nothing was published. Publish again, or finish the move: millpond shards status"
    )


def _is_within(d: Dialect, message: Any, created: int | None, at: int, window: int) -> Steps[bool]:
    """Whether the message, live or archived, was published within this window."""
    if created is None:
        rows = yield Query(d.sql(_ARCHIVED), {"id": message, "since": at - window})
        created = rows[0][0] if rows else None
    return created is not None and created + window > at


def _resolve(d: Dialect, draft: Draft, message: Any, now: int | None, *, waits: bool, notify: bool) -> Steps[str]:
    """The effect on the message that has the unique value. One that runs, or is finished, is kept as it is."""
    assert draft.unique is not None
    choice = draft.unique.on_conflict
    if choice == "raise":
        return "refused"
    if choice == "keep" or not waits:
        return "kept"
    values = {name: getattr(draft, field) for name, field in GIVEN.items()}
    wanted = _REPLACE if choice == "replace" else _POSTPONE
    used = GIVEN if choice == "replace" else TIMES
    yield Query(d.sql(wanted), {"id": message, "now": now, **{name: values[name] for name in used}})
    if notify:
        yield from d.writes.notify({draft.queue})
    return "replaced" if choice == "replace" else "postponed"


def forget_uniques(d: Dialect, now: int | None, limit: int) -> Steps[int]:
    """Delete values that are free; returns their number, less than `limit` when none is left."""
    rows = yield Query(d.sql(_FORGETTABLE), {"now": now, "limit": limit})
    if rows:
        yield Many(d.sql(_FORGET), ("id", "message"), [tuple(row) for row in rows])
    return len(rows)
