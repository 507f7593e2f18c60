"""The settings of queues, and their retry policies for nacks without a delay, as steps."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millpond.clock import SECOND
from millpond.outcome import Nack, Outcome, retry_or_reject
from millpond.retry import Retry
from millpond.seam.settings import QueueSettings
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.settings import ALL_SETTINGS, SETTINGS_OF, settings_of
from millpond.transports.database.sql.statement import Query, Steps

# A message that this receipt still holds. Its attempts cannot change before it is settled.
_NACKED = """
SELECT id, token, queue, attempts, first_attempt_at, {now} FROM {message} {id_index}
WHERE id {ids} AND state = 'PROCESSING'
"""


def read_settings(d: Dialect, queues: Sequence[str] | None) -> Steps[dict[str, QueueSettings]]:
    """Settings by the name of the queue."""
    if queues is None:
        rows = yield Query(d.sql(ALL_SETTINGS), {})
    else:
        rows = yield Query(d.sql(SETTINGS_OF), {"queues": list(queues)})
    return {row[0]: settings_of(row) for row in rows}


def by_policy(d: Dialect, outcomes: Sequence[Outcome], now: int | None, *, wait: bool = False) -> Steps[list[Outcome]]:
    """The outcomes, with those nacks that have no delay replaced as the retry policies of their queues decide.

    `wait`: in a caller's transaction, which may wait for locks. In MySQL's REPEATABLE READ a plain read would be as old
    as that transaction, and not find a message that was claimed since.
    """
    open_ = {(d.id_in(o.receipt.id), o.receipt.token): o for o in outcomes if type(o) is Nack and o.delay is None}
    if not open_:
        return list(outcomes)
    settings = yield from read_settings(d, None)
    policies = {name: found.retry for name, found in settings.items() if found.retry is not None}
    if not policies:
        return list(outcomes)
    text = f"{_NACKED} {{lock}}" if wait else _NACKED
    rows = yield Query(d.sql(text), {"ids": [id_ for id_, _ in open_], "now": now})
    decided: dict[int, Outcome] = {}
    for id_, token, queue, attempts, first, at in rows:
        nack, retry = open_.get((d.id_in(d.id_out(id_)), token)), policies.get(queue)
        if nack is not None and retry is not None:
            decided[id(nack)] = _decide(nack, retry, attempts + 1, 0.0 if first is None else (at - first) / SECOND)
    return [decided.get(id(outcome), outcome) for outcome in outcomes]


def _decide(nack: Nack, retry: Retry, attempts: int, elapsed: float) -> Outcome:
    outcome = retry_or_reject(nack.receipt, retry, attempts, elapsed, error=nack.error)
    return msgspec.structs.replace(outcome, traceback=nack.traceback, took=nack.took)
