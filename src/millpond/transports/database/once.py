"""Once, as steps: the second line of defence against a message that is delivered twice."""

from __future__ import annotations

import secrets
from typing import Any

from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Many, Query, Steps

# Whoever inserts the row is first; a conflict is no error, so that it cannot abort the caller's transaction.
# A transaction that is still open makes the second wait for its end.
ENTER = "INSERT INTO {once} (id, {key}, token, at) VALUES (:id, :key, :token, :at) {or_skip}"
NOW = "SELECT {now}"
ENTERED = "SELECT token FROM {once} WHERE id = :id AND {key} = :key"


def once(d: Dialect, id_: Any, key: str, now: int | None) -> Steps[bool]:
    """True for the first transaction that asks for (id, key) and commits."""
    token = secrets.randbits(62)
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    yield Many(d.sql(ENTER), ("id", "key", "token", "at"), [(id_, key, token, at)])
    rows = yield Query(d.sql(ENTERED), {"id": id_, "key": key})
    return bool(rows) and rows[0][0] == token
