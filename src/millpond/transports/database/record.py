"""Record what another transport has settled in the archive, as steps: each message once for each state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.message import short_error
from millpond.transport import Row
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Copy, Many, Query, Steps


def record(d: Dialect, rows: Sequence[Row], *, now: int | None, dedupe_for: int) -> Steps[int]:
    """Enter rows that are not there within the window; returns how many.

    One such transaction at a time, and the look comes after its turn: two that record copies of one message would
    otherwise both find nothing.
    """
    yield Query(d.sql(sql.RECORD_TURN), {})
    at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
    ids = list({d.id_in(row.id) for row in rows})
    there = yield Query(d.sql(sql.RECORDED), {"ids": ids, "now": at, "dedupe_for": dedupe_for})
    known = {(d.id_out(id_), state) for id_, _, state in there}
    moments = {(d.id_out(id_), archived_at) for id_, archived_at, _ in there}
    records = []
    for row in rows:
        if (row.id, row.state.value) not in known:
            known.add((row.id, row.state.value))
            moment = at
            while (row.id, moment) in moments:  # a key in some databases
                moment += 1
            moments.add((row.id, moment))
            records.append(_values(d, row, moment))
    if records and d.fused is not None:
        yield Copy(d.table("archive"), d.schema, sql.RECORD_COLUMNS, records)
    elif records:
        yield Many(d.sql(sql.RECORD), sql.RECORD_COLUMNS, records)
    return len(records)


def _values(d: Dialect, row: Row, at: int) -> tuple[Any, ...]:
    return (
        d.id_in(row.id),
        row.queue,
        row.key,
        row.priority,
        row.due_us,
        row.expires_us,
        # As other people's AMQP headers may hold anything, what JSON has no word for is written as text.
        msgspec.json.encode(row.headers, enc_hook=str).decode() if row.headers else None,
        row.payload,
        row.deliveries,
        row.attempts,
        row.created_us,
        row.first_attempt_us,
        row.last_attempt_us,
        row.acquired_us,
        row.state.value,
        short_error(row.reason),
        short_error(row.error),
        at,
    )
