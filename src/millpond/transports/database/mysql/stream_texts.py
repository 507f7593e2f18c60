"""The texts of streams for MySQL and MariaDB: joins that begin with the claim's ids.

An UPDATE or DELETE with IN (SELECT …) would read every message here and test each against the claim's ids.
"""

from __future__ import annotations

from millpond.transports.database.sql.writes import OF_CLAIM, SETTLED_AS, STREAM_STAMP

_STAMP = f"""
UPDATE {{stream_message}} s STRAIGHT_JOIN {{message}} m ON m.id = s.id SET {STREAM_STAMP}
WHERE s.stream = :stream AND s.seq = :seq AND {{ready}}
"""
_REMOVE = f"DELETE m FROM {OF_CLAIM} AND {SETTLED_AS}"
_RETRY = f"""
UPDATE {{stream_message}} s STRAIGHT_JOIN {{message}} m ON m.id = s.id
SET m.state = 'RETRYABLE', m.attempts = m.attempts + 1, m.crashes = 0,
m.due_at = {{now}} + coalesce(s.delay, 0),
m.first_attempt_at = coalesce(m.first_attempt_at, m.acquired_at), m.last_attempt_at = {{now}},
m.last_error = coalesce(s.reason, m.last_error), m.lease_until = NULL
WHERE s.stream = :stream AND s.seq = :seq AND {SETTLED_AS}
"""
_GIVE_BACK = """
UPDATE {stream_message} s STRAIGHT_JOIN {message} m ON m.id = s.id
SET m.state = 'PENDING', m.deliveries = m.deliveries - 1, m.lease_until = NULL
WHERE s.stream = :stream AND s.seq = :seq
"""
_SLICE = """
FROM (SELECT s.id AS claimed FROM {stream_message} s WHERE s.stream = :stream AND s.seq = :seq AND s.id >= :first) c
STRAIGHT_JOIN {message} m ON m.id = c.claimed
"""
_NOTE = """
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (id CHAR(32) PATH '$[0]',
outcome VARCHAR(6) CHARACTER SET ascii COLLATE ascii_bin PATH '$[1]', delay BIGINT PATH '$[2]',
reason LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$[3]')) AS r
STRAIGHT_JOIN {stream_message} s ON s.stream = :stream AND s.seq = :seq AND s.id = UNHEX(r.id)
SET s.outcome = r.outcome, s.delay = r.delay, s.reason = r.reason
"""

OVERRIDES = {
    "stamp for stream": _STAMP,
    "remove of stream": _REMOVE,
    "retry of stream": _RETRY,
    "give back of stream": _GIVE_BACK,
    "record outcomes": _NOTE,
    "slice of claim": _SLICE,
    "slice of claim up to": _SLICE.replace(":first", ":first AND s.id < :stop"),
}
