"""Messages that were archived a short time ago, or in each of several equal times, counted as steps."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.clock import SECOND
from millpond.message import SETTLED
from millpond.seam.operations import QueueHistory, QueueRates, SettledBucket
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Query, Steps

_MOST = 100_000
"""Messages of one queue and state that are counted. The rate of more is that of the newest ones."""
# Queue by queue: with a row of an outer query MySQL finds the queue in the index, but not the time.
_SINCE = """
SELECT count(*), min(c.archived_at) FROM (SELECT a.archived_at FROM {archive} a {archive_index}
WHERE a.queue = :queue AND a.state = :state AND a.archived_at > :since ORDER BY a.archived_at DESC LIMIT :most) c
"""
# Newest first: if there are more rows than the limit, only the oldest bucket that was read is incomplete.
_BUCKETS = """
SELECT c.bucket, count(*) FROM (SELECT (a.archived_at - :since) {div} :every AS bucket FROM {archive} a {archive_index}
WHERE a.queue = :queue AND a.state = :state AND a.archived_at >= :since AND a.archived_at < :until
ORDER BY a.archived_at DESC LIMIT :most) c GROUP BY c.bucket
"""


def settled_since(d: Dialect, queues: Sequence[str], window: int, now: int | None) -> Steps[list[QueueRates]]:
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    found = []
    for queue in queues:
        counts, approximate = [], False
        for state in SETTLED:
            params = {"queue": queue, "state": state.value, "since": at - window, "most": _MOST}
            number, oldest = (yield Query(d.sql(_SINCE), params))[0]
            if number >= _MOST:
                approximate = True
                number = max(number, round(number * window / max(1, at - oldest)))
            counts.append(int(number))
        completed, failed = counts
        found.append(
            QueueRates(
                queue=queue,
                completed=completed,
                failed=failed,
                over=window / SECOND,
                at_us=at,
                approximate=approximate,
            )
        )
    return found


def settled_buckets(
    d: Dialect, queue: str, every: int, number: int, until: int | None, limit: int, now: int | None
) -> Steps[QueueHistory]:
    """Up to `number` buckets that end at the one with `until`; fewer, but at least one, if they have too many rows."""
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    last = at if until is None else until - 1
    end = last - last % every + every
    begin = end - number * every
    first = 0
    counts: list[dict[int, int]] = []
    capped: set[int] = set()
    for state in SETTLED:
        params = {"queue": queue, "state": state.value, "since": begin, "until": end, "every": every, "most": limit}
        found = {int(bucket): int(rows) for bucket, rows in (yield Query(d.sql(_BUCKETS), params))}
        if sum(found.values()) >= limit:
            oldest = min(found)
            if len(found) == 1:
                capped.add(oldest)
                first = max(first, oldest)
            else:
                first = max(first, oldest + 1)
        counts.append(found)
    completed, failed = counts
    return QueueHistory(
        queue=queue,
        every_us=every,
        since_us=begin + first * every,
        until_us=end,
        at_us=at,
        buckets=tuple(
            SettledBucket(
                begin_us=begin + bucket * every,
                completed=completed.get(bucket, 0),
                failed=failed.get(bucket, 0),
                at_least=bucket in capped,
            )
            for bucket in sorted(completed.keys() | failed.keys())
            if bucket >= first
        ),
    )
