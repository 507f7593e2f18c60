"""Waiting messages by the transactions that wrote them (column `written`), in one statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.message import LOWEST_PRIORITY
from millpond.transports.database.sql.columns import SUSPECT_LANE
from millpond.transports.database.sql.dialect import Dialect, Floor
from millpond.transports.database.sql.statement import Query, Rows, Steps
from millpond.transports.database.sql.transaction_marks import Appeared, Below, FirstDue

MOST = 1000
"""Messages of one answer."""
MOST_READ = 100_000
"""New messages that one answer reads: after a large bulk publish it is quicker to read the lanes."""
_LANES = [lane + suspect for suspect in (0, SUSPECT_LANE) for lane in range(LOWEST_PRIORITY + 1)]

# With the start of the server: a replica that takes over gives the same numbers to other transactions.
_SNAPSHOT = "(SELECT pg_current_snapshot()::text || ' ' || extract(epoch FROM pg_postmaster_start_time()))"
_SINCE = "split_part(:since::text, ' ', 1)::pg_snapshot"
_FIRST = """
SELECT 1 AS kind, f.lane, p.due_at, p.id, NULL::text AS snapshot, false AS doubt
FROM unnest(:lanes::smallint[], :floor_dues::bigint[], :floor_ids::uuid[]) AS f(lane, due, id),
LATERAL (SELECT m.due_at, m.id FROM {message} m WHERE m.queue = :queue::text AND {ready} AND m.lane = f.lane
AND m.due_at <= {now} AND (m.due_at, m.id) >= (f.due, f.id) ORDER BY m.due_at, m.id LIMIT 1) p
"""
_NOW = f"SELECT 0, NULL::smallint, {{now}}, NULL::uuid, {_SNAPSHOT}, %s"
_FIRST_DUE = f"{_NOW % 'false'} UNION ALL {_FIRST}"
# Not by "state <> 'PROCESSING'", which would let the index of claims serve: a plan made while the table was empty could
# take it, and read the whole queue.
_WAITS = "m.state || '' <> 'PROCESSING'"
# LATERAL: with = ANY(…) instead, a plan made while the table was empty reads the whole queue.
# A lane without a floor has none at this position of the arrays.
_BELOW = """
((m.due_at, m.id) >= ((:floor_dues::bigint[])[array_position(:lanes::smallint[], m.lane)],
(:floor_ids::uuid[])[array_position(:lanes::smallint[], m.lane)])) IS NOT TRUE
"""
_ROW = "m.lane, m.due_at, m.id"
# A row whose xmax is still running is locked, and most likely being claimed. Busy workers have thousands of these at
# any moment: they may be left out, and come back by the ranges if they are still here.
_DOUBT = """
(p.xmax <> 0 AND (p.xmax::text::bigint = ANY(ARRAY(SELECT x.id::text::bigint & 4294967295 FROM running x))
OR ((p.xmax::text::bigint - (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint)) & 4294967295) < 2147483648))
"""
_QUESTION = f"""
WITH running AS MATERIALIZED (SELECT x.id FROM pg_snapshot_xip(pg_current_snapshot()) AS x(id)),
fresh AS MATERIALIZED (SELECT {_ROW}, m.xmax FROM {{message}} m
WHERE m.queue = :queue::text AND m.written >= pg_snapshot_xmax({_SINCE}) AND {_WAITS}
LIMIT {MOST_READ + 1}),
found AS (
SELECT p.lane, p.due_at, p.id, {_DOUBT} AS doubt FROM (SELECT {_ROW}, m.xmax FROM fresh m WHERE {_BELOW}) p
UNION ALL
SELECT p.lane, p.due_at, p.id, {_DOUBT} FROM pg_snapshot_xip({_SINCE}) AS s(id),
LATERAL (SELECT {_ROW}, m.xmax FROM {{message}} m
WHERE m.queue = :queue::text AND m.written = s.id AND {_WAITS} AND {_BELOW} LIMIT {MOST_READ}) p
UNION ALL
SELECT p.lane, p.due_at, p.id, false FROM unnest(:range_lanes::smallint[], :low_dues::bigint[], :low_ids::uuid[],
:high_dues::bigint[], :high_ids::uuid[]) AS r(lane, low_due, low_id, high_due, high_id),
LATERAL (SELECT {_ROW} FROM {{message}} m WHERE m.queue = :queue::text AND {{ready}} AND m.lane = r.lane
AND (m.due_at, m.id) >= (r.low_due, r.low_id) AND (m.due_at, m.id) < (r.high_due, r.high_id)
ORDER BY m.due_at, m.id LIMIT {MOST + 1}) p
UNION ALL
SELECT p.lane, p.due_at, p.id, false FROM unnest(:swept_lanes::smallint[]) AS s(lane),
LATERAL (SELECT {_ROW} FROM {{message}} m WHERE m.queue = :queue::text AND {{ready}} AND m.lane = s.lane
AND m.due_at >= :swept_from::bigint AND m.due_at < :swept_to::bigint AND {_BELOW}
ORDER BY m.due_at, m.id LIMIT {MOST + 1}) p
UNION ALL
SELECT {_ROW}, false FROM {{message}} m WHERE m.id {{ids}} AND m.queue || '' = :queue::text AND {_WAITS}
)
{_NOW % f"(SELECT count(*) FROM fresh) > {MOST_READ}"}
UNION ALL {_FIRST} UNION ALL
(SELECT 2, a.lane, a.due_at, a.id, NULL, bool_and(a.doubt) FROM found a
GROUP BY a.lane, a.due_at, a.id ORDER BY 6, 2, 3, 4 LIMIT {MOST + 1})
"""


class PostgresMarks:
    def __init__(self, d: Dialect) -> None:
        self._d = d

    def snapshot(self) -> Steps[str]:
        return str((yield Query(self._d.sql(f"SELECT {_SNAPSHOT}"), {}))[0][0])

    def first_due(self, queue: str, floors: Mapping[int, Floor], now: int | None) -> Steps[FirstDue]:
        return self._first((yield Query(self._d.sql(_FIRST_DUE), {"queue": queue, "now": now, **_arrays(floors)})))

    def below(self, queue: str, asked: Below, now: int | None) -> Steps[Appeared]:
        swept_from, swept_to = asked.swept or (0, 0)
        params = {
            "queue": queue,
            "now": now,
            **_arrays(asked.floors),
            "since": asked.since,
            "range_lanes": [r.lane for r in asked.ranges],
            "low_dues": [r.low[0] for r in asked.ranges],
            "low_ids": [r.low[1] for r in asked.ranges],
            "high_dues": [r.high[0] for r in asked.ranges],
            "high_ids": [r.high[1] for r in asked.ranges],
            "swept_lanes": _LANES if asked.swept else [],
            "swept_from": swept_from,
            "swept_to": swept_to,
            "ids": list(asked.ids),
        }
        rows = yield Query(self._d.sql(_QUESTION), params)
        ((_, _, _, _, snapshot, too_many_new),) = [row for row in rows if row[0] == 0]
        found = [row for row in rows if row[0] == 2]
        too_many = too_many_new or (len(found) > MOST and not found[-1][5])
        messages = sorted((lane, self._place(due, id_)) for _, lane, due, id_, _, _ in found)
        return Appeared(snapshot, self._first(rows), messages, not too_many and _continues(asked.since, snapshot))

    def _first(self, rows: Rows) -> FirstDue:
        (at,) = [row[2] for row in rows if row[0] == 0]
        return FirstDue(at, {row[1]: self._place(row[2], row[3]) for row in rows if row[0] == 1})

    def _place(self, due: int, id_: Any) -> Floor:
        return due, self._d.id_out(id_)


def _continues(since: str, snapshot: str) -> bool:
    """Whether both are of the same server, and the second is not the earlier one."""
    (before, server), (after, same) = since.split(" "), snapshot.split(" ")
    return server == same and int(before.split(":")[1]) <= int(after.split(":")[1])


def _arrays(floors: Mapping[int, Floor]) -> dict[str, Any]:
    return {
        "lanes": list(floors),
        "floor_dues": [due for due, _ in floors.values()],
        "floor_ids": [id_ for _, id_ in floors.values()],
    }
