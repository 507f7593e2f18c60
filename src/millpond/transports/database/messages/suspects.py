"""Claim a suspect, as steps. Suspects have their own lanes, so hints about the other lanes are not used."""

from __future__ import annotations

from millpond.message import Claim
from millpond.transports.database.sql.columns import SUSPECT_LANE
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.sql.writes import Stamp

_DUE_LANE = f"""
SELECT m.lane FROM {{message}} m {{claim_index}}
WHERE m.queue = :queue AND {{ready}} AND m.lane >= {SUSPECT_LANE} AND m.due_at <= {{now}}
ORDER BY m.lane LIMIT 1
"""


def claim_suspect(d: Dialect, queue: str, stamp: Stamp) -> Steps[list[Claim]]:
    """Claim the first suspect of a queue, alone. Usually there is none, and one descent of the index finds that."""
    for (lane,) in (yield Query(d.sql(_DUE_LANE), {"queue": queue, "now": stamp.now})):
        return (yield from d.writes.claim_lane(queue, int(lane), 1, stamp, None))
    return []
