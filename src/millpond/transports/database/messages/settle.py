"""Settle and extend, as steps: every write is fenced by its receipt and does not wait for a locked row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millpond.message import SETTLED, Receipt, State
from millpond.outcome import Change, Nack, Outcome, change
from millpond.transports.database.messages.policies import by_policy
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Rows, Steps
from millpond.transports.database.sql.writes import Key

# The fate of receipts that a settle did not find: still ours (another transaction has locked the row), already settled
# by an earlier try of the same settle, or lost.
_READ_LIVE = "SELECT id, token, state FROM {message} {id_index} WHERE id {ids}"
_READ_ARCHIVED = "SELECT id, token, state FROM {archive} {archive_id_index} WHERE id {ids}"

_LEAST, _MOST = -(2**63), 2**63 - 1
"""The range of a database integer. A token outside it belongs to no claim."""


class SettleResult(msgspec.Struct, frozen=True):
    """Result of a settle: stale receipts, and outcomes whose row another transaction has locked."""

    refused: list[Receipt]
    locked: list[Outcome]


def write_outcomes(
    d: Dialect,
    outcomes: Sequence[Outcome],
    *,
    now: int | None,
    wait: bool = False,
    again: bool = False,
    waited: bool = False,
    notify: bool = False,
) -> Steps[SettleResult]:
    """Write outcomes.

    `wait`: wait for locked rows, for a caller's own transaction. `again`: an earlier try may have been committed, and
    a deleted row that was not to be archived counts as settled. `waited`: second try for rows that changed while the
    first one waited for their locks. `notify`: wake workers that wait for a message that is due again at once or soon.
    """
    outcomes = yield from by_policy(d, outcomes, now, wait=wait)
    by_key, moves, returns, refused = _group(d, outcomes)
    failed = _failed_each(moves)
    locked: list[Outcome] = []
    missing: list[Key] = []
    for c, keys in moves.items():
        missing += yield from d.writes.archive(c, keys, now, wait=wait)
    for rows in failed:
        missing += yield from d.writes.archive_each(rows, now, wait=wait)
    for rows in returns.values():
        missing += yield from d.writes.requeue(rows, now, wait=wait, notify=notify)
    if not missing:
        return SettleResult(refused, locked)
    live, archived = yield from _read_rows(d, missing)
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
        elif archived.get(key) == c.state or (_may_reject(outcome) and archived.get(key) == State.FAILED):
            continue  # settled by an earlier try of the same settle
        elif not (again and not c.keep and state is None):
            refused.append(outcome.receipt)
    if wait and locked:
        # An extend or detach changed them while we waited for the lock. We hold the lock on the new version of the row.
        settled = yield from write_outcomes(d, locked, now=now, wait=True, again=again, waited=True, notify=notify)
        return SettleResult(refused + settled.refused, [])
    return SettleResult(refused, locked)


def _may_reject(outcome: Outcome) -> bool:
    """Whether an earlier try of this nack may have been a reject, because its queue's retries were used up."""
    return type(outcome) is Nack and outcome.delay is None


Moves = dict[Change, list[Key]]
Returns = dict[tuple[int, int, int], list[tuple[Key, Change]]]
"""(added attempts, deliveries and crashes), which determine the state -> receipts and changes."""


def _group(d: Dialect, outcomes: Sequence[Outcome]) -> tuple[dict[Key, Outcome], Moves, Returns, list[Receipt]]:
    """Outcomes by receipt (the first one counts), groups that one statement can write, and receipts of no claim."""
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
            returns.setdefault((c.attempts, c.deliveries, c.crashes), []).append((key, c))
    return by_key, moves, returns, unknown


def _failed_each(moves: Moves) -> list[list[tuple[Key, Change]]]:
    """Remove and return groups that differ only in reason and error: one statement writes each of them."""
    alike: dict[int, list[Change]] = {}
    for c in moves:
        if c.state is State.FAILED and c.keep:
            alike.setdefault(c.attempts, []).append(c)
    return [[(key, c) for c in group for key in moves.pop(c)] for group in alike.values() if len(group) > 1]


def extend_leases(d: Dialect, receipts: Sequence[Receipt], lease: int, *, now: int | None) -> Steps[list[Receipt]]:
    """Extend leases; returns the stale receipts. A locked row is being settled: it is not stale."""
    by_key, stale = _by_key(d, receipts)
    missing = (yield from d.writes.extend(list(by_key), lease, now)) if by_key else []
    return stale + (yield from _stale_of(d, {key: by_key[key] for key in missing}))


def detach_leases(d: Dialect, receipts: Sequence[Receipt], *, now: int | None, abandoned: bool) -> Steps[list[Receipt]]:
    """Give messages of a worker their own leases; returns the receipts that were not written: stale or locked."""
    by_key, stale = _by_key(d, receipts)
    missing = (yield from d.writes.detach(list(by_key), now, abandoned=abandoned)) if by_key else []
    return stale + [by_key[key] for key in missing]


def attach_leases(d: Dialect, receipts: Sequence[Receipt]) -> Steps[list[Receipt]]:
    """Undo `detach_leases`; returns the receipts that were not written: stale or locked."""
    by_key, stale = _by_key(d, receipts)
    missing = (yield from d.writes.attach(list(by_key))) if by_key else []
    return stale + [by_key[key] for key in missing]


def stale_receipts(d: Dialect, receipts: Sequence[Receipt]) -> Steps[list[Receipt]]:
    """The stale receipts among these. Nothing is written or locked."""
    by_key, stale = _by_key(d, receipts)
    return stale + (yield from _stale_of(d, by_key))


def _by_key(d: Dialect, receipts: Sequence[Receipt]) -> tuple[dict[Key, Receipt], list[Receipt]]:
    """Receipts by key, and those whose token belongs to no claim."""
    stale = [r for r in receipts if not _LEAST <= r.token <= _MOST]
    return {(d.id_in(r.id), r.token): r for r in receipts if _LEAST <= r.token <= _MOST}, stale


def _stale_of(d: Dialect, by_key: dict[Key, Receipt]) -> Steps[list[Receipt]]:
    if not by_key:
        return []
    rows: Rows = yield Query(d.sql(_READ_LIVE), {"ids": [id_ for id_, _ in by_key]})
    live = {(d.id_in(d.id_out(id_)), token) for id_, token, state in rows if state == "PROCESSING"}
    return [receipt for key, receipt in by_key.items() if key not in live]


def _read_rows(d: Dialect, keys: Sequence[Key]) -> Steps[tuple[dict[Any, tuple[int | None, str]], dict[Key, str]]]:
    ids = {"ids": [id_ for id_, _ in keys]}
    live: Rows = yield Query(d.sql(_READ_LIVE), ids)
    archived: Rows = yield Query(d.sql(_READ_ARCHIVED), ids)
    return (
        {d.id_in(d.id_out(id_)): (token, state) for id_, token, state in live},
        {(d.id_in(d.id_out(id_)), token): state for id_, token, state in archived},
    )
