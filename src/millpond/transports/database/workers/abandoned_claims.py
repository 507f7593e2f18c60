"""Claims of this process that no handler will settle. The worker's row would hold them as long as the worker lives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from uuid import UUID

import msgspec

from millpond.clock import monotonic
from millpond.message import Receipt
from millpond.outcome import GiveBack
from millpond.transports.database.messages.refused_rows import RefusedRows
from millpond.transports.database.messages.settle import detach_leases, stale_receipts, write_outcomes
from millpond.transports.database.options import call_timeout
from millpond.transports.database.runner import Runner
from millpond.transports.database.sql.statement import Steps
from millpond.transports.database.workers.first_error import FirstError
from millpond.transports.database.workers.unreturned_claims import ids_of

_MORE = 10.0
"""Seconds beyond the longest call in which the server may still commit a claim whose reply was lost."""


class LostClaim(msgspec.Struct):
    """A claim that may have been committed, or may be committed yet."""

    until: float
    """Time after which no commit can come."""
    returned: Collection[UUID]
    """Messages of the same token that were returned to the caller."""
    answered: bool = False
    """The database was asked for its messages, and answered."""


class Abandoned:
    """Lost claims, by token, and receipts that could not be settled."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._refused = RefusedRows("messages without a handler that the database refuses to release")
        self._tokens: dict[int, LostClaim] = {}
        self._receipts: list[Receipt] = []

    def lose(self, tokens: Iterable[int], returned: Collection[UUID] = ()) -> None:
        """Claims that may have been committed: their messages that were not `returned` to the caller go back."""
        until = monotonic() + call_timeout(self._runner.options) + _MORE
        self._tokens.update((token, LostClaim(until, returned)) for token in tokens)

    def leave(self, receipts: Iterable[Receipt]) -> None:
        """Messages that must not run, and could not be settled: they get separate leases."""
        self._receipts += receipts

    def clear(self) -> None:
        """The worker has left: its row holds no claim."""
        self._tokens.clear()
        self._receipts.clear()

    async def settle(self, worker: int) -> None:
        errors = FirstError()
        for token, claim in list(self._tokens.items()):
            with errors:
                await self._settle_claim(worker, token, claim)
        if self._receipts:
            with errors:
                await self._refused.write(self._detach_some, list(self._receipts))
        errors.count(0)

    async def _settle_claim(self, worker: int, token: int, claim: LostClaim) -> None:
        began = monotonic()
        ids = await self._runner.read(partial(self._of_token, worker, token, claim.returned))
        if ids:
            await self._refused.write(partial(self._give_back_some, token), ids)
        if not claim.answered:
            # A database that was away for long may commit just after its first answer.
            claim.answered, claim.until = True, max(claim.until, began + _MORE)
        elif began > claim.until and not ids and self._tokens.get(token) is claim:
            del self._tokens[token]

    def _of_token(self, worker: int, token: int, returned: Collection[UUID]) -> Steps[list[UUID]]:
        ids = yield from ids_of(self._runner.dialect, worker, token)
        return list(set(ids).difference(returned))

    async def _give_back_some(self, token: int, ids: Sequence[UUID]) -> None:
        """Some may be locked, and are left for later."""
        runner = self._runner
        outcomes = [GiveBack(Receipt(id_, token)) for id_ in ids]
        await runner.write(
            lambda: write_outcomes(runner.dialect, outcomes, now=runner.now(), notify=runner.options.notify)
        )

    async def _detach_some(self, receipts: Sequence[Receipt]) -> None:
        done = await self._runner.write(partial(self._detach, receipts))
        self._receipts = [receipt for receipt in self._receipts if receipt not in done]

    def _detach(self, receipts: Sequence[Receipt]) -> Steps[set[Receipt]]:
        """Returns those that are detached, or stale."""
        d = self._runner.dialect
        missing = yield from detach_leases(d, receipts, now=self._runner.now(), abandoned=True)
        locked = set(missing).difference((yield from stale_receipts(d, missing)))
        return set(receipts) - locked
