"""Publish, as steps: generated ids are inserted at once; ids that callers gave are looked up first."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple
from uuid import UUID

from millpond.message import Draft, Published
from millpond.transports.database.messages.repeated_publish import count_delivery, present_ids
from millpond.transports.database.messages.unique import publish_unique
from millpond.transports.database.sql.dialect import NOW, Dialect, Named
from millpond.transports.database.sql.statement import Many, Query, Steps

_EXPIRED_IDS = "SELECT id FROM {dedupe} WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit"
_FORGET_EXPIRED_IDS = "DELETE FROM {dedupe} WHERE id {ids} AND expires_at <= {now}"
# The transaction that inserts the row owns the id; the others find a row with another mark. A conflict is no error,
# so it cannot abort the caller's transaction.
_REMEMBER_ID = "INSERT INTO {dedupe} (id, publisher, expires_at) VALUES (:id, :publisher, :expires_at) {or_skip}"
_MARKS = "SELECT id, publisher FROM {dedupe} WHERE id {ids}"
# All ids of some lots at once, also those whose time in the table is over.
REMEMBER_STAGED = Named(
    "remember staged",
    """
INSERT INTO {dedupe} AS d (id, publisher, expires_at)
SELECT n.staged, :publisher, :expires_at FROM (SELECT DISTINCT s.id AS staged FROM {staging} s WHERE s.lot {lots}) n
ORDER BY n.staged
ON CONFLICT (id) DO UPDATE SET publisher = excluded.publisher, expires_at = excluded.expires_at
WHERE d.expires_at <= :at
""",
)


class Inserted(NamedTuple):
    """Result of storing drafts."""

    new: Set[UUID]
    """Given ids that are new."""
    unique: Mapping[UUID, Published]
    """Results of unique messages by the ids of their drafts."""


ALL_NEW = Inserted(frozenset(), {})


def are_new(drafts: Sequence[Draft]) -> bool:
    """Whether all ids were made here and no value is unique: then nothing has to be looked up."""
    return not any([draft.given or draft.unique is not None for draft in drafts])


def insert_drafts(
    d: Dialect,
    drafts: Sequence[Draft],
    *,
    now: int | None,
    dedupe_for: int,
    own_connection: bool,
    notify: bool = False,
    marks: Sequence[int] = (),
) -> Steps[Inserted]:
    """Store the drafts and notify waiting workers; returns the given ids that are new, and results of unique messages.

    `marks`: random numbers, one for each try of this publish that may have been committed, the last for this try. In
    the dedupe table a mark of an earlier try proves its commit.
    """
    marks = marks or (secrets.randbits(62),)
    again = len(marks) > 1
    results: dict[UUID, Published] = {}
    if unique := [draft for draft in drafts if draft.unique is not None]:
        known_for = dedupe_for if again else None
        results = yield from publish_unique(
            d, unique, now, known_for=known_for, own_connection=own_connection, notify=notify
        )
        drafts = [draft for draft in drafts if draft.unique is None]
    # After a lost reply our own ids are looked up like those of callers.
    looked_up: dict[UUID, Draft] = {}
    for draft in drafts:
        if draft.given or again:
            looked_up.setdefault(draft.id, draft)  # an id given twice in one call: the first counts
    new: set[UUID] = set()
    if looked_up:
        new = yield from _insert_given(d, looked_up, marks[-1], now, dedupe_for, own_connection, notify)
        if again:
            # An id that the caller gave would have left a mark.
            made = [d.id_in(id_) for id_ in new if not looked_up[id_].given]
            if made:
                yield from count_delivery(d, made)
            rows = yield Query(d.sql(_MARKS), {"ids": [d.id_in(id_) for id_ in looked_up]})
            new |= {d.id_out(id_) for id_, mark in rows if mark in marks[:-1]}
        drafts = [draft for draft in drafts if draft.id not in looked_up]
    if drafts:
        yield from d.writes.insert(drafts, now, own_connection=own_connection, notify=notify)
    return Inserted(new, results)


def _insert_given(
    d: Dialect,
    drafts: Mapping[UUID, Draft],
    mark: int,
    now: int | None,
    dedupe_for: int,
    own_connection: bool,
    notify: bool,
) -> Steps[set[UUID]]:
    """Store messages whose ids are not known; returns the ids of these."""
    if insert_given := d.writes.insert_given:
        return (
            yield from insert_given(list(drafts.values()), mark=mark, now=now, dedupe_for=dedupe_for, notify=notify)
        )
    new = yield from unpublished_ids(d, list(drafts), now, dedupe_for, mark)
    if new:
        unknown = [draft for id_, draft in drafts.items() if id_ in new]
        yield from d.writes.insert(unknown, now, own_connection=own_connection, notify=notify)
    return new


def unpublished_ids(
    d: Dialect, ids: Sequence[UUID], now: int | None, dedupe_for: int, mark: int | None = None
) -> Steps[set[UUID]]:
    """Enter ids in the dedupe table; returns those that were not published within the window."""
    # In the same order everywhere: two publishers of the same ids wait for each other and do not deadlock.
    keys = [d.id_in(id_) for id_ in sorted(ids)]
    mark = mark or secrets.randbits(62)
    at = (yield Query(d.sql(NOW), {"now": now}))[0][0]
    yield Query(d.sql(_FORGET_EXPIRED_IDS), {"ids": keys, "now": now})
    yield Many(
        d.sql(_REMEMBER_ID),
        ("id", "publisher", "expires_at"),
        [(key, mark, at + dedupe_for) for key in keys],
    )
    entered = [id_ for id_, other in (yield Query(d.sql(_MARKS), {"ids": keys})) if other == mark]
    if not entered:
        return set()
    # An id may also be here from before the window, or from a publish whose reply was lost.
    return set(map(d.id_out, entered)) - (yield from present_ids(d, entered, now, dedupe_for))


def enter_staged(d: Dialect, chosen: Mapping[str, Any], publisher: int, at: int, dedupe_for: int) -> Steps[None]:
    """Enter the ids of staged lots in the dedupe table."""
    yield Query(d.sql(REMEMBER_STAGED), {**chosen, "publisher": publisher, "at": at, "expires_at": at + dedupe_for})


def forget_ids(d: Dialect, now: int | None, limit: int) -> Steps[int]:
    """Delete ids whose dedupe window is over; returns their number, less than `limit` when none is left."""
    rows = yield Query(d.sql(_EXPIRED_IDS), {"now": now, "limit": limit})
    if rows:
        # Checked again: a publisher may have entered one anew.
        yield Query(d.sql(_FORGET_EXPIRED_IDS), {"ids": [row[0] for row in rows], "now": now})
    return len(rows)


def publish_results(drafts: Sequence[Draft], inserted: Inserted) -> list[Published]:
    """Return for each draft whether it is new. An id given twice in one call is new once."""
    if not inserted.new and not inserted.unique:
        return [Published(draft.id, not draft.given) for draft in drafts]
    unseen = set(inserted.new)
    results = []
    for draft in drafts:
        if draft.unique is not None:
            results.append(inserted.unique[draft.id])
            continue
        results.append(Published(draft.id, not draft.given or draft.id in unseen))
        unseen.discard(draft.id)
    return results
