"""Record messages that another transport has settled, as steps: each message once for each state."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import DataRefused
from millpond.seam.operations import Row
from millpond.transports.database.exports.exports import RECORD_LOCK
from millpond.transports.database.sql.columns import RECORDED, recorded_values
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Query, Steps

# Rows with a token were settled by this database itself, e.g. by a bridge; they do not count as recorded.
KNOWN = """
SELECT id, archived_at, CASE WHEN token IS NULL THEN state END FROM {archive} {archive_id_index}
WHERE id {ids} AND archived_at > {now} - :dedupe_for
"""


def record_rows(d: Dialect, rows: Sequence[Row], *, now: int | None, dedupe_for: int) -> Steps[int]:
    """Enter rows that are not there within the window; returns how many.

    Only one such transaction runs at a time, and it reads after it has the lock. Otherwise two could both miss a copy.
    """
    largest = max((len(row.payload) for row in rows), default=0)
    if d.largest_body is not None and largest > d.largest_body:
        raise DataRefused(
            f"a body of {largest:,} bytes is too large for max_allowed_packet of this server; the limit is "
            f"{d.largest_body:,}"
        )
    yield Query(d.sql(RECORD_LOCK), {})
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    ids = list({d.id_in(row.id) for row in rows})
    there = yield Query(d.sql(KNOWN), {"ids": ids, "now": at, "dedupe_for": dedupe_for})
    known = {(d.id_out(id_), state) for id_, _, state in there}
    taken = {(d.id_out(id_), archived_at) for id_, archived_at, _ in there}
    records = []
    for row in rows:
        if (row.id, row.state.value) not in known:
            known.add((row.id, row.state.value))
            time = at
            while (row.id, time) in taken:  # a key in some databases
                time += 1
            taken.add((row.id, time))
            records.append(recorded_values(row, d.id_in(row.id), time))
    if records:
        yield from d.writes.load("archive", RECORDED, records)
    return len(records)
