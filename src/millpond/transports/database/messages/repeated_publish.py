"""A publish that may be a repeat: which of its messages are known, and the flag of one that may have been handled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

_PRESENT_IDS = """
SELECT id FROM {message} {id_index} WHERE id {ids}
UNION ALL
SELECT id FROM {archive} {archive_id_index} WHERE id {ids} AND archived_at > {now} - :dedupe_for
"""
_COUNT_DELIVERY = "UPDATE {message} SET deliveries = deliveries + 1 WHERE id {ids}"


def present_ids(d: Dialect, keys: Sequence[Any], now: int | None, dedupe_for: int) -> Steps[set[UUID]]:
    """Ids of messages that exist, or that were archived within the window."""
    rows = yield Query(d.sql(_PRESENT_IDS), {"ids": keys, "now": now, "dedupe_for": dedupe_for})
    return {d.id_out(row[0]) for row in rows}


def count_delivery(d: Dialect, keys: Sequence[Any]) -> Steps[None]:
    """Flag messages that the second try has stored.

    The first try may have been committed, and its message handled and removed without a trace: then this is not its
    first delivery.
    """
    yield Query(d.sql(_COUNT_DELIVERY), {"ids": keys})
