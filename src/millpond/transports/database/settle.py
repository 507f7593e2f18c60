"""Settle and extend, as steps: every write is fenced by its receipt, and never waits for a locked row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from millpond.message import SETTLED, Receipt
from millpond.outcome import Change, Outcome, change
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Query, Rows, Steps


class Settled(msgspec.Struct, frozen=True):
    """What came of a settle: stale receipts, and outcomes whose row somebody else holds at the moment."""

    refused: list[Receipt]
    locked: list[Outcome]


def settle(
    d: Dialect, outcomes: Sequence[Outcome], *, now: int | None, wait: bool = False, again: bool = False
) -> Steps[Settled]:
    """Write outcomes. `wait`: take locks as they come, for a caller's own transaction. `again`: an earlier
    try may have been committed, so that a row that left no trace by request counts as settled."""
    by_receipt: dict[Receipt, tuple[Outcome, Change]] = {}
    for outcome in outcomes:
        by_receipt.setdefault(outcome.receipt, (outcome, change(outcome)))
    moves: dict[Change, list[Receipt]] = {}
    returns: dict[tuple[str, int, int], list[tuple[Receipt, Change]]] = {}
    for receipt, (_, c) in by_receipt.items():
        if c.state in SETTLED:
            moves.setdefault(c, []).append(receipt)
        else:
            returns.setdefault((c.state, c.attempts, c.deliveries), []).append((receipt, c))
    missing: list[Receipt] = []
    for c, receipts in moves.items():
        missing += yield from _move(d, c, receipts, now, wait)
    for rows in returns.values():
        missing += yield from _requeue(d, rows, now, wait)
    if not missing:
        return Settled([], [])
    refused, locked = [], []
    live, archived = yield from _look(d, missing)
    for receipt in missing:
        outcome, c = by_receipt[receipt]
        token, state = live.get(receipt.id, (None, None))
        if token == receipt.token:
            if state == "PROCESSING" and not wait:
                locked.append(outcome)
            elif state != c.state:
                refused.append(receipt)
        elif archived.get((receipt.id, receipt.token)) == c.state:
            continue  # an earlier try of this very settle did it
        elif not (again and not c.keep and state is None):
            refused.append(receipt)
    return Settled(refused, locked)


def extend(d: Dialect, receipts: Sequence[Receipt], lease: int, *, now: int | None) -> Steps[list[Receipt]]:
    """Lengthen leases; returns the stale receipts. A row that is locked is being settled: it is not stale."""
    missing: Iterable[Receipt]
    if d.fused:
        rows = yield Query(d.sql(d.fused.extend), {**_pairs(d, receipts), "lease": lease, "now": now})
        missing = _not_in(rows, receipts)
    else:
        ours = yield from _lock(d, receipts, wait=False)
        if ours:
            ids = [d.id_in(receipt.id) for receipt in ours]
            yield Query(d.sql(sql.EXTEND), {"ids": ids, "lease": lease, "now": now})
        missing = [receipt for receipt in receipts if receipt not in ours]
    if not missing:
        return []
    live, _ = yield from _look(d, list(missing))
    return [r for r in missing if live.get(r.id) != (r.token, "PROCESSING")]


def _move(d: Dialect, c: Change, receipts: list[Receipt], now: int | None, wait: bool) -> Steps[list[Receipt]]:
    """Into the archive, or away; returns the receipts that may not have been moved."""
    params = {"now": now}
    kept = {"attempts": c.attempts, "state": c.state.value, "reason": c.reason, "error": c.error, **params}
    if d.fused:
        text = d.fused.move(keep=c.keep, wait=wait)
        rows = yield Query(d.sql(text), {**_pairs(d, receipts), **(kept if c.keep else {})})
        return _not_in(rows, receipts)
    ours = yield from _lock(d, receipts, wait)
    if ours:
        ids = [d.id_in(receipt.id) for receipt in ours]
        if c.keep:
            yield Query(d.sql(sql.KEEP), {"ids": ids, **kept})
        yield Query(d.sql(sql.REMOVE), {"ids": ids})
    return [receipt for receipt in receipts if receipt not in ours]


def _requeue(d: Dialect, rows: list[tuple[Receipt, Change]], now: int | None, wait: bool) -> Steps[list[Receipt]]:
    """Back to waiting; returns the receipts that may not have been."""
    c = rows[0][1]
    receipts = [receipt for receipt, _ in rows]
    params = {"state": c.state.value, "attempts": c.attempts, "deliveries": c.deliveries, "now": now}
    if d.fused:
        done = yield Query(
            d.sql(d.fused.requeue(wait=wait)),
            {
                **_pairs(d, receipts),
                **params,
                "delays": [c.delay_us for _, c in rows],
                "errors": [c.error for _, c in rows],
            },
        )
        return _not_in(done, receipts)
    ours = yield from _lock(d, receipts, wait)
    if ours:
        values = [(d.id_in(r.id), c.delay_us, c.error) for r, c in rows if r in ours]
        yield d.requeue(params, values)
    return [receipt for receipt in receipts if receipt not in ours]


def _lock(d: Dialect, receipts: Sequence[Receipt], wait: bool) -> Steps[set[Receipt]]:
    """Lock the rows that these receipts still own. The locks make the pairwise check here hold."""
    ids = [d.id_in(receipt.id) for receipt in receipts]
    rows = yield Query(d.sql(sql.WAIT_CLAIMED if wait else sql.LOCK_CLAIMED), {"ids": ids})
    return {Receipt(d.id_out(id_), token) for id_, token in rows}.intersection(receipts)


def _look(
    d: Dialect, receipts: Sequence[Receipt]
) -> Steps[tuple[dict[Any, tuple[int | None, str]], dict[tuple[Any, int], str]]]:
    ids = {"ids": [d.id_in(receipt.id) for receipt in receipts]}
    live: Rows = yield Query(d.sql(sql.LOOK_LIVE), ids)
    archived: Rows = yield Query(d.sql(sql.LOOK_ARCHIVED), ids)
    return (
        {d.id_out(id_): (token, state) for id_, token, state in live},
        {(d.id_out(id_), token): state for id_, token, state in archived},
    )


def _not_in(answer: Rows, receipts: Sequence[Receipt]) -> list[Receipt]:
    """Which receipts a fused statement left out. It names those it wrote ("id token") only if they were not all."""
    count, written = answer[0]
    if count == len(receipts):
        return []
    names = set(written or ())
    return [receipt for receipt in receipts if f"{receipt.id} {receipt.token}" not in names]


def _pairs(d: Dialect, receipts: Sequence[Receipt]) -> dict[str, Any]:
    return {"ids": [d.id_in(r.id) for r in receipts], "tokens": [r.token for r in receipts]}
