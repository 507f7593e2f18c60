"""The columns of a message, listed once: select lists, values to store, and rows as claims and as rows for operators.

A column that is stored and returned unchanged is one of `PLAIN`. Every statement takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import SECOND
from millpond.failed_attempts import fingerprint
from millpond.message import (
    UNDECODABLE,
    Claim,
    Draft,
    Message,
    Receipt,
    State,
    decode_headers,
    decode_untrusted_headers,
    short_error,
)
from millpond.outcome import LONGEST_CRASH_DELAY, describe
from millpond.seam.operations import Row
from millpond.transports.database.sql.statement import Rows

SUSPECT_LANE = 1000
"""The generated column `lane` is the priority, plus this number for a suspect: a claim finds suspects apart, and takes
one alone."""

PLAIN = {"queue": "text", "key": "text", "priority": "smallint", "headers": "text", "payload": "bytea"}
"""Columns that the publisher gives and that never change, with their PostgreSQL types."""

INSERTED = ("id", *PLAIN, "due_at", "expires_at", "state", "created_at")
CLAIMED = ("id", *PLAIN, "deliveries", "attempts", "crashes", "created_at", "due_at", "first_attempt_at", "expires_at")
"""A claim reads these, then `acquired_at` and the end of the lease."""
_LIVED = (
    *("id", *PLAIN, "due_at", "expires_at", "deliveries", "attempts", "created_at"),
    *("first_attempt_at", "last_attempt_at", "acquired_at"),
)
ARCHIVED = (*_LIVED, "token", "state", "reason", "error", "history", "failure", "archived_at")
RECORDED = (*_LIVED, "state", "reason", "error", "failure", "archived_at")
"""Archived for another transport: without a token, as no claim of this database settled them."""
WAITING = (
    *(*INSERTED, "deliveries", "attempts", "crashes"),
    *("first_attempt_at", "last_attempt_at", "acquired_at", "last_error", "history"),
)
"""A message that waits, without the traces of its last claim: a move between shards takes these along."""
STAGED = ("lot", "id", "due_at", "priority", "queue", "key", "headers", "payload")


def names(columns: Iterable[str], m: str = "") -> str:
    """A list for SQL, of columns of the table `m` ("m." with its dot)."""
    return ", ".join(f"{m}{{key}}" if column == "key" else f"{m}{column}" for column in columns)


# --- publish --------------------------------------------------------------------------------------------


def new_message(source: str, has: Collection[str] = ("id", *PLAIN), **values: str) -> tuple[str, str]:
    """The columns of a new message, and their values for SQL: `values`, or else columns of the row `source`.

    `source` is ":" for parameters, and `has` its columns. A column of neither is left out, such as `expires_at`.
    """
    values = {"state": "'PENDING'", **values}
    columns = [column for column in INSERTED if column in values or column in has]
    own = {column: f":{column}" if source == ":" else names([column], source) for column in columns}
    return names(columns), ", ".join({**own, **values}[column] for column in columns)


def new_records(drafts: Iterable[Draft], at: int, id_in: Callable[[UUID], Any]) -> list[tuple[Any, ...]]:
    """Rows of `INSERTED`. Written out, because it runs for every message of a bulk publish."""
    state = State.PENDING.value
    return [
        (
            id_in(draft.id),
            draft.queue,
            draft.key,
            draft.priority,
            draft.headers,
            draft.payload,
            at + draft.delay_us if draft.due_us is None else draft.due_us,
            draft.expires_us if draft.expires_after_us is None else at + draft.expires_after_us,
            state,
            at,
        )
        for draft in drafts
    ]


TIMES = {"delay": "delay_us", "due": "due_us", "lifetime": "expires_after_us", "expires": "expires_us"}
GIVEN = {**{name: name for name in PLAIN}, **TIMES}
"""Parameter -> attribute of a draft. The database computes `due_at` and `expires_at` from `TIMES`, by its own clock."""


def times(source: str) -> dict[str, str]:
    """The columns of a new message that depend on the database's time."""
    return {
        "due_at": f"coalesce({source}due, {{now}} + {source}delay)",
        "expires_at": f"coalesce({source}expires, {{now}} + {source}lifetime)",
        "created_at": "{now}",
    }


# --- claim ----------------------------------------------------------------------------------------------

ID, PRIORITY, CRASHES, DUE = map(CLAIMED.index, ("id", "priority", "crashes", "due_at"))
_NO_HEADERS: Mapping[str, Any] = decode_headers(None)


