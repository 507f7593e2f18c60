"""Ids of messages that are on their way to a shard: it knows them before it accepts their key range.

A database knows an id while its message is live, and for the window after it was archived. After a move of the range,
message and archive may be on the old owner, and the dedupe row may have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from millpond.transports.database.moves.move_steps import MOVED_MARK, check_epoch
from millpond.transports.database.runner import Room, read, write
from millpond.transports.database.sql.columns import as_text
from millpond.transports.database.sql.statement import Many, Query, Steps

_NEVER = (1 << 63) - 1

_ARCHIVED = """
SELECT id, {raw}{key}{end_raw}, archived_at FROM {archive}
WHERE archived_at > :since AND archived_at <= :until AND created_at <= :published_until
"""
_LAST_ARCHIVED = "SELECT id, max(archived_at) FROM {archive} {archive_id_index} WHERE id {ids} GROUP BY id"
# A row without an end. `publisher` keeps the negative time at which it ended before. MySQL assigns from left to right.
_AWAIT_KNOWN = f"""
UPDATE {{dedupe}} SET publisher = -expires_at, expires_at = {_NEVER} WHERE id {{ids}} AND publisher >= 0
"""
_AWAIT_NEW = f"INSERT INTO {{dedupe}} (id, publisher, expires_at) VALUES (:id, -1, {_NEVER}) {{or_skip}}"
_AWAITED = f"SELECT id FROM {{dedupe}} WHERE expires_at = {_NEVER} AND publisher < 0 ORDER BY id LIMIT :limit"
_AWAIT_NO_MORE = """
UPDATE {dedupe} SET expires_at = CASE WHEN -publisher > :until THEN -publisher ELSE :until END, publisher = :mark
WHERE id = :id AND publisher < 0
"""


class AwaitedIds(Room):
    """The verbs of a mover. The first two read at the old owner, the others belong to the new one."""

    @read
    def archived(self, since: int, until: int, published_until: int) -> Steps[list[tuple[UUID, str | None, int]]]:
        """Messages that were archived in (since, until] and published long before: id, key, time of the archive."""
        given = {"since": since, "until": until, "published_until": published_until}
        rows = yield Query(self.d.sql(_ARCHIVED), given)
        return [(self.d.id_out(id_), as_text(key), int(at)) for id_, key, at in rows]

    @read
    def last_archived(self, ids: Sequence[UUID]) -> Steps[dict[UUID, int]]:
        """When these messages were archived here, as far as they were."""
        rows = yield Query(self.d.sql(_LAST_ARCHIVED), {"ids": [self.d.id_in(id_) for id_ in ids]})
        return {self.d.id_out(id_): int(at) for id_, at in rows}

    @write
    def begin(self, epoch: int, ids: Sequence[UUID]) -> Steps[None]:
        """Await messages that are live at the old owner: their ids are known, however long ago they were published."""
        yield from check_epoch(self.d, epoch)
        keys = [self.d.id_in(id_) for id_ in ids]
        yield Query(self.d.sql(_AWAIT_KNOWN), {"ids": keys})
        yield Many(self.d.sql(_AWAIT_NEW), ("id",), [(key,) for key in keys])

    @read
    def some(self, limit: int) -> Steps[list[UUID]]:
        """Ids of messages that are awaited."""
        return [self.d.id_out(row[0]) for row in (yield Query(self.d.sql(_AWAITED), {"limit": limit}))]

    @write
    def end(self, epoch: int, ids: Sequence[tuple[UUID, int]]) -> Steps[None]:
        """Await messages no more. Their ids are known until the given times, or for as long as before."""
        yield from check_epoch(self.d, epoch)
        values = [(self.d.id_in(id_), until, MOVED_MARK) for id_, until in ids]
        yield Many(self.d.sql(_AWAIT_NO_MORE), ("id", "until", "mark"), values)
