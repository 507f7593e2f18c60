"""Settle and extend, as steps: every write is fenced by its receipt, and never waits for a locked row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.message import SETTLED, Receipt, State
from millpond.outcome import Change, Outcome, change
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Rows, Steps

Key = tuple[Any, int]
"""A receipt as the database takes it: the id and the token. Looked up much faster than a receipt itself."""

_LEAST, _MOST = -(2**63), 2**63 - 1
"""What a database can hold. A token beyond it was never given to anybody."""


class Settled(msgspec.Struct, frozen=True):
    """What came of a settle: stale receipts, and outcomes whose row somebody else holds at the moment."""

    refused: list[Receipt]
    locked: list[Outcome]


def settle(
    d: Dialect,
    outcomes: Sequence[Outcome],
    *,
    now: int | None,
    wait: bool = False,
    again: bool = False,
    waited: bool = False,
) -> Steps[Settled]:
    """Write outcomes. `wait`: take locks as they come, for a caller's own transaction. `again`: an earlier
    try may have been committed, so that a row that left no trace by request counts as settled. `waited`: this is
    the second try for rows that somebody changed while the first waited for them."""
    by_key, moves, returns, refused = _grouped(d, outcomes)
    failed = _failed_each(moves)
    locked: list[Outcome] = []
    missing: list[Key] = []
    for c, keys in moves.items():
        missing += yield from _move(d, c, keys, now, wait)
    for rows in failed:
        missing += yield from _move_each(d, rows, now, wait)
    for rows in returns.values():
        missing += yield from _requeue(d, rows, now, wait)
    if not missing:
        return Settled(refused, locked)
    live, archived = yield from _look(d, missing)
    for key in missing:
        outcome = by_key[key]
        c = change(outcome)
        id_, own_token = key
        token, state = live.get(id_, (None, None))
        if token == own_token:
            if state == "PROCESSING" and not waited:
                locked.append(outcome)
            elif state != c.state:
                refused.append(outcome.receipt)
        elif archived.get(key) == c.state:
            continue  # an earlier try of this very settle did it
        elif not (again and not c.keep and state is None):
            refused.append(outcome.receipt)
    if wait and locked:
        # Lengthened by a heartbeat while we waited for it. The lock on what it is now is ours.
        settled = yield from settle(d, locked, now=now, wait=True, again=again, waited=True)
        return Settled(refused + settled.refused, [])
    return Settled(refused, locked)


Moves = dict[Change, list[Key]]
Returns = dict[tuple[int, int], list[tuple[Key, Change]]]
"""By what they add to attempts and deliveries, from which their state follows."""


def _grouped(d: Dialect, outcomes: Sequence[Outcome]) -> tuple[dict[Key, Outcome], Moves, Returns, list[Receipt]]:
    """Outcomes by their receipts, of which the first counts, what one statement can write together, and receipts
    that nobody was ever given."""
    by_key: dict[Key, Outcome] = {}
    moves: Moves = {}
    returns: Returns = {}
    last: Change | None = None
    group: list[Key] = []
    unknown: list[Receipt] = []
    id_in = d.id_in
    for outcome in outcomes:
        receipt = outcome.receipt
        key = (id_in(receipt.id), receipt.token)
        if key in by_key:
            continue
        by_key[key] = outcome
        if not _LEAST <= receipt.token <= _MOST:
            unknown.append(receipt)
            continue
        c = change(outcome)
        if c is last:
            group.append(key)
        elif c.state in SETTLED:
            last, group = c, moves.setdefault(c, [])
            group.append(key)
        else:
            returns.setdefault((c.attempts, c.deliveries), []).append((key, c))
    return by_key, moves, returns, unknown


def _failed_each(moves: Moves) -> list[list[tuple[Key, Change]]]:
    """Take out what goes to the archive in the same way but for its reason and error, which one statement writes."""
    alike: dict[int, list[Change]] = {}
    for c in moves:
        if c.state is State.FAILED and c.keep:
            alike.setdefault(c.attempts, []).append(c)
    return [[(key, c) for c in group for key in moves.pop(c)] for group in alike.values() if len(group) > 1]


def extend(d: Dialect, receipts: Sequence[Receipt], lease: int, *, now: int | None) -> Steps[list[Receipt]]:
    """Lengthen leases; returns the stale receipts. A row that is locked is being settled: it is not stale."""
    by_key = {(d.id_in(r.id), r.token): r for r in receipts if _LEAST <= r.token <= _MOST}
    stale = [r for r in receipts if not _LEAST <= r.token <= _MOST]
    keys = list(by_key)
    if not keys:
        return stale
    if d.fused:
        rows = yield Query(d.sql(d.fused.extend), {**_pairs(keys), "lease": lease, "now": now})
        missing = _not_in(rows, keys)
    else:
        ours, missing = yield from _lock(d, keys, wait=False)
        if ours:
            yield Query(d.sql(sql.EXTEND), {"ids": [id_ for id_, _ in ours], "lease": lease, "now": now})
    if missing:
        live, _ = yield from _look(d, missing)
        stale += [by_key[id_, token] for id_, token in missing if live.get(id_) != (token, "PROCESSING")]
    return stale


def _move(d: Dialect, c: Change, keys: list[Key], now: int | None, wait: bool) -> Steps[list[Key]]:
    """Into the archive, or away; returns those that may not have been moved."""
    kept = {"attempts": c.attempts, "state": c.state.value, "reason": c.reason, "error": c.error, "now": now}
    if d.fused:
        text = d.fused.move(keep=c.keep, wait=wait)
        rows = yield Query(d.sql(text), {**_pairs(keys), **(kept if c.keep else {})})
        return _not_in(rows, keys)
    if d.sole_writer and c.keep and len({token for _, token in keys}) == 1:
        held = {"ids": [id_ for id_, _ in keys], "token": keys[0][1]}
        yield Query(d.sql(sql.KEEP_HELD), {**held, **kept})
        yield Query(d.sql(sql.REMOVE_HELD), held)
        ((removed,),) = yield Query(d.sql(sql.CHANGES), {})
        # Which ones, if not all, the look that follows tells by their token in the archive.
        return [] if removed == len(keys) else keys
    ours, missing = yield from _lock(d, keys, wait)
    if ours:
        ids = [id_ for id_, _ in ours]
        if c.keep:
            yield Query(d.sql(sql.KEEP), {"ids": ids, **kept})
        yield Query(d.sql(sql.REMOVE), {"ids": ids})
    return missing


def _move_each(d: Dialect, rows: list[tuple[Key, Change]], now: int | None, wait: bool) -> Steps[list[Key]]:
    """Into the archive, each with its own reason and error; returns those that may not have been moved."""
    c = rows[0][1]
    keys = [key for key, _ in rows]
    params = {"attempts": c.attempts, "state": c.state.value, "now": now}
    if d.fused:
        each = {"reasons": [c.reason for _, c in rows], "errors": [c.error for _, c in rows]}
        done = yield Query(d.sql(d.fused.move_each[wait]), {**_pairs(keys), **params, **each})
        return _not_in(done, keys)
    ours, missing = yield from _lock(d, keys, wait)
    if ours:
        gone = set(missing)
        yield d.keep_each(params, [(key[0], c.reason, c.error) for key, c in rows if key not in gone])
        yield Query(d.sql(sql.REMOVE), {"ids": [id_ for id_, _ in ours]})
    return missing


def _requeue(d: Dialect, rows: list[tuple[Key, Change]], now: int | None, wait: bool) -> Steps[list[Key]]:
    """Back to waiting; returns those that may not have been."""
    c = rows[0][1]
    keys = [key for key, _ in rows]
    params = {"state": c.state.value, "attempts": c.attempts, "deliveries": c.deliveries, "now": now}
    if d.fused:
        each = {"delays": [c.delay_us for _, c in rows], "errors": [c.error for _, c in rows]}
        done = yield Query(d.sql(d.fused.requeue(wait=wait)), {**_pairs(keys), **params, **each})
        return _not_in(done, keys)
    ours, missing = yield from _lock(d, keys, wait)
    if ours:
        gone = set(missing)
        yield d.requeue(params, [(key[0], c.delay_us, c.error) for key, c in rows if key not in gone])
    return missing


def _lock(d: Dialect, keys: Sequence[Key], wait: bool) -> Steps[tuple[list[Key], list[Key]]]:
    """Lock the rows that receipts still own; returns those, and the others. The locks make this check hold."""
    ids = [id_ for id_, _ in keys]
    rows = yield Query(d.sql(sql.WAIT_CLAIMED if wait else sql.LOCK_CLAIMED), {"ids": ids})
    held = {(bytes(id_), token) for id_, token in rows}
    ours = [key for key in keys if key in held]
    return ours, [key for key in keys if key not in held] if len(ours) < len(keys) else []


def _look(d: Dialect, keys: Sequence[Key]) -> Steps[tuple[dict[Any, tuple[int | None, str]], dict[Key, str]]]:
    ids = {"ids": [id_ for id_, _ in keys]}
    live: Rows = yield Query(d.sql(sql.LOOK_LIVE), ids)
    archived: Rows = yield Query(d.sql(sql.LOOK_ARCHIVED), ids)
    return (
        {d.id_in(d.id_out(id_)): (token, state) for id_, token, state in live},
        {(d.id_in(d.id_out(id_)), token): state for id_, token, state in archived},
    )


def _not_in(answer: Rows, keys: Sequence[Key]) -> list[Key]:
    """Which receipts a fused statement left out. It names those it wrote ("id token") only if they were not all."""
    count, written = answer[0]
    if count == len(keys):
        return []
    names = set(written or ())
    return [key for key in keys if f"{key[0]} {key[1]}" not in names]


def _pairs(keys: Sequence[Key]) -> dict[str, Any]:
    """Mostly all are of one claim: then its token need not travel with each id."""
    ids = [id_ for id_, _ in keys]
    tokens = [token for _, token in keys]
    one = tokens[0]
    return {"ids": ids, "tokens": [] if tokens.count(one) == len(tokens) else tokens, "token": one}