def claims(rows: Rows, token: int, id_out: Callable[[Any], UUID]) -> list[Claim]:
    """Claims from rows of `CLAIMED`, `acquired_at` and the end of the lease."""
    found = []
    for (
        key_,
        queue,
        key,
        priority,
        headers,
        payload,
        deliveries,
        attempts,
        crashes,
        created,
        due,
        first,
        expires,
        acquired,
        until,
    ) in rows:
        id_ = id_out(key_)
        unreadable = None
        decoded = _NO_HEADERS
        if headers:
            try:
                decoded = decode_untrusted_headers(headers)
            except Exception as e:  # this message alone must not run
                unreadable = describe(e)
        message = Message(
            queue=queue,
            payload=payload if type(payload) is bytes else as_body(payload),
            id=id_,
            key=key,
            priority=priority,
            headers=decoded,
        )
        receipt = Receipt(id_, token)
        times_ = (created, due, acquired, until, first, expires)
        found.append(Claim(message, receipt, deliveries, attempts, *times_, unreadable, crashes))
    return found


def as_body(payload: Any) -> bytes:
    """A body that another program wrote into SQLite as text or number, or that a driver returned as bytearray."""
    return bytes(payload) if isinstance(payload, bytes | bytearray | memoryview) else str(payload).encode()


def as_text(value: str | bytes | None) -> str | None:
    """A text that is read as bytes, with backslashes for those that are no UTF-8: another program wrote them."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


# --- settle ---------------------------------------------------------------------------------------------


def _attempt_times(m: str, ran: str) -> tuple[str, str]:
    """`first_attempt_at` and `last_attempt_at` after `ran` attempts: 1, or 0 where no handler ran."""
    first = f"coalesce({m}first_attempt_at, {m}acquired_at)"
    if ran == "1":
        return first, "{now}"
    return (
        f"CASE WHEN {ran} = 1 THEN {first} ELSE {m}first_attempt_at END",
        f"CASE WHEN {ran} = 1 THEN {{now}} ELSE {m}last_attempt_at END",
    )


def _with_attempt(m: str, attempt: str) -> str:
    """The history with one attempt more: its last part, because it is bounded. Without an attempt, all is null."""
    line = f"{m}acquired_at {{text_and}} ' ' {{text_and}} {{now}} {{text_and}} ' ' {{text_and}} {attempt}"
    longer = f"{{text_of}}(coalesce({m}history, '') {{text_and}} {line} {{text_and}} {{line_end}})"
    return f"coalesce({{text_tail}}({longer}, {{tail_length}}), {m}history)"


def as_archived(
    m: str = "",
    *,
    ran: str = ":attempts",
    state: str = ":state",
    reason: str = ":reason",
    error: str = ":error",
    attempt: str = ":attempt",
    failure: str = ":failure",
    **own: str,
) -> str:
    """The select list that makes an archive row of the message row `m`, in the order of `ARCHIVED`.

    `own`: values of other columns, instead of those of the message.
    """
    first, last = _attempt_times(m, ran)
    values = {
        "attempts": f"{m}attempts + {ran}",
        "first_attempt_at": first,
        "last_attempt_at": last,
        "state": state,
        "reason": reason,
        "error": f"coalesce({error}, {m}last_error)" if error else f"{m}last_error",
        "history": _with_attempt(m, attempt) if attempt else f"{m}history",
        "failure": failure,
        "archived_at": "{now}",
        **own,
    }
    return ", ".join(values.get(column) or names([column], m) for column in ARCHIVED)


def back_to_waiting(m: str = "", *, delay: str = ":delay", error: str = ":error", attempt: str = ":attempt") -> str:
    """The assignments that give the claimed row `m` back, due after `delay` (null: due as before)."""
    first, last = _attempt_times(m, ":attempts")
    return f"""
    crashes = CASE WHEN :attempts = 0 THEN {m}crashes + :crashes ELSE 0 END,
    state = :state, attempts = {m}attempts + :attempts, deliveries = {m}deliveries + :deliveries,
    due_at = CASE WHEN {delay} IS NULL THEN {_was_due(m)} ELSE {{now}} + {delay} END,
    first_attempt_at = {first}, last_attempt_at = {last}, last_error = coalesce({error}, {m}last_error),
    history = {_with_attempt(m, attempt)},
    worker = NULL, lease = NULL, lease_until = NULL"""


def _was_due(m: str = "") -> str:
    """The due time of a claimed message. It lies in the past unless the clock was set back: then it is due now."""
    return f"CASE WHEN {m}due_at > {{now}} THEN {{now}} ELSE {m}due_at END"


# One delivery without a result may be this one, which was perhaps not started. With two the message counts as
# started: otherwise poison that is always claimed ahead would never count.
_CRASHED = """CASE WHEN (ahead = 0 OR deliveries - attempts > 1)
AND EXISTS (SELECT 1 FROM {worker} w WHERE w.id = worker AND w.stopping = 0) THEN 1 ELSE 0 END"""
BACK_FROM_REAPER = f"""
due_at = CASE WHEN worker IS NULL AND deliveries - attempts BETWEEN 2 AND 7
THEN {{now}} + (1000000 << (deliveries - attempts - 2))
WHEN worker IS NULL AND deliveries - attempts > 7 THEN {{now}} + {LONGEST_CRASH_DELAY * SECOND}
WHEN crashes = 0 OR {_CRASHED} = 0 THEN {_was_due()}
WHEN crashes < 7 THEN {{now}} + (1000000 << (crashes - 1)) ELSE {{now}} + {LONGEST_CRASH_DELAY * SECOND} END,
crashes = crashes + {_CRASHED}, state = 'PENDING', token = NULL, worker = NULL, lease = NULL, lease_until = NULL
"""
"""The assignments that take a claimed row from its holder. It crashed if it was held by a worker that did not stop.

