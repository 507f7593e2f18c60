"""The first archived row that is not committed, on MySQL and MariaDB.

They show open transactions only to monitors. But any user can read uncommitted rows: at READ UNCOMMITTED the archive
has rows that it does not have at READ COMMITTED.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

_BUCKETS = 256
_FIRST = "SELECT min(archived_at) FROM {archive}"
_UNCOMMITTED = "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED"
# The checksum distinguishes sets of equal size: some rows may be uncommitted, and as many deletions.
_COUNTS = """
SELECT (archived_at - :low) DIV :width AS bucket, count(*), bit_xor(crc32(id)) FROM {archive}
WHERE archived_at >= :low AND archived_at < :high GROUP BY bucket
"""


def first_uncommitted(d: Dialect, low: int, high: int) -> Steps[int | None]:
    """`archived_at` of the first uncommitted row in [low, high)."""
    yield Query(d.sql(_UNCOMMITTED), {})
    ((first,),) = yield Query(d.sql(_FIRST), {})
    if first is None:
        return None
    low, end = max(low, int(first)), high
    while low < high:
        width = -(-(high - low) // _BUCKETS)
        chosen = {"low": low, "high": high, "width": width}
        # For the one statement that follows. In this order: rows committed in between are in both.
        yield Query(d.sql(_UNCOMMITTED), {})
        written = _by_bucket((yield Query(d.sql(_COUNTS), chosen)))
        committed = _by_bucket((yield Query(d.sql(_COUNTS), chosen)))
        differing = [bucket for bucket, found in written.items() if committed.get(bucket) != found]
        if not differing:
            low, high = high, end  # none, or committed since the query before
            continue
        low += min(differing) * width
        if width == 1:
            return low
        high = min(high, low + width)
    return None


def _by_bucket(rows: Sequence[Sequence[Any]]) -> dict[int, tuple[int, int]]:
    return {int(bucket): (int(count), int(sum_)) for bucket, count, sum_ in rows}
