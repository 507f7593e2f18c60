"""Every SQL text, once, in words that each dialect fills in.

Words: `{message}` and the other tables; `{now}`, the database's clock in microseconds unless a test gives
`:now`; `{ready}`, may be claimed; `{locked}`, lock these rows and step over those somebody else holds;
`{ids}`, is one of `:ids`. A dialect that needs another text for one of these says why beside it.

`lane` is the priority, or `SUSPECT_LANE` plus the priority for a message with two or more unfinished
deliveries, so that such a one is found, and claimed, alone. `token` stays on a row after nack and give-back,
so that the same settle, repeated because its reply was lost, recognises its own work; a reaper clears it.
"""

from __future__ import annotations

from millpond.outcome import SUSPECT
from millpond.transport import NEVER_US

SUSPECT_LANE = 1000

NOW = "SELECT {now}"

# --- publish --------------------------------------------------------------------------------------------

MESSAGE_COLUMNS = (
    "id",
    "queue",
    "key",
    "priority",
    "lane",
    "due_at",
    "expires_at",
    "state",
    "headers",
    "payload",
    "created_at",
)

INSERT = """
INSERT INTO {message} (id, queue, {key}, priority, lane, due_at, expires_at, state, headers, payload, created_at)
VALUES (:id, :queue, :key, :priority, :lane, :due_at, :expires_at, :state, :headers, :payload, :created_at)
"""

# One message alone: the statement asks the clock itself, and needs no transaction around it.
INSERT_ONE = """
INSERT INTO {message} (id, queue, {key}, priority, lane, due_at, expires_at, state, headers, payload, created_at)
VALUES (:id, :queue, :key, :priority, :priority, coalesce(:due, {now} + :delay), coalesce(:expires, {now} + :lifetime),
'PENDING', :headers, :payload, {now})
"""

FORGET_EXPIRED_IDS = "DELETE FROM {dedupe} WHERE id {ids} AND expires_at <= {now}"

# Whoever inserts the row owns the id; the others find a row that is not theirs. A conflict is no error, so
# that it cannot abort the caller's transaction.
REMEMBER_ID = "INSERT INTO {dedupe} (id, publisher, expires_at) VALUES (:id, :publisher, :expires_at) {or_skip}"

OWN_IDS = "SELECT id FROM {dedupe} WHERE id {ids} AND publisher = :publisher"

PRESENT_IDS = """
SELECT id FROM {message} {id_index} WHERE id {ids}
UNION ALL
SELECT id FROM {archive} {archive_id_index} WHERE id {ids} AND archived_at > {now} - :dedupe_for
"""

# --- claim ----------------------------------------------------------------------------------------------

# Which lanes of a queue to look at: of the lanes known, those with something due at or above their floor;
# of the gaps between them, the lowest lane that has anything. Each is one descent of the index, so that a
# wall of future or of more urgent messages costs nothing.
PROBE = """
SELECT CASE WHEN g.low = g.high
  THEN (SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready} AND m.lane = g.low
        AND m.due_at <= {now} {above_floor} ORDER BY m.due_at, m.id LIMIT 1)
  ELSE (SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready}
        AND m.lane >= g.low AND m.lane <= g.high ORDER BY m.lane LIMIT 1)
  END
FROM {gaps}
"""

CLAIMED_COLUMNS = """
m.id, m.queue, m.{key}, m.priority, m.headers, m.payload, m.deliveries, m.attempts, m.created_at, m.due_at,
m.first_attempt_at, m.expires_at
"""

# As they will be when they are stamped.
_TO_CLAIM = CLAIMED_COLUMNS.replace("m.deliveries", "m.deliveries + 1") + ", {now}, {now} + :lease"

# Lock, then stamp: two statements of one short transaction. (PostgreSQL does both in one.)
LOCK_LANE = f"""
SELECT {_TO_CLAIM} FROM {{message}} m {{claim_index}}
WHERE m.queue = :queue AND {{ready}} AND m.lane = :lane AND m.due_at <= {{now}} {{from_floor}}
AND NOT EXISTS (SELECT 1 FROM {{queue}} q WHERE q.name = :queue AND q.paused = 1)
ORDER BY m.due_at, m.id LIMIT :limit {{locked}}
"""

LOCK_IDS = f"""
SELECT {_TO_CLAIM} FROM {{message}} m {{id_index}}
WHERE m.id {{ids}} AND {{ready}} AND m.queue {{queues}} AND m.due_at <= {{now}}
AND NOT EXISTS (SELECT 1 FROM {{queue}} q WHERE q.name = m.queue AND q.paused = 1)
ORDER BY m.lane, m.due_at, m.id LIMIT :limit {{locked}}
"""

STAMP = """
UPDATE {message} SET state = 'PROCESSING', deliveries = deliveries + 1, token = :token, worker = :worker,
acquired_at = :at, lease_until = :until WHERE id {ids}
"""

