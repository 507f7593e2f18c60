"""The side list: outcomes that could not be written, each batch in its own task: none delays another.

Rows that another transaction has locked are tried again after growing pauses. A batch that fails while other outcomes
can be written is halved until the bad outcomes are alone, after every error. Only an outcome that is alone and whose
data the store refuses is dropped, after a try without its error text. Through every other error outcomes are kept.

While no outcome at all can be written, the store is away: all that failed wait in one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any

from millpond.errors import Closed, DataRefused, InvalidMessage, StoreBusy, StoreUnavailable
from millpond.loop import Backoff
from millpond.message import Receipt
from millpond.outcome import Nack, Outcome, Reject
from millpond.seam.transport import Capability, Transport
from millpond.worker.delivery import Delivery

log = logging.getLogger("millpond.worker")

_AT_ONCE = 3
"""Maximum number of batches of the side list that are written at the same time: each takes a connection."""
_MOST_SAMPLES = 8
"""Maximum number of outcomes of one queue and verb that are tried alone to find out whether the store is away."""
_DROPPED_AFTER = 2
"""Number of failures of an outcome alone before it is tried without its error text, then dropped."""
_LAST_PAUSE = 0.1
"""Longest pause in seconds while the worker stops."""

OnWritten = Callable[[Sequence[Delivery], set[Receipt]], None]


class OutcomeBatch:
    """Outcomes that are written together."""

    __slots__ = ("alone", "deliveries", "error", "outcomes", "since", "textless", "tried", "vain", "written_before")

    def __init__(self, deliveries: list[Delivery], outcomes: list[Outcome], *, since: float) -> None:
        self.deliveries = deliveries
        self.outcomes = outcomes
        self.tried = False
        """An earlier try failed, and may have written some of them."""
        self.since = since
        """Monotonic time at which the oldest of them was added."""
        self.error: Exception | None = None
        """The error of the last try. None: it succeeded, and rows of the remaining outcomes are locked."""
        self.written_before = 0
        """Number of successful settles at the last failure of this batch."""
        self.alone = 0
        """Number of failures of one outcome alone."""
        self.vain = 0
        """Number of probes in which no outcome could be written."""
        self.textless = False

    def part(self, deliveries: list[Delivery], outcomes: list[Outcome]) -> OutcomeBatch:
        part = OutcomeBatch(deliveries, outcomes, since=self.since)
        part.tried, part.error, part.written_before = self.tried, self.error, self.written_before
        return part

    def halves(self) -> tuple[OutcomeBatch, OutcomeBatch]:
        half = len(self.outcomes) // 2
        return (
            self.part(self.deliveries[:half], self.outcomes[:half]),
            self.part(self.deliveries[half:], self.outcomes[half:]),
        )

    def samples(self, number: int) -> list[Outcome]:
        """The first outcomes of each queue and verb: a cause often concerns all of these, and none of the others."""
        counts: Counter[tuple[str, type]] = Counter()
        samples = []
        for delivery, outcome in zip(self.deliveries, self.outcomes, strict=True):
            group = delivery.queue, type(outcome)
            if counts[group] < number:
                counts[group] += 1
                samples.append(outcome)
        return samples

    def take(self, index: int) -> OutcomeBatch:
        """Remove one outcome, and return it as a batch."""
        return self.part([self.deliveries.pop(index)], [self.outcomes.pop(index)])

    def put(self, other: OutcomeBatch) -> None:
        self.deliveries += other.deliveries
        self.outcomes += other.outcomes
        self.since = min(self.since, other.since)

    def keep(self, receipts: set[Receipt]) -> list[Delivery]:
        """Keep the outcomes of these receipts; returns the deliveries of the others."""
        gone = [d for d in self.deliveries if d.claim.receipt not in receipts]
        self.outcomes = [o for o in self.outcomes if o.receipt in receipts]
        self.deliveries = [d for d in self.deliveries if d.claim.receipt in receipts]
        return gone


class BatchSettler:
    """Settles batches, one try each. `on_written` is called with deliveries and the stale receipts among them."""

    def __init__(self, transport: Transport, on_written: OnWritten) -> None:
        self._transport = transport
        self._transactions = Capability.TRANSACTIONS in transport.capabilities
        self._on_written = on_written
        self.written = 0
        """Number of settles that succeeded."""

    async def write(self, batch: OutcomeBatch) -> None:
        """Write outcomes. Those that could not be written stay in the batch, with the error or as locked.

        Only the error of a closed transport is raised: no later try can succeed.
        """
        batch.error = None
        try:
            if self._transactions and any(delivery.decided_in_transaction for delivery in batch.deliveries):
                await self._drop_committed(batch)
            if not batch.outcomes:
                return
            refused = set(await self._transport.settle(batch.outcomes, wait=False, again=batch.tried))
            done, batch.deliveries, batch.outcomes = batch.deliveries, [], []
        except StoreBusy as e:
            if not e.receipts:
                self._record_failure(batch, e)
                return
            refused, done = set(e.refused), batch.keep(set(e.receipts))
            batch.tried = batch.tried or e.again
        except Closed:
            raise
        except Exception as e:
            self._record_failure(batch, e)
            return
        self.written += 1
        self._on_written(done, refused)

    async def works(self, batch: OutcomeBatch) -> bool:
        """Whether other outcomes can be written although this batch failed: a few alone are tried, if need be."""
        before, batch.written_before = batch.written_before, self.written
        return self.written > before or concerns_data(batch.error) or await self._probe(batch)

    async def _probe(self, batch: OutcomeBatch) -> bool:
        """Whether one outcome of a failed batch can be written alone. Tried are a few of each queue and verb."""
        if len(batch.outcomes) < 2:
            return False
        if isinstance(batch.error, StoreUnavailable):  # most likely for all: one is enough
            samples = [batch.outcomes[0]]
        else:
            samples = batch.samples(min(2**batch.vain, _MOST_SAMPLES))
        for outcome in samples:
            one = batch.take(batch.outcomes.index(outcome))
            await self.write(one)
            batch.put(one)  # at the end: the next probe takes others
            if one.error is None:
                return True
        batch.vain += 1
        return False

    def drop(self, batch: OutcomeBatch) -> None:
        """Forget outcomes that can never be written. Their messages come back after a lease."""
        self._on_written(batch.deliveries, {outcome.receipt for outcome in batch.outcomes})
        for delivery in batch.keep(set()):
            delivery._settler.abandon([delivery])

    def _record_failure(self, batch: OutcomeBatch, error: Exception) -> None:
        batch.error, batch.tried = error, True

    async def _drop_committed(self, batch: OutcomeBatch) -> None:
        """Keep the outcomes that are still open: all but those whose own transaction was committed.

        A stale receipt proves the commit. It is found by reading: the message does not change meanwhile.
        """
        decided = [d.claim.receipt for d in batch.deliveries if d.decided_in_transaction]
        gone = set(await self._transport.workers.stale(decided))
        if gone:
            self._on_written(batch.keep({o.receipt for o in batch.outcomes} - gone), set())


class SideList:
    """Batches that are tried again. `on_end` is called when one of them has ended."""

    def __init__(self, settler: BatchSettler, on_end: Callable[[], None]) -> None:
        self._settler = settler
        self._on_end = on_end
        self._tasks: dict[asyncio.Task[None], OutcomeBatch] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._hurry = False
        self._end_pauses = asyncio.Event()
        self._error: BaseException | None = None
        self._away: OutcomeBatch | None = None
        """The batch that takes all others while no outcome can be written. It pauses: it is not being written."""

    def __len__(self) -> int:
        return sum(len(batch.outcomes) for batch in self._tasks.values())

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def times(self) -> Iterator[float]:
        """The time since which each batch waits."""
        return (batch.since for batch in self._tasks.values())

    @property
    def is_store_away(self) -> bool:
        """Whether no outcome was written since a batch failed."""
        return self._away is not None and self._away.written_before == self._settler.written

    def add(self, batch: OutcomeBatch) -> None:
        """Try again after a pause."""
        batch.written_before = self._settler.written
        if batch.error is not None:
            log.warning("outcomes wait: %d (%s)", len(batch.outcomes), batch.error)
            if not concerns_data(batch.error) and self._join(batch):
                return
        self._start(batch, self._persist(batch))

    async def take_over(self, batch: OutcomeBatch, writing: asyncio.Task[None]) -> bool:
        """Wait for the end of a try that takes long, in a separate task. False: it ended before a turn was free."""
        turn = asyncio.create_task(self._turns.acquire())
        try:
            await asyncio.wait([writing, turn], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if writing.done() or not turn.done():
                self._decline(turn)
        if writing.done():
            return False
        self._start(batch, self._finish(batch, writing))
        return True

    def _decline(self, turn: asyncio.Task[Any]) -> None:
        if not turn.cancel():  # it was granted
            self._turns.release()

    def hurry(self) -> None:
        """Make pauses short: the worker stops."""
        self._hurry = True
        self._end_pauses.set()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def check(self) -> None:
        """Raise the error that ended a task."""
        if self._error is not None:
            raise self._error

    def _start(self, batch: OutcomeBatch, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = batch
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            self._error = self._error or task.exception()
        self._on_end()

    async def _finish(self, batch: OutcomeBatch, writing: asyncio.Task[None]) -> None:
        """Wait for the end of a try, which has a turn; then try again if outcomes are left."""
        try:
            await writing
        finally:
            self._turns.release()
        if batch.outcomes:
            self.add(batch)

    async def _persist(self, batch: OutcomeBatch, *, pause: bool = True) -> None:
        """Try to write a batch until nothing of it is left, or its outcomes are in other batches."""
        failed, works, pauses = batch.error is not None, True, _pauses(batch)
        failed_here = False
        while batch.outcomes:
            if pause:
                await self._pause(min(pauses.next(), _longest_pause(batch, works=works)))
            async with self._turns:
                if self._away is batch:
                    self._away = None
                await self._settler.write(batch)
                works = batch.error is None or await self._settler.works(batch)
            if works and batch.error is not None and len(batch.outcomes) > 1:
                for half in batch.halves():
                    self._start(half, self._persist(half, pause=False))
                return
            if batch.error is None and failed_here:  # the cause is gone, perhaps that of others too
                self._end_pauses.set()
                self._end_pauses = asyncio.Event()
            failed_here = batch.error is not None
            pause = batch.error is None or self._check_error(batch, batch.error)
            if not works and self._join(batch):
                return
            if failed != (batch.error is not None):
                failed, pauses = not failed, _pauses(batch)

    def _join(self, batch: OutcomeBatch) -> bool:
        """Add a batch that failed to the one that waits for the store. False: this is the first one."""
        batch.written_before = self._settler.written
        if self._away is not None and self.is_store_away:
            self._away.put(batch)
            return True
        self._away = batch
        return False

    def _check_error(self, batch: OutcomeBatch, error: Exception) -> bool:
        """Log the error. Drop an outcome that is alone and can never be written. False: it is tried again at once."""
        if len(batch.outcomes) > 1:
            log.warning("outcomes wait: %d (%s)", len(batch.outcomes), error)
            return True
        batch.alone += 1
        delivery = batch.deliveries[0]
        fields = {"queue": delivery.queue, "message_id": str(delivery.id)}
        if batch.alone < _DROPPED_AFTER or not concerns_data(error):
            log.warning("the outcome of message %s waits: %s", delivery.id, error, extra=fields)
            return True
        textless = None if batch.textless else _without_text(batch.outcomes[0])
        if textless is not None:
            batch.outcomes, batch.textless = [textless], True
            return False
        log.error(
            "the outcome of message %s cannot be written; it comes back after a lease",
            delivery.id,
            extra=fields,
            exc_info=error,
        )
        self._settler.drop(batch)
        return True

    async def _pause(self, seconds: float) -> None:
        if self._hurry:
            await asyncio.sleep(min(seconds, _LAST_PAUSE))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._end_pauses.wait()


def concerns_data(error: Exception | None) -> bool:
    """Whether an outcome itself is refused, and no later try can succeed."""
    return isinstance(error, DataRefused | InvalidMessage)


def _pauses(batch: OutcomeBatch) -> Backoff:
    # The lock of a heartbeat ends at once, that of another program may last.
    return Backoff(0.02, 1.0) if batch.error is None else Backoff(0.1, 30.0)


def _longest_pause(batch: OutcomeBatch, *, works: bool) -> float:
    """Seconds until the next try at most. `works`: other outcomes can be written, so the fault is in this one."""
    return 30.0 if works and len(batch.outcomes) == 1 else 2.0


def _without_text(outcome: Outcome) -> Outcome | None:
    """The same outcome without its error, its reason in plain characters; None if it has neither."""
    if isinstance(outcome, Nack) and outcome.error is not None:
        return Nack(outcome.receipt, outcome.delay)
    if isinstance(outcome, Reject):
        reason = outcome.reason.encode("ascii", "replace").decode()[:100]
        return Reject(outcome.receipt, reason, keep=outcome.keep, attempted=outcome.attempted)
    return None
