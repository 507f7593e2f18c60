"""Every SQL text of streams, in the words of `statements`.

All of them are of one claim, told by the stream's small number and `:seq`. A claim's ids stand in a table of their
own, so that a batch is moved inside the server by one statement however large it is: neither payloads nor ids
travel. `{in_select} … {end_select}`: is one of those selected, in a form that begins with the ids, not with the
messages; `{inner}`: a join that does.
"""

from __future__ import annotations

from millpond.transport import NEVER_US
from millpond.transports.database.statements import ARCHIVED_COLUMNS

# --- the stream -----------------------------------------------------------------------------------------

CREATE = "INSERT INTO {stream} (name, epoch, acked_seq) VALUES (:name, 0, 0) {or_skip}"
# Each transaction of a driver begins with this lock: it waits for the one before it, and then sees its epoch.
LOCK = "SELECT id, epoch, acked_seq FROM {stream} WHERE name = :name {lock}"
LOOK = "SELECT id, epoch, acked_seq FROM {stream} WHERE name = :name"
OPEN = "UPDATE {stream} SET epoch = :epoch, opened_at = {now} WHERE id = :stream"
RELEASED = "UPDATE {stream} SET epoch = epoch + 1 WHERE id = :stream"
ACKED = "UPDATE {stream} SET acked_seq = :seq WHERE id = :stream"

STATUS = """
SELECT s.name, s.epoch, s.acked_seq, s.opened_at, c.seq, c.messages, c.claimed_at, {now}
FROM {stream} s LEFT JOIN {stream_claim} c ON c.stream = s.id ORDER BY s.name, c.seq
"""

# --- claim ----------------------------------------------------------------------------------------------

# Take note of the ids, then stamp the messages: two statements of one transaction. (PostgreSQL does both in one.)
DUE = """
m.queue = :queue AND {ready} AND m.lane = :lane AND m.due_at <= {now} AND m.due_at <= :until AND m.created_at <= :until
{from_floor} AND NOT EXISTS (SELECT 1 FROM {queue} q WHERE q.name = :queue AND q.paused = 1)
"""
DUE_TYPED = (
    DUE.replace(":queue", ":queue::text").replace(":lane", ":lane::smallint").replace(":until", ":until::bigint")
)
TAKE = f"""
INSERT INTO {{stream_message}} (stream, seq, id) SELECT :stream, :seq, m.id FROM {{message}} m {{claim_index}}
WHERE {DUE} ORDER BY m.due_at, m.id LIMIT :limit {{locked}}
"""
# Without a token: no receipt of an earlier claim settles what a stream holds.
STAMPED = f"""
state = 'PROCESSING', deliveries = deliveries + 1, token = NULL, worker = NULL, acquired_at = {{now}},
lease_until = {NEVER_US}
"""
STAMP = f"""
UPDATE {{message}} {{id_index}} SET {STAMPED} WHERE id {{in_select}} SELECT s.id FROM {{stream_message}} s
WHERE s.stream = :stream AND s.seq = :seq {{end_select}} AND state <> 'PROCESSING'
"""

OF_CLAIM = "{stream_message} s {inner} {message} m ON m.id = s.id WHERE s.stream = :stream AND s.seq = :seq"
# What must not run: expired, or claimed so often without a result. The last delivery is this one.
MUST_NOT_RUN = "(m.expires_at <= {now} OR m.deliveries - 1 - m.attempts >= :max_crashes)"
TAKEN = f"""
SELECT count(*), max(CASE WHEN m.queue = :queue AND m.lane = :lane THEN m.due_at END),
count(CASE WHEN {MUST_NOT_RUN} THEN 1 END) FROM {OF_CLAIM}
"""
REFUSED = f"""
SELECT m.id, CASE WHEN m.expires_at <= {{now}} THEN NULL ELSE m.deliveries - 1 - m.attempts END
FROM {OF_CLAIM} AND {MUST_NOT_RUN}
"""
FORGET = "DELETE FROM {stream_message} WHERE stream = :stream AND seq = :seq AND id {ids}"

# Note, stamp and tell in one statement: what MUST_NOT_RUN is told by its ids. By ctid, so that the write need not
# search again; a row that changed since the statement began is not found by it, and waits for the next claim.
FUSED_TAKE = f"""
WITH taken AS (UPDATE {{message}} m SET {STAMPED} WHERE m.ctid = ANY(ARRAY(SELECT m.ctid FROM {{message}} m
WHERE {DUE_TYPED} ORDER BY m.due_at, m.id LIMIT :limit::bigint {{locked}}))
RETURNING m.id, m.due_at, {MUST_NOT_RUN} AS refused,
CASE WHEN m.expires_at <= {{now}} THEN NULL ELSE m.deliveries - 1 - m.attempts END AS crashes),
noted AS (INSERT INTO {{stream_message}} (stream, seq, id) SELECT :stream::int, :seq::bigint, id FROM taken)
SELECT count(*), max(due_at), array_agg(id) FILTER (WHERE refused), array_agg(crashes) FILTER (WHERE refused) FROM taken
"""

# Where the next slice begins, so many ids after the first of this one; the first of all has no such bound.
FIRST = """
SELECT s.id FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq ORDER BY s.id LIMIT 1
"""
NEXT = """
SELECT s.id FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq AND s.id >= :first
ORDER BY s.id LIMIT 1 OFFSET :size
"""
RECORD = """
INSERT INTO {stream_claim} (stream, seq, claimed_at, messages, slices)
VALUES (:stream, :seq, :claimed_at, :messages, :slices)
"""
RECORDS = "SELECT seq, messages, slices, claimed_at FROM {stream_claim} WHERE stream = :stream ORDER BY seq"