# After a lost connection: a claim whose commit happened although its reply never came.
ADOPT = f"""
SELECT {CLAIMED_COLUMNS}, m.acquired_at, m.lease_until FROM {{message}} m
WHERE m.state = 'PROCESSING' AND m.token = :token ORDER BY m.lane, m.due_at, m.id
"""

# --- extend and settle: each write is fenced by (id, token) ---------------------------------------------

LOCK_CLAIMED = "SELECT id, token FROM {message} WHERE id {ids} AND state = 'PROCESSING' {locked}"
WAIT_CLAIMED = "SELECT id, token FROM {message} WHERE id {ids} AND state = 'PROCESSING' {lock}"

EXTEND = "UPDATE {message} SET lease_until = {now} + :lease WHERE id {ids}"

ARCHIVED_COLUMNS = """
id, queue, {key}, priority, due_at, expires_at, headers, payload, deliveries, attempts, created_at,
first_attempt_at, last_attempt_at, acquired_at, token, state, reason, error, archived_at
"""

# The payload moves inside the server. `:attempts` is 1, or 0 where no handler ever ran.
_KEEP = f"""
INSERT INTO {{archive}} ({ARCHIVED_COLUMNS})
SELECT id, queue, {{key}}, priority, due_at, expires_at, headers, payload, deliveries, attempts + :attempts,
created_at, CASE WHEN :attempts = 1 THEN coalesce(first_attempt_at, acquired_at) ELSE first_attempt_at END,
CASE WHEN :attempts = 1 THEN {{now}} ELSE last_attempt_at END,
acquired_at, token, :state, :reason, coalesce(:error, last_error), {{now}}
FROM {{message}}
"""
KEEP = _KEEP + "WHERE id {ids}"
KEEP_EACH = _KEEP + "WHERE id = :id"
"""With a reason and an error for each."""

REMOVE = "DELETE FROM {message} WHERE id {ids}"

# Where one transaction writes at a time, the check needs no lock before it: it holds until the end.
_HELD = "AND token = :token AND state = 'PROCESSING'"
KEEP_HELD = f"{KEEP} {_HELD}"
REMOVE_HELD = f"{REMOVE} {_HELD}"
CHANGES = "SELECT changes()"

# An interrupted delivery counts and came to no result: after two of them a message is suspect. Other outcomes
# leave a message what it was. (In an order-free form: these counters are not changed when the lane is.)
LANE_GIVEN_BACK = f"""
CASE WHEN :attempts = 0 AND :deliveries = 0 AND deliveries - attempts >= {SUSPECT}
THEN {SUSPECT_LANE} + priority ELSE lane END
"""

# Back to waiting, each with its own delay (null: due as before) and error.
REQUEUE = f"""
UPDATE {{message}} SET state = :state, attempts = attempts + :attempts, deliveries = deliveries + :deliveries,
due_at = CASE WHEN :delay IS NULL THEN due_at ELSE {{now}} + :delay END,
first_attempt_at = CASE WHEN :attempts = 1 THEN coalesce(first_attempt_at, acquired_at) ELSE first_attempt_at END,
last_attempt_at = CASE WHEN :attempts = 1 THEN {{now}} ELSE last_attempt_at END,
last_error = coalesce(:error, last_error), worker = NULL, lease_until = NULL,
lane = {LANE_GIVEN_BACK}
WHERE id = :id
"""

# What became of receipts that a settle did not find: still ours (so somebody holds the row), already done
# by an earlier try of the same settle, or lost.
LOOK_LIVE = "SELECT id, token, state FROM {message} {id_index} WHERE id {ids}"
LOOK_ARCHIVED = "SELECT id, token, state FROM {archive} {archive_id_index} WHERE id {ids}"

# --- record what another transport has settled ---------------------------------------------------------

# Any row will do that is always there and that nobody else locks.
RECORD_TURN = "SELECT version FROM {migration} WHERE version = 2 {lock}"
# What this database has delivered itself has a token: a bridge's own trace is not what became of the message there.
RECORDED = """
SELECT id, archived_at, CASE WHEN token IS NULL THEN state END FROM {archive} {archive_id_index}
WHERE id {ids} AND archived_at > {now} - :dedupe_for
"""
RECORD_COLUMNS = (
    *("id", "queue", "key", "priority", "due_at", "expires_at", "headers", "payload", "deliveries", "attempts"),
    *("created_at", "first_attempt_at", "last_attempt_at", "acquired_at", "state", "reason", "error", "archived_at"),
)
RECORD = """
INSERT INTO {archive} (id, queue, {key}, priority, due_at, expires_at, headers, payload, deliveries, attempts,
created_at, first_attempt_at, last_attempt_at, acquired_at, state, reason, error, archived_at)
VALUES (:id, :queue, :key, :priority, :due_at, :expires_at, :headers, :payload, :deliveries, :attempts,
:created_at, :first_attempt_at, :last_attempt_at, :acquired_at, :state, :reason, :error, :archived_at)
"""

