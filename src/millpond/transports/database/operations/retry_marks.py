"""FAILED messages that were published again, as steps: marked beside the archive, whose rows never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.message import State
from millpond.seam.operations import Row
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

_MARK = """
INSERT INTO {retried} (id, queue, at) SELECT DISTINCT a.id, a.queue, {now} FROM {archive} a {archive_id_index}
WHERE a.id {ids} AND a.state = 'FAILED' AND NOT EXISTS (SELECT 1 FROM {retried} r WHERE r.id = a.id)
"""
_MARKED = "SELECT id FROM {retried} WHERE id {ids}"
RETRIED_COUNTS = "SELECT queue, count(*) FROM {retried} GROUP BY queue"
# Their messages were purged.
_PURGED = """
SELECT r.id FROM {retried} r WHERE NOT EXISTS (SELECT 1 FROM {archive} a {archive_id_index} WHERE a.id = r.id)
LIMIT :limit
"""
_FORGET = "DELETE FROM {retried} WHERE id {ids}"


def mark_retried(d: Dialect, ids: Sequence[Any], now: int | None) -> Steps[None]:
    yield Query(d.sql(_MARK), {"ids": ids, "now": now})


def with_retried(d: Dialect, rows: list[Row]) -> Steps[list[Row]]:
    """The rows, those that were retried with their mark."""
    failed = [d.id_in(row.id) for row in rows if row.state is State.FAILED]
    if not failed:
        return rows
    marked = {d.id_out(id_) for (id_,) in (yield Query(d.sql(_MARKED), {"ids": failed}))}
    return [msgspec.structs.replace(row, retried=True) if row.id in marked else row for row in rows]


def forget_retried(d: Dialect, limit: int) -> Steps[int]:
    """Delete marks of purged messages; returns their number."""
    rows = yield Query(d.sql(_PURGED), {"limit": limit})
    if rows:
        yield Query(d.sql(_FORGET), {"ids": [row[0] for row in rows]})
    return len(rows)
