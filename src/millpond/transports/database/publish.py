"""Publish, as steps: generated ids go straight in; ids that callers chose are looked up first."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond.message import Draft, State
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Copy, Many, Query, Steps

COPY_FROM = 20
"""From this many messages on a bulk load beats an INSERT."""


def publish(
    d: Dialect,
    drafts: Sequence[Draft],
    *,
    now: int | None,
    dedupe_for: int,
    own_connection: bool,
    announce: bool = False,
    publisher: int | None = None,
    again: bool = False,
) -> Steps[set[UUID]]:
    """Store the drafts, and announce them to those that listen; returns which of the given ids are new.

    `again`: an earlier try by the same `publisher` may have been committed; what it published is new too.
    """
    given: dict[UUID, Draft] = {}
    for draft in drafts:
        if draft.given:
            given.setdefault(draft.id, draft)  # of an id that stands twice in one call, the first counts
    new: set[UUID] = set()
    if given:
        ours, present = yield from _enter(d, list(given), now, dedupe_for, publisher)
        new = ours - present
        drafts = [*(draft for draft in drafts if not draft.given), *(given[id_] for id_ in given if id_ in new)]
        new = ours if again else new
    if drafts:
        yield from _insert(d, drafts, now, own_connection, announce)
    return new


def unpublished(d: Dialect, ids: Sequence[UUID], now: int | None, dedupe_for: int) -> Steps[set[UUID]]:
    """Enter ids in the dedupe table; returns those that nobody has published within the window."""
    ours, present = yield from _enter(d, ids, now, dedupe_for, None)
    return ours - present


def _enter(
    d: Dialect, ids: Sequence[UUID], now: int | None, dedupe_for: int, publisher: int | None
) -> Steps[tuple[set[UUID], set[UUID]]]:
    """Enter ids in the dedupe table; returns those entered by this publisher, and which of them have a message."""
    # In one order everywhere, so that two publishers of the same ids wait for each other and never deadlock.
    keys = [d.id_in(id_) for id_ in sorted(ids)]
    publisher = publisher or secrets.randbits(62)
    at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
    yield Query(d.sql(sql.FORGET_EXPIRED_IDS), {"ids": keys, "now": now})
    yield Many(
        d.sql(sql.REMEMBER_ID),
        ("id", "publisher", "expires_at"),
        [(key, publisher, at + dedupe_for) for key in keys],
    )
    ours = yield Query(d.sql(sql.OWN_IDS), {"ids": keys, "publisher": publisher})
    if not ours:
        return set(), set()
    # An id may also be here from before the window, or from a publish whose reply was lost.
    present = yield Query(
        d.sql(sql.PRESENT_IDS), {"ids": [row[0] for row in ours], "now": now, "dedupe_for": dedupe_for}
    )
    return {d.id_out(row[0]) for row in ours}, {d.id_out(row[0]) for row in present}


def is_one_statement(d: Dialect, drafts: Sequence[Draft]) -> bool:
    """Whether publishing these takes one statement, and so no transaction around it."""
    few = len(drafts) < COPY_FROM if d.fused else len(drafts) == 1
    return few and not any(draft.given for draft in drafts)


def _insert(d: Dialect, drafts: Sequence[Draft], now: int | None, own_connection: bool, announce: bool) -> Steps[None]:
    fused = d.fused
    if fused is not None and not (own_connection and len(drafts) >= COPY_FROM):
        params = _columns(d, drafts, now)
        if announce:
            yield Query(d.sql(fused.insert_and_announce), params | {"channel": d.channel})
        else:
            yield Query(d.sql(fused.insert), params)
        return
    if fused is None and len(drafts) == 1:
        yield Query(d.sql(sql.INSERT_ONE), _row(d, drafts[0], now))
        return
    at = (yield Query(d.sql(sql.NOW), {"now": now}))[0][0]
    state, id_in = State.PENDING.value, d.id_in
    records = [
        (
            id_in(draft.id),
            draft.queue,
            draft.key,
            draft.priority,
            draft.priority,
            at + draft.delay_us if draft.due_us is None else draft.due_us,
            draft.expires_us if draft.expires_after_us is None else at + draft.expires_after_us,
            state,
            draft.headers,
            draft.payload,
            at,
        )
        for draft in drafts
    ]
    if fused is not None:
        yield Copy(d.table("message"), d.schema, sql.MESSAGE_COLUMNS, records)
        if announce:
            queues = list({draft.queue for draft in drafts if not draft.delay_us})
            yield Query(d.sql(fused.announce), {"channel": d.channel, "queues": queues})
    else:
        yield Many(d.sql(sql.INSERT), sql.MESSAGE_COLUMNS, records)


def _row(d: Dialect, draft: Draft, now: int | None) -> dict[str, Any]:
    return {
        "now": now,
        "id": d.id_in(draft.id),
        "queue": draft.queue,
        "key": draft.key,
        "priority": draft.priority,
        "delay": draft.delay_us,
        "due": draft.due_us,
        "lifetime": draft.expires_after_us,
        "expires": draft.expires_us,
        "headers": draft.headers,
        "payload": draft.payload,
    }


def _columns(d: Dialect, drafts: Sequence[Draft], now: int | None) -> dict[str, Any]:
    return {
        "now": now,
        "ids": [d.id_in(draft.id) for draft in drafts],
        "queues": [draft.queue for draft in drafts],
        "keys": [draft.key for draft in drafts],
        "priorities": [draft.priority for draft in drafts],
        "delays": [draft.delay_us for draft in drafts],
        "dues": [draft.due_us for draft in drafts],
        "lifetimes": [draft.expires_after_us for draft in drafts],
        "expires": [draft.expires_us for draft in drafts],
        "headers": [draft.headers for draft in drafts],
        "payloads": [draft.payload for draft in drafts],
    }
