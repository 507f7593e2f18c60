"""Claims that were not returned to the caller yet.

A handler that blocks the event loop keeps a claim from its return, and the worker's row would hold the messages as long
as the worker lives. The heartbeat beats in its own thread: it takes overdue claims and gives their messages back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from uuid import UUID

from millpond.clock import SECOND, monotonic
from millpond.message import Receipt
from millpond.outcome import GiveBack
from millpond.transports.database.messages.settle import write_outcomes
from millpond.transports.database.runner import Runner, Session
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

log = logging.getLogger("millpond")

_OF_TOKEN = """
SELECT id FROM {message} {lease_index}
WHERE state = 'PROCESSING' AND lease_until IS NULL AND worker = :worker AND token = :token
"""
_LEAST = 5.0
"""Seconds in which every claim may return, even if its lease is shorter."""
_AGAIN_FOR = 10.0
"""Seconds in which a claim that was taken is looked for again: the server may commit it late."""


class Unreturned:
    """Open claims of a worker, by token. Both threads may end one; `dict.pop` lets only one of them succeed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._open: dict[int, float] = {}
        """Token -> time from which the claim is overdue."""
        self._taken: dict[int, float] = {}
        """Token of a claim that the heartbeat took -> time until which it gives its messages back."""

    def begin(self, token: int, lease: int) -> None:
        """Open a claim with this lease in microseconds."""
        self._open[token] = monotonic() + max(lease / SECOND, _LEAST)

    def end(self, tokens: Iterable[int]) -> set[int]:
        """Return the tokens that the heartbeat has taken: their messages must not run."""
        return {token for token in tokens if self._open.pop(token, None) is None}

    async def give_back(self, worker: int, session: Session) -> None:
        """Take overdue claims, and give back their messages. The event loop that beats calls it."""
        now = monotonic()
        for token, at in list(self._open.items()):
            if at < now and self._open.pop(token, None) is not None:
                self._taken[token] = now + _AGAIN_FOR
        for token, until in list(self._taken.items()):
            try:
                await session.run(partial(self._give_back, worker, token))
            except Exception as e:  # the beat must go on
                log.warning("messages of a claim that was not returned cannot go back now: %s", e)
            if until < now:
                del self._taken[token]

    def _give_back(self, worker: int, token: int) -> Steps[None]:
        runner = self._runner
        if ids := (yield from ids_of(runner.dialect, worker, token)):
            outcomes = [GiveBack(Receipt(id_, token)) for id_ in ids]
            yield from write_outcomes(runner.dialect, outcomes, now=runner.now(), notify=runner.options.notify)


def ids_of(d: Dialect, worker: int, token: int) -> Steps[list[UUID]]:
    """The messages that a worker's row holds with this token."""
    rows = yield Query(d.sql(_OF_TOKEN), {"worker": worker, "token": token})
    return [d.id_out(row[0]) for row in rows]
