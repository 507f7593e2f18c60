"""PostgreSQL's own statements: each does a whole claim, settle or publish."""

from __future__ import annotations

from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Fused

_PAIRS = "unnest(:ids::uuid[], :tokens::bigint[]) AS r(id, token)"
_ROWS = "unnest(:ids::uuid[], :tokens::bigint[], :delays::bigint[], :errors::text[]) AS r(id, token, delay, error)"
_REASONS = "unnest(:ids::uuid[], :tokens::bigint[], :reasons::text[], :errors::text[]) AS r(id, token, reason, error)"


def _written(rows: str) -> str:
    """How many rows were written, and which, if they are not all: as an aggregate beside the count it would be made
    for nothing in each settle."""
    return (
        f"SELECT count(*), CASE WHEN count(*) < cardinality(:ids::uuid[]) "
        f"THEN (SELECT array_agg(w.id || ' ' || w.token) FROM {rows} w) END FROM {rows}"
    )


def _held(lock: str, rows: str = _PAIRS, more: str = "") -> str:
    """The rows that receipts still own, locked.

    LATERAL: as a plain join, a plan made while the table was empty reads the whole table for each receipt.
    A claimed row is told by its lease: told by its state, the planner may take the index of leases for it.
    By ctid, so that the write need not search again; a row that changed since the statement began is not
    found by its ctid, is left out, and the settle looks again.
    """
    return (
        f"WITH held AS MATERIALIZED (SELECT l.ctid, r.id {more} FROM {rows}, LATERAL "
        "(SELECT x.ctid FROM {message} x WHERE x.id = r.id AND x.token = coalesce(r.token, :token::bigint) "
        "AND x.lease_until IS NOT NULL "
        f"FOR UPDATE {lock}) l)"
    )


def _move(lock: str, keep: bool) -> str:
    gone = "gone AS (DELETE FROM {message} m WHERE m.ctid = ANY(ARRAY(SELECT ctid FROM held)) RETURNING m.*)"
    kept = f", {_kept(':reason::text', ':error::text')}" if keep else ""
    return f"{_held(lock)}, {gone}{kept} {_written('gone')}"


def _move_each(lock: str) -> str:
    """With a reason and an error for each."""
    held = _held(lock, _REASONS, ", r.reason, r.error")
    gone = (
        "gone AS (DELETE FROM {message} m USING held h WHERE m.ctid = h.ctid "
        "RETURNING m.*, h.reason AS reason, h.error AS error)"
    )
    return f"{held}, {gone}, {_kept('reason', 'error')} {_written('gone')}"


def _kept(reason: str, error: str) -> str:
    return f"""
    kept AS (INSERT INTO {{archive}} ({sql.ARCHIVED_COLUMNS})
    SELECT id, queue, key, priority, due_at, expires_at, headers, payload, deliveries,
    attempts + :attempts::int, created_at,
    CASE WHEN :attempts::int = 1 THEN coalesce(first_attempt_at, acquired_at) ELSE first_attempt_at END,
    CASE WHEN :attempts::int = 1 THEN {{now}} ELSE last_attempt_at END,
    acquired_at, token, :state::text, {reason}, coalesce({error}, last_error), {{now}} FROM gone)"""


def _requeue(lock: str) -> str:
    return f"""{_held(lock, _ROWS, ", r.delay, r.error")},
    back AS (UPDATE {{message}} m SET state = :state::text, attempts = m.attempts + :attempts::int,
    deliveries = m.deliveries + :deliveries::int,
    due_at = CASE WHEN h.delay IS NULL THEN m.due_at ELSE {{now}} + h.delay END,
    first_attempt_at = CASE WHEN :attempts::int = 1 THEN coalesce(m.first_attempt_at, m.acquired_at)
                       ELSE m.first_attempt_at END,
    last_attempt_at = CASE WHEN :attempts::int = 1 THEN {{now}} ELSE m.last_attempt_at END,
    last_error = coalesce(h.error, m.last_error), worker = NULL, lease_until = NULL, lane = {sql.LANE_GIVEN_BACK}
    FROM held h WHERE m.ctid = h.ctid RETURNING m.id, m.token) {_written("back")}"""


