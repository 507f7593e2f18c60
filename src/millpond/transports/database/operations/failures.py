"""Open failures in groups of alike errors, as steps. An index of fingerprints has them, and no other message."""

from __future__ import annotations

from typing import Any

from millpond.seam.operations import Failure
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

_GROUPS = """
SELECT a.queue, a.failure, count(*), min(a.archived_at), max(a.archived_at) FROM {{archive}} a {{failure_index}}
WHERE a.failure IS NOT NULL {of_queue} GROUP BY a.failure, a.queue
"""
_NEWEST = """
SELECT a.id, a.reason, a.error FROM {archive} a {failure_index}
WHERE a.failure = :failure AND a.queue = :queue AND a.archived_at = :newest LIMIT 1
"""


def failure_groups(d: Dialect, queue: str | None, limit: int) -> Steps[list[Failure]]:
    """Groups with their newest message, newest first."""
    of_queue, params = ("", dict[str, Any]()) if queue is None else ("AND a.queue = :queue", {"queue": queue})
    rows = yield Query(d.sql(_GROUPS.format(of_queue=of_queue)), params)
    groups = []
    for name, failure, messages, oldest, newest in sorted(rows, key=lambda row: row[-1], reverse=True)[:limit]:
        chosen = {"failure": failure, "queue": name, "newest": newest}
        for id_, reason, error in (yield Query(d.sql(_NEWEST), chosen)):
            groups.append(
                Failure(
                    queue=name,
                    fingerprint=failure,
                    messages=int(messages),
                    oldest_us=oldest,
                    newest_us=newest,
                    id=d.id_out(id_),
                    reason=reason,
                    error=error,
                )
            )
    return groups