The delay is that of `crash_delay`, by the crashes. If no worker held it, it is that of the deliveries without a result:
none after the first lapse, then more after each. MySQL assigns from left to right, so `worker` and `crashes` come last.
"""


# --- rows for operators ---------------------------------------------------------------------------------

_SHOWN = (*_LIVED, "state")
LEASE_END = """
coalesce(m.lease_until, m.lease + (SELECT w.beat_at FROM {worker} w WHERE w.id = m.worker)) AS lease_until
"""
"""The end of a live row's lease: its own, or a lease after the last beat of the worker that holds it."""
HISTORY = ", {}.history"
"""Added to the select list of a message that is read alone."""
LIVE = f"{names(_SHOWN, 'm.')}, {LEASE_END}, NULL AS archived_at, m.crashes, NULL AS reason, m.last_error AS error"
SETTLED_ROW = f"{names(_SHOWN, 'a.')}, NULL AS lease_until, a.archived_at, 0 AS crashes, a.reason, a.error"
"""The same columns of a live row `m` and of an archived row `a`."""


def _field(column: str) -> str:
    return f"{column[:-3]}_us" if column.endswith("_at") else column


_FIELDS = (*map(_field, _SHOWN), "lease_us", "archived_us", "crashes", "reason", "error")
_RECORDED_FIELDS = tuple(map(_field, RECORDED))


def as_rows(rows: Rows, id_out: Callable[[Any], UUID]) -> list[Row]:
    """Rows of `LIVE` or `SETTLED_ROW`, as operators see them."""
    found = []
    for values in rows:
        fields = dict(zip(_FIELDS, values, strict=False))
        if len(values) > len(_FIELDS):  # a message that is read alone
            fields["history"] = values[-1]
        fields["id"] = id_out(fields["id"])
        fields["state"] = State(fields["state"])
        fields["headers"] = _headers(fields["headers"])
        if type(fields["payload"]) is not bytes:
            fields["payload"] = as_body(fields["payload"])
        found.append(Row(**fields))
    return found


def _headers(text: str | bytes | None) -> Mapping[str, Any]:
    """Headers that are no JSON object, written by another program, are shown as they are: one row must not hide the
    page."""
    try:
        return decode_untrusted_headers(text) if text else _NO_HEADERS
    except Exception:
        return {UNDECODABLE: text.decode(errors="replace") if isinstance(text, bytes) else text}


def recorded_values(row: Row, id_: Any, at: int) -> Sequence[Any]:
    """The values of `RECORDED`: a message that another transport has settled, archived at the time `at`."""
    values = {
        "id": id_,
        "state": row.state.value,
        # AMQP headers of other programs may hold any type. Types unknown to JSON are written as text.
        "headers": msgspec.json.encode(row.headers, enc_hook=str).decode() if row.headers else None,
        "reason": short_error(row.reason),
        "error": short_error(row.error),
        "failure": fingerprint(row.reason, row.error) if row.state is State.FAILED else None,
        "archived_us": at,
    }
    return [values[field] if field in values else getattr(row, field) for field in _RECORDED_FIELDS]