# --- reap -----------------------------------------------------------------------------------------------

# Read first, then locked by id: nobody else's rows are touched on the way, nothing is written when there is
# nothing to do, and InnoDB's locking reads would step over every dead entry, also past the end of the range.
LAPSED = """
SELECT id FROM {message} {lease_index} WHERE state = 'PROCESSING' AND lease_until >= :floor AND lease_until <= {now}
ORDER BY lease_until LIMIT :limit
"""
LOCK_LAPSED = "SELECT id FROM {message} WHERE id {ids} AND state = 'PROCESSING' AND lease_until <= {now} {locked}"

# What one worker holds; the bounds confine it to what workers have claimed, beside what streams hold.
HELD_BY = f"""
SELECT id FROM {{message}} {{lease_index}}
WHERE state = 'PROCESSING' AND lease_until >= 0 AND lease_until < {NEVER_US} AND worker = :worker
LIMIT :limit
"""
LOCK_HELD_BY = "SELECT id FROM {message} WHERE id {ids} AND state = 'PROCESSING' AND worker = :worker {locked}"

RELEASE = f"""
UPDATE {{message}} SET state = 'PENDING', token = NULL, worker = NULL, lease_until = NULL,
lane = CASE WHEN deliveries - attempts >= :suspect THEN {SUSPECT_LANE} + priority ELSE priority END
WHERE id {{ids}}
"""

# --- the operator's verbs -------------------------------------------------------------------------------

# From queue to queue by the index, not through millions of rows.
FIRST_ARCHIVED_QUEUE = "SELECT min(a.queue) FROM {archive} a {archive_index}"
ARCHIVED_QUEUES = """
WITH RECURSIVE step (name) AS (
SELECT min(a.queue) FROM {archive} a {archive_index} WHERE a.queue > :after
UNION ALL
SELECT (SELECT min(a.queue) FROM {archive} a {archive_index} WHERE a.queue > step.name) FROM step
WHERE step.name IS NOT NULL)
SELECT name FROM step WHERE name IS NOT NULL
"""

SETTINGS = "SELECT name, paused, keep_completed, keep_failed FROM {queue}"
PAUSE = "INSERT INTO {queue} (name, paused) VALUES (:queue, :paused) {or_update} paused = :paused"
RETAIN = """
INSERT INTO {queue} (name, keep_completed, keep_failed) VALUES (:queue, :completed, :failed)
{or_update} keep_completed = :completed, keep_failed = :failed
"""

# Waiting messages only: whoever has a message in hand decides about it.
LOCK_WAITING = "SELECT m.id, m.queue FROM {message} m {id_index} WHERE m.id {ids} AND {ready} {locked}"
FORGET_RECEIPTS = "UPDATE {message} SET token = NULL WHERE id {ids}"
CANCELLED = "SELECT id FROM {archive} {archive_id_index} WHERE id {ids} AND state = 'FAILED' AND reason = :reason"

# One purge deletes at a time, so that two neither count the same rows nor wait for each other's.
PURGE_TURN = "SELECT version FROM {migration} WHERE version = 1 {lock}"
PURGEABLE = """
SELECT a.archived_at, a.id FROM {archive} a {archive_index}
WHERE a.queue = :queue AND a.state = :state AND a.archived_at <= :until ORDER BY a.archived_at, a.id LIMIT :limit
"""
PURGE = """
{delete_a} {archive} AS a {archive_index}
WHERE a.queue = :queue AND a.state = :state AND a.archived_at <= :at AND (a.archived_at < :at OR a.id <= :id)
"""
EXPIRED_IDS = "SELECT id FROM {dedupe} WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit"

REPLAYABLE = "SELECT id, archived_at, queue, headers FROM {archive} {archive_id_index} WHERE id {ids}"
# The payload moves inside the server. An expiry is of the first life.
REPLAY = """
INSERT INTO {message} (id, queue, {key}, priority, lane, due_at, state, headers, payload, created_at)
SELECT :new_id, :queue, a.{key}, a.priority, a.priority, {now}, 'PENDING', :headers, a.payload, {now}
FROM {archive} a WHERE a.id = :id AND a.archived_at = :archived_at
"""

# --- wait -----------------------------------------------------------------------------------------------

# How long until the next message of a lane falls due; those that are due already are the claim's business.
# Not min(): planned while the table is empty, it would read every row of the lane for ever after.
NEXT_DUE = """
SELECT m.due_at - {now} FROM {message} m {claim_index}
WHERE m.queue = :queue AND {ready} AND m.lane = :lane AND m.due_at > {now} ORDER BY m.due_at, m.id LIMIT 1
"""
