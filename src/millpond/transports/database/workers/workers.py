"""The workers room: join as a worker, and give back the claims of lapsed leases and of dead and hung workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from millpond.clock import Seconds, monotonic
from millpond.errors import MillpondError, StoreUnavailable
from millpond.message import Receipt, check_id, short_error
from millpond.seam.workers import DEAD_AFTER, Presence, Step, StepClaim, WorkerStatus
from millpond.transports.database.messages.hints import Hints
from millpond.transports.database.messages.reap import (
    LeaseRows,
    lapsed_ids,
    release_all,
    release_lapsed,
    shorten_leases,
    too_long_ids,
)
from millpond.transports.database.messages.refused_rows import RefusedRows
from millpond.transports.database.messages.settle import attach_leases, detach_leases, stale_receipts
from millpond.transports.database.messages.work_check import holds
from millpond.transports.database.runner import Room, Runner, read, write
from millpond.transports.database.sql.statement import Steps
from millpond.transports.database.workers.abandoned_claims import Abandoned
from millpond.transports.database.workers.cancel import cancel_requests, forget_requests, request_cancel
from millpond.transports.database.workers.dead_workers import Judge
from millpond.transports.database.workers.doubted_workers import Left, reap_doubted
from millpond.transports.database.workers.orphans import add_row, holders_without_row
from millpond.transports.database.workers.presence import WorkerPresence
from millpond.transports.database.workers.status import worker_status
from millpond.transports.database.workers.unreturned_claims import Unreturned
from millpond.transports.database.workers.work_steps import begin_step, check_result, finish_step
from millpond.transports.validation import check_receipts

log = logging.getLogger("millpond")

_REAP_EVERY = 1.0
_REAP_LOOP = 5.0
"""Seconds after a reap in which claims leave it to the loop that called it: there no claim waits for its searches."""
_RARELY = 10.0
"""Seconds between two searches for rare cases: doubted workers, claims without a worker, a clock that was set back."""
_PER_WORKER = 1.0
"""The same for claims without a worker, for each worker: all workers search, and each search reads a row for each."""
_BEAT_AGAIN = 0.02


class DatabaseWorkers(Room):
    def __init__(self, runner: Runner, hints: Hints) -> None:
        super().__init__(runner)
        self._hints = hints
        self._leases = LeaseRows()
        self._refused = RefusedRows("messages that the database refuses to release")
        self._presence: WorkerPresence | None = None
        self._judge: Judge | None = None
        self.abandoned = Abandoned(runner)
        self.unreturned = Unreturned(runner)
        self._next_in_claim = 0.0
        self._requested = True
        self._next_rare = self._next_orphans = 0.0
        self._left: Left = {}

    @property
    def mark(self) -> int | None:
        """The mark of this store's worker, for its claims."""
        return None if self._presence is None else self._presence.mark

    def hold(self, lease: int) -> int:
        """The id of this store's worker, whose row is to hold claims with this lease in microseconds."""
        if self._presence is None or self._presence.left:
            raise MillpondError("claim(by_worker=True) needs a worker: call workers.join() first")
        self._presence.will_hold(lease)
        return self._presence.id

    async def join(
        self, name: str | None = None, *, dead_after: Seconds = DEAD_AFTER, queues: Sequence[str] | None = None
    ) -> Presence:
        self.runner.check_open()
        if self._presence is None or self._presence.left:
            presence = WorkerPresence(self.runner, name, dead_after, queues, unreturned=self.unreturned)
            give_up_at = monotonic() + self.runner.reconnect_for
            try:
                while not await presence.beat():
                    if monotonic() > give_up_at:
                        raise StoreUnavailable(f"no heartbeat reaches {self.runner.url}; join again")
                    await asyncio.sleep(_BEAT_AGAIN)
            except BaseException:
                await presence.leave()
                raise
            self.abandoned.clear()
            self._presence, self._judge = presence, Judge(self.runner, presence, self._refused)
        return self._presence

    @read
    def status(self) -> Steps[list[WorkerStatus]]:
        return worker_status(self.d, self.now)

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        text = short_error(reason) or ""
        chosen = list(dict.fromkeys(map(check_id, ids)))
        return await self._cancel(chosen, text) if chosen else []

    @write
    def _cancel(self, ids: Sequence[UUID], reason: str) -> Steps[list[UUID]]:
        return request_cancel(self.d, ids, reason)

    async def cancel_requests(self) -> dict[Receipt, str]:
        found = await self._cancel_requests()
        if self._requested and not found:
            await self.runner.write(partial(forget_requests, self.d))
        self._requested = bool(found)
        return found

    @read
    def _cancel_requests(self) -> Steps[dict[Receipt, str]]:
        return cancel_requests(self.d)

    async def begin_step(self, receipt: Receipt, step: Step) -> StepClaim:
        check_receipts([receipt])
        return await self._begin_step(receipt, step)

    @write
    def _begin_step(self, receipt: Receipt, step: Step) -> Steps[StepClaim]:
        return begin_step(self.d, receipt, step, self.now)

    async def finish_step(self, receipt: Receipt, step: Step, result: bytes) -> bool:
        check_receipts([receipt])
        check_result(step, result, self.runner.options.body_limit)
        return await self._finish_step(receipt, step, result)

    @write
    def _finish_step(self, receipt: Receipt, step: Step, result: bytes) -> Steps[bool]:
        return finish_step(self.d, receipt, step, result, self.now)

    async def holds(self, worker: int) -> bool:
        """Whether the row of a worker holds claims."""
        return await self.runner.read(partial(holds, self.d, worker))

    async def leave(self) -> None:
        if self._presence is not None:
            await self._presence.leave()

    # --- claims of a worker -------------------------------------------------------------------------

    async def stale(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        check_receipts(receipts)
        return await self.runner.read(partial(stale_receipts, self.d, receipts))

    async def detach(self, receipts: Sequence[Receipt], *, abandoned: bool = False) -> list[Receipt]:
        check_receipts(receipts)
        return await self.runner.loose(partial(detach_leases, self.d, receipts, now=self.now, abandoned=abandoned))

    async def attach(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        check_receipts(receipts)
        return await self.runner.loose(partial(attach_leases, self.d, receipts))

    # --- reap ---------------------------------------------------------------------------------------

    async def reap(self) -> int:
        self.runner.check_open()
        self._next_in_claim = monotonic() + _REAP_LOOP
        rarely = partial(self._reap_rarely, may_wait=True)
        total = await self._all(self._reap_lapsed, self._reap_silent, rarely, self._settle_abandoned)
        if total:
            self._hints.drop_floors()
            self._hints.wake()
        return total

    async def reap_if_due(self, *, may_wait: bool) -> bool:
        """Let a claim that is not full give back lapsed claims, for programs without a worker.

        `may_wait`: the claim has no message yet, whose lease would run while it waits for the beat of a worker.
        """
        if monotonic() < self._next_in_claim and self.now is None:
            return False
        self._next_in_claim = monotonic() + _REAP_EVERY
        if not await self._all(self._reap_lapsed, partial(self._reap_rarely, may_wait=may_wait)):
            return False
        self._hints.drop_floors()
        return True

    async def _all(self, *parts: Callable[[], Awaitable[int]]) -> int:
        """The sum of all parts. An error of one part does not keep the others from their work."""
        total, error = 0, None
        for part in parts:
            try:
                total += await part()
            except Exception as e:
                error = error or e
        if error is not None:
            if not total:
                raise error
            log.warning("reap incomplete: %s", error)
        return total

    async def _reap_silent(self) -> int:
        return 0 if self._judge is None else await self._judge.reap()

    async def _settle_abandoned(self) -> int:
        if self._presence is not None and not self._presence.left:
            await self.abandoned.settle(self._presence.id)
        return 0

    async def _reap_lapsed(self) -> int:
        return (await release_all(self._refused, self._lapsed_ids, self._release_lapsed))[0]

    @read
    def _lapsed_ids(self, limit: int) -> Steps[list[Any]]:
        return lapsed_ids(self.d, self._leases, self.now, limit)

    @write
    def _release_lapsed(self, ids: Sequence[Any]) -> Steps[int]:
        return release_lapsed(self.d, ids, self.now)

    # --- rare cases ---------------------------------------------------------------------------------

    async def _reap_rarely(self, *, may_wait: bool) -> int:
        now, worker = monotonic(), self._presence
        if now < self._next_rare and self.now is None:
            return 0
        first = not self._next_rare
        self._next_rare = now + _RARELY
        await self._shorten_leases()
        if now >= self._next_orphans or self.now is not None:
            await self._add_rows_of_orphans()
        # A worker observes the others by itself, unless it ends too soon for that.
        if not first and worker is not None:
            return 0
        me = 0 if worker is None else worker.id
        total = await reap_doubted(self.runner, self._refused, me, self._left, may_wait=may_wait)
        if self._left:
            self._next_rare = 0.0  # the next reap does this again
        return total

    async def _shorten_leases(self) -> None:
        if ids := await self.runner.read(partial(too_long_ids, self.d, self._leases, self.now)):
            await self._refused.write(self._shorten, ids)

    @write
    def _shorten(self, ids: Sequence[Any]) -> Steps[int]:
        return shorten_leases(self.d, ids, self.now)

    async def _add_rows_of_orphans(self) -> None:
        orphans, known = await self.runner.read(partial(holders_without_row, self.d))
        self._next_orphans = monotonic() + max(_RARELY, known * _PER_WORKER)
        for worker in orphans:
            await self.runner.write(partial(add_row, self.d, worker, self.now))