_STAMP = f"""
UPDATE {{message}} m SET state = 'PROCESSING', deliveries = m.deliveries + 1, token = :token::bigint,
worker = :worker::bigint, acquired_at = {{now}}, lease_until = {{now}} + :lease::bigint
WHERE m.id = ANY(ARRAY(%s))
RETURNING {sql.CLAIMED_COLUMNS}, m.acquired_at, m.lease_until
"""

_IN_LANE = """
SELECT m.id FROM {{message}} m WHERE m.queue = :queue::text AND {{ready}} AND m.lane = :lane::smallint
AND m.due_at <= {{now}} {{from_floor}} {also}
AND NOT EXISTS (SELECT 1 FROM {{queue}} q WHERE q.name = :queue::text AND q.paused = 1)
ORDER BY m.due_at, m.id LIMIT :limit::bigint {{locked}}
"""


def _lane_beside(side: str) -> str:
    """Whether another lane of the queue has anything: one descent of the index."""
    return (
        "EXISTS (SELECT 1 FROM {message} o WHERE o.queue = :queue::text AND o.state <> 'PROCESSING' "
        f"AND o.lane {side} :lane::smallint)"
    )


_INSERT = """
    INSERT INTO {message}
    (id, queue, key, priority, lane, due_at, expires_at, state, headers, payload, created_at)
    SELECT r.id, r.queue, r.key, r.priority, r.priority, coalesce(r.due, {now} + r.delay),
    coalesce(r.expires, {now} + r.lifetime), 'PENDING', r.headers, r.payload, {now}
    FROM unnest(:ids::uuid[], :queues::text[], :keys::text[], :priorities::smallint[], :delays::bigint[],
    :dues::bigint[], :lifetimes::bigint[], :expires::bigint[], :headers::text[], :payloads::bytea[])
    AS r(id, queue, key, priority, delay, due, lifetime, expires, headers, payload)
    """

FUSED = Fused(
    insert=_INSERT,
    # The server sends one notice for each queue of a transaction, when that commits. What is due later needs
    # none: whoever waits knows when.
    insert_and_announce=f"""WITH new AS ({_INSERT} RETURNING queue, due_at)
    SELECT pg_notify(:channel::text, n.queue) FROM (SELECT DISTINCT queue FROM new WHERE due_at <= {{now}}) n""",
    announce="SELECT pg_notify(:channel::text, n.queue) FROM unnest(:queues::text[]) AS n(queue)",
    claim_lane=_STAMP % _IN_LANE.format(also=""),
    claim_only=_STAMP % _IN_LANE.format(also=f"AND NOT {_lane_beside('<')} AND NOT {_lane_beside('>')}"),
    # The state is asked for so that the index of claims does not serve it: planned while the table was empty, that
    # one may be taken, and the whole queue be read.
    claim_ids=_STAMP
    % """SELECT m.id FROM {message} m WHERE m.id {ids} AND m.state || '' <> 'PROCESSING' AND m.queue {queues}
    AND m.due_at <= {now}
    AND NOT EXISTS (SELECT 1 FROM {queue} q WHERE q.name = m.queue AND q.paused = 1)
    ORDER BY m.lane, m.due_at, m.id LIMIT :limit::bigint {locked}""",
    extend=f"""{_held("SKIP LOCKED")},
    longer AS (UPDATE {{message}} m SET lease_until = {{now}} + :lease::bigint
    FROM held h WHERE m.ctid = h.ctid RETURNING m.id, m.token) {_written("longer")}""",
    moves={
        (keep, wait): _move("" if wait else "SKIP LOCKED", keep) for keep in (True, False) for wait in (True, False)
    },
    move_each={wait: _move_each("" if wait else "SKIP LOCKED") for wait in (True, False)},
    requeues={wait: _requeue("" if wait else "SKIP LOCKED") for wait in (True, False)},
)
