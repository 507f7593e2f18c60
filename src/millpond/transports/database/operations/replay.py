"""Publish archived messages again, as steps. Each has a new id derived from the old id and the replay's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond.message import replayed_headers, replayed_id
from millpond.transports.database.messages.publish import unpublished_ids
from millpond.transports.database.shards import Placed, check_owned
from millpond.transports.database.sql.columns import new_message
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Many, Query, Steps

REPLAY_BATCH = 500
"""Messages per transaction."""

_REPLAYABLE = "SELECT id, archived_at, queue, headers, {key} FROM {archive} {archive_id_index} WHERE id {ids}"
_COLUMNS, _VALUES = new_message(
    "a.", id=":new_id", queue=":queue", headers=":headers", due_at="{now}", created_at="{now}"
)
# The payload moves inside the server. An expiry belongs to the first life of a message.
_REPLAY = f"""
INSERT INTO {{message}} ({_COLUMNS}) SELECT {_VALUES}
FROM {{archive}} a WHERE a.id = :id AND a.archived_at = :archived_at
"""


# A failure that was published again is no longer open.
_CLOSE_FAILURES = "UPDATE {archive} {archive_id_index} SET failure = NULL WHERE id {ids} AND failure IS NOT NULL"


def not_archived(d: Dialect, ids: Sequence[UUID]) -> Steps[list[UUID]]:
    """The ids that are not in the archive."""
    rows = yield Query(d.sql(_REPLAYABLE), {"ids": [d.id_in(id_) for id_ in ids]})
    found = {d.id_out(row[0]) for row in rows}
    return [id_ for id_ in ids if id_ not in found]


def close_failures(d: Dialect, ids: Sequence[UUID]) -> Steps[None]:
    yield Query(d.sql(_CLOSE_FAILURES), {"ids": [d.id_in(id_) for id_ in ids]})


def publish_again(
    d: Dialect,
    ids: Sequence[UUID],
    *,
    name: str,
    queue: str | None,
    now: int | None,
    dedupe_for: int,
    notify: bool,
) -> Steps[dict[UUID, str]]:
    """Publish archived messages again; returns the new ids of those that are new, with their queues.

    On a shard all of them must belong there, under their new ids.
    """
    rows = yield Query(d.sql(_REPLAYABLE), {"ids": [d.id_in(id_) for id_ in ids]})
    # An id that was used again after its dedupe window is in the archive twice: the last one counts.
    last = {d.id_out(row[0]): row for row in sorted(rows, key=lambda row: row[1])}
    yield from check_owned(d, [Placed(row[4], replayed_id(id_, name)) for id_, row in last.items()])
    new = yield from unpublished_ids(d, [replayed_id(id_, name) for id_ in last], now, dedupe_for)
    published: dict[UUID, str] = {}
    values: list[tuple[Any, ...]] = []
    for id_, (key, archived_at, old_queue, headers, _) in last.items():
        new_id = replayed_id(id_, name)
        if new_id in new:
            published[new_id] = queue or old_queue
            values.append((d.id_in(new_id), published[new_id], replayed_headers(headers, id_), key, archived_at, now))
    if values:
        yield Query(d.sql(_CLOSE_FAILURES), {"ids": [value[3] for value in values]})
        yield Many(d.sql(_REPLAY), ("new_id", "queue", "headers", "id", "archived_at", "now"), values)
        if notify:
            yield from d.writes.notify(set(published.values()))
    return published
