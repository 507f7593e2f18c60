"""The settle loop: gathers outcomes and writes them together; at once if the worker is idle.

Outcomes that cannot be written now leave the loop for the side list (`worker/side_list.py`) and delay no other
outcome. So does a batch whose statement takes long: the loop waits for no statement. Messages with an unwritten
outcome count as held, and claims stop when there are many of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from millpond.clock import monotonic
from millpond.message import Receipt
from millpond.outcome import Outcome
from millpond.seam.transport import Transport
from millpond.worker.delivery import Delivery
from millpond.worker.side_list import BatchSettler, OutcomeBatch, SideList

log = logging.getLogger("millpond.worker")

MAX_OUTCOMES = 5000
"""Maximum number of outcomes in one settle."""
_PATIENCE = 0.2
"""Seconds after which the loop leaves a statement to the side list."""
_AFTER_ERROR = 0.1
"""Seconds until the next batch after one that failed while nothing can be written."""

OnSettled = Callable[[Sequence[Delivery], set[Receipt]], None]


class SettleLoop:
    """A buffer of outcomes. `on_settled` is called after each batch, with the stale receipts."""

    def __init__(
        self, transport: Transport, *, size: int, interval: float, is_idle: Callable[[], bool], on_settled: OnSettled
    ) -> None:
        self._size = size
        self._interval = interval
        self._is_idle = is_idle
        self._on_settled = on_settled
        self._deliveries: list[Delivery] = []
        self._outcomes: list[Outcome] = []
        self._since = 0.0
        """Time at which the oldest outcome of the buffer was added."""
        self._answers: dict[Delivery, asyncio.Future[bool]] = {}
        self._not_empty = asyncio.Event()
        self._flush_now = asyncio.Event()
        self._stopping = False
        self._settler = BatchSettler(transport, self._notify)
        self._side_list = SideList(self._settler, on_end=self._not_empty.set)
        self._flushing: OutcomeBatch | None = None
        """The batch that is being written for the first time."""

    def __len__(self) -> int:
        """Number of outcomes that are not written yet."""
        return len(self._outcomes) + len(self._side_list)

    @property
    def waiting_since(self) -> float | None:
        """Monotonic time since which the oldest unwritten outcome waits; None without one."""
        times = [self._since] if self._outcomes else []
        if self._flushing is not None:
            times.append(self._flushing.since)
        return min([*times, *self._side_list.times()], default=None)

    def add(self, delivery: Delivery, outcome: Outcome) -> None:
        """Add an outcome; it is written within a few milliseconds."""
        self._deliveries.append(delivery)
        self._outcomes.append(outcome)
        count = len(self._outcomes)
        if count == 1:
            self._since = monotonic()
            self._not_empty.set()
        if count >= self._size:
            self._flush_now.set()

    def flush_if_idle(self) -> None:
        """Flush now if no handler runs: no further outcome would join the batch."""
        if self._outcomes and self._is_idle():
            self._flush_now.set()

    async def write(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Add an outcome and wait until it is durable; False if its receipt was stale."""
        answer = self._answers[delivery] = asyncio.get_running_loop().create_future()
        self.add(delivery, outcome)
        self._flush_now.set()
        return bool(await answer)

    async def run(self) -> None:
        """Run until stopped and every added outcome is written."""
        try:
            while True:
                self._side_list.check()
                if not self._outcomes:
                    if self._stopping and not self._side_list:
                        return
                    self._not_empty.clear()
                    await self._not_empty.wait()
                    continue
                if not (self._flush_now.is_set() or self._stopping):
                    try:
                        async with asyncio.timeout(self._interval):
                            await self._flush_now.wait()
                    except TimeoutError:
                        pass
                self._flush_now.clear()
                await self._flush()
        finally:
            self._side_list.cancel()
            for answer in self._answers.values():
                answer.cancel()

    def stop(self) -> None:
        self._stopping = True
        self._side_list.hurry()
        self._not_empty.set()
        self._flush_now.set()

    async def _flush(self) -> None:
        batch = OutcomeBatch(self._deliveries[:MAX_OUTCOMES], self._outcomes[:MAX_OUTCOMES], since=self._since)
        del self._deliveries[:MAX_OUTCOMES], self._outcomes[:MAX_OUTCOMES]
        self._since = monotonic()
        self._flushing = batch
        try:
            await self._write(batch)
        finally:
            self._flushing = None

    async def _write(self, batch: OutcomeBatch) -> None:
        writing = asyncio.create_task(self._settler.write(batch))
        try:
            await asyncio.wait([writing], timeout=_PATIENCE)
            if not writing.done() and await self._side_list.take_over(batch, writing):
                return
        except asyncio.CancelledError:
            writing.cancel()
            raise
        writing.result()
        if batch.outcomes:  # their rows are locked, or all failed
            self._side_list.add(batch)
            if self._side_list.is_store_away:
                await asyncio.sleep(_AFTER_ERROR)

    def _notify(self, deliveries: Sequence[Delivery], refused: set[Receipt]) -> None:
        if self._answers:
            for delivery in deliveries:
                answer = self._answers.pop(delivery, None)
                if answer is not None and not answer.done():
                    answer.set_result(delivery.claim.receipt not in refused)
        if deliveries:
            self._on_settled(deliveries, refused)
