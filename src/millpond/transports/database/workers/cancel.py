"""Cancel running messages, as steps: an operator enters a request, and the worker that holds the message reads it.

A request names the claim by its token. After the next claim it has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from millpond.message import Receipt
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Many, Query, Steps

# Claims of a worker only: a stream and a caller without a worker read no requests.
_RUNNING = """
SELECT m.id, m.token FROM {message} m {id_index}
WHERE m.id {ids} AND m.state = 'PROCESSING' AND m.worker IS NOT NULL AND m.token IS NOT NULL
"""
_FORGET = "DELETE FROM {cancel} WHERE id = :id"
# With the token that was read: an operator may have entered a request for a later claim meanwhile.
_FORGET_ENDED = "DELETE FROM {cancel} WHERE id = :id AND token = :token"
_ENTER = "INSERT INTO {cancel} (id, token, reason) VALUES (:id, :token, :reason) {or_skip}"
_REQUESTS = """
SELECT c.id, c.token, c.reason, m.id FROM {cancel} c
LEFT JOIN {message} m ON m.id = c.id AND m.token = c.token AND m.state = 'PROCESSING'
"""


def request_cancel(d: Dialect, ids: Sequence[UUID], reason: str) -> Steps[list[UUID]]:
    """Enter requests; returns the ids of messages that a worker holds."""
    rows = yield Query(d.sql(_RUNNING), {"ids": [d.id_in(id_) for id_ in sorted(ids)]})
    for id_, token in sorted(rows, key=lambda row: d.id_out(row[0])):
        yield Query(d.sql(_FORGET), {"id": id_})  # that of an earlier claim
        yield Query(d.sql(_ENTER), {"id": id_, "token": token, "reason": reason})
    return [d.id_out(id_) for id_, _ in rows]


def cancel_requests(d: Dialect) -> Steps[dict[Receipt, str]]:
    """Requests for claims that are still held, with their reasons."""
    rows = yield Query(d.sql(_REQUESTS), {})
    return {Receipt(d.id_out(id_), token): reason for id_, token, reason, held in rows if held is not None}


def forget_requests(d: Dialect) -> Steps[int]:
    """Delete requests whose claim has ended; returns their number."""
    rows = yield Query(d.sql(_REQUESTS), {})
    ended = [(id_, token) for id_, token, _, held in rows if held is None]
    if ended:
        yield Many(d.sql(_FORGET_ENDED), ("id", "token"), ended)
    return len(ended)