# The rows of a slice: those of one task, the same at each replay.
_IN_SLICE = "WHERE s.stream = :stream AND s.seq = :seq AND s.id >= :first"
SLICE = f"FROM {{message}} WHERE id {{in_select}} SELECT s.id FROM {{stream_message}} s {_IN_SLICE} {{end_select}}"
SLICE_UP_TO = SLICE.replace(":first", ":first AND s.id < :stop")

# --- outcomes -------------------------------------------------------------------------------------------

OPEN_CLAIM = """
SELECT s.id, c.seq FROM {stream} s LEFT JOIN {stream_claim} c ON c.stream = s.id WHERE s.name = :name
ORDER BY c.seq DESC LIMIT 1
"""
HAS = "SELECT id FROM {stream_message} WHERE stream = :stream AND seq = :seq AND id {ids}"
NOTE = """
UPDATE {stream_message} SET outcome = :outcome, delay = :delay, reason = :reason
WHERE stream = :stream AND seq = :seq AND id = :id
"""

# LATERAL, ctid: as in a settle.
FUSED_NOTE = """
WITH noted AS MATERIALIZED (SELECT l.ctid, r.outcome, r.delay, r.reason
FROM unnest(:ids::uuid[], :outcomes::text[], :delays::bigint[], :reasons::text[]) AS r(id, outcome, delay, reason),
LATERAL (SELECT x.ctid FROM {stream_message} x WHERE x.stream = :stream AND x.seq = :seq AND x.id = r.id FOR UPDATE) l)
UPDATE {stream_message} s SET outcome = n.outcome, delay = n.delay, reason = n.reason
FROM noted n WHERE s.ctid = n.ctid
"""

# --- ack ------------------------------------------------------------------------------------------------

# Not GROUP BY: that would sort them.
OUTCOMES = """
SELECT count(CASE WHEN s.outcome = 'ack' THEN 1 END), count(CASE WHEN s.outcome = 'nack' THEN 1 END),
count(CASE WHEN s.outcome = 'reject' THEN 1 END), count(CASE WHEN s.outcome IS NULL THEN 1 END)
FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq
"""
# What a batch moves passes through memory, not through a temporary file.
FUSED_MEMORY = "SELECT set_config('work_mem', '64MB', true)"
SETTLED_AS = "coalesce(s.outcome, :unsettled) = :outcome"
REASON = "coalesce(s.reason, CASE WHEN s.outcome IS NULL THEN :reason ELSE 'rejected' END)"
# Into the archive, payloads inside the server; each with the reason that was recorded for it.
KEEP = f"""
INSERT INTO {{archive}} ({ARCHIVED_COLUMNS})
SELECT m.id, m.queue, m.{{key}}, m.priority, m.due_at, m.expires_at, m.headers, m.payload, m.deliveries,
m.attempts + 1, m.created_at, coalesce(m.first_attempt_at, m.acquired_at), {{now}}, m.acquired_at, m.token,
:state, CASE WHEN :state = 'FAILED' THEN {REASON} END, m.last_error, {{now}}
FROM {OF_CLAIM} AND {SETTLED_AS}
"""
CHOSEN = f"""
{{in_select}} SELECT s.id FROM {{stream_message}} s WHERE s.stream = :stream AND s.seq = :seq AND {SETTLED_AS}
{{end_select}}
"""
# Deleted, and what was deleted inserted there: one pass over the messages.
_FUSED_MOVE = f"""
WITH gone AS (DELETE FROM {{message}} WHERE id {CHOSEN} RETURNING *)
INSERT INTO {{archive}} ({ARCHIVED_COLUMNS})
SELECT g.id, g.queue, g.key, g.priority, g.due_at, g.expires_at, g.headers, g.payload, g.deliveries,
g.attempts + 1, g.created_at, coalesce(g.first_attempt_at, g.acquired_at), {{now}}, g.acquired_at, g.token,
%s, g.last_error, {{now}} FROM gone g
"""
FUSED_COMPLETE = _FUSED_MOVE % "'COMPLETED', NULL"
_NOTED = "(SELECT {} FROM {{stream_message}} s WHERE s.stream = :stream AND s.seq = :seq AND s.id = {}.id)"
FUSED_FAIL = _FUSED_MOVE % f"'FAILED', {_NOTED.format(REASON, 'g')}"
REMOVE = f"DELETE FROM {{message}} WHERE id {CHOSEN}"
RETRY = f"""
UPDATE {{message}} SET state = 'RETRYABLE', attempts = attempts + 1,
due_at = {{now}} + coalesce({_NOTED.format("s.delay", "{message}")}, 0),
first_attempt_at = coalesce(first_attempt_at, acquired_at), last_attempt_at = {{now}},
last_error = coalesce({_NOTED.format("s.reason", "{message}")}, last_error), lease_until = NULL
WHERE id {CHOSEN}
"""
# As if never claimed: the release of a stream says nothing against its messages, and their lane stays what it was.
GIVE_BACK = """
UPDATE {message} SET state = 'PENDING', deliveries = deliveries - 1, lease_until = NULL
WHERE id {in_select} SELECT s.id FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq {end_select}
"""
DROP_MESSAGES = "DELETE FROM {stream_message} WHERE stream = :stream AND seq = :seq"
DROP_CLAIM = "DELETE FROM {stream_claim} WHERE stream = :stream AND seq = :seq"

# --- lag ------------------------------------------------------------------------------------------------

WAITING = """
SELECT count(*) FROM (SELECT m.id FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready} AND m.lane = :lane
AND m.due_at <= {now} {from_floor} ORDER BY m.due_at, m.id LIMIT :limit) x
"""
