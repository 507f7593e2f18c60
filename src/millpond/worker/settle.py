"""The settle loop: gathers outcomes and writes them together; at once when nothing else is going on.

No outcome is forgotten: while the store is away they wait. One that the store cannot take never blocks its
neighbours. After a decision within a handler's transaction the loop looks before it settles: a stale receipt
says that the transaction was committed, and there is nothing left to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from millpond.errors import Closed, StoreError
from millpond.message import Receipt
from millpond.outcome import Outcome
from millpond.transport import Transport
from millpond.worker.delivery import Delivery

log = logging.getLogger("millpond.worker")

MOST = 5000
"""Outcomes in one settle at most."""
_PAUSE, _LONGEST_PAUSE = 0.1, 2.0

Told = Callable[[Sequence[Delivery], set[Receipt]], None]


class Settling:
    """Outcomes on their way to the transport. `settled` is told of each batch, with the stale receipts."""

    def __init__(
        self, transport: Transport, *, size: int, interval: float, idle: Callable[[], bool], settled: Told
    ) -> None:
        self._transport = transport
        self._size = size
        self._interval = interval
        self._idle = idle
        self._settled = settled
        self._deliveries: list[Delivery] = []
        self._outcomes: list[Outcome] = []
        self._answers: dict[Delivery, asyncio.Future[bool]] = {}
        self._some = asyncio.Event()
        self._now = asyncio.Event()
        self._stopping = False
        self._pause = _PAUSE

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, delivery: Delivery, outcome: Outcome) -> None:
        """Take an outcome; it is written within a few milliseconds."""
        self._deliveries.append(delivery)
        self._outcomes.append(outcome)
        count = len(self._outcomes)
        if count == 1:
            self._some.set()
        if count >= self._size:
            self._now.set()

    def nothing_more(self) -> None:
        """Somebody has nothing to do. If nobody has, outcomes wait for company in vain."""
        if self._outcomes and self._idle():
            self._now.set()

    async def write(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Take an outcome and wait until it is durable; False if its receipt was stale."""
        answer = self._answers[delivery] = asyncio.get_running_loop().create_future()
        self.add(delivery, outcome)
        self._now.set()
        return bool(await answer)

    async def run(self) -> None:
        """Until stopped, and everything taken is written."""
        try:
            while True:
                if not self._outcomes:
                    if self._stopping:
                        return
                    self._some.clear()
                    await self._some.wait()
                    continue
                if not (self._now.is_set() or self._stopping):
                    try:
                        async with asyncio.timeout(self._interval):
                            await self._now.wait()
                    except TimeoutError:
                        pass
                self._now.clear()
                await self._flush()
        finally:
            for answer in self._answers.values():
                answer.cancel()

    def stop(self) -> None:
        self._stopping = True
        self._some.set()
        self._now.set()

    async def _flush(self) -> None:
        deliveries, outcomes = self._deliveries[:MOST], self._outcomes[:MOST]
        del self._deliveries[:MOST], self._outcomes[:MOST]
        if any(delivery.within for delivery in deliveries):
            try:
                deliveries, outcomes = await self._look(deliveries, outcomes)
            except Exception as e:
                await self._later(deliveries, outcomes, e)
                return
        await self._settle(deliveries, outcomes)

    async def _look(self, deliveries: list[Delivery], outcomes: list[Outcome]) -> tuple[list[Delivery], list[Outcome]]:
        """What is still to be settled: all but those whose own transaction was committed."""
        receipts = [delivery.claim.receipt for delivery in deliveries if delivery.within]
        gone = set(await self._transport.extend(receipts))
        done = [d for d in deliveries if d.within and d.claim.receipt in gone]
        self._tell(done, set())
        open_ = [(d, o) for d, o in zip(deliveries, outcomes, strict=True) if d not in done]
        return [d for d, _ in open_], [o for _, o in open_]

    async def _settle(self, deliveries: list[Delivery], outcomes: list[Outcome]) -> None:
        if not outcomes:
            return
        try:
            refused = set(await self._transport.settle(outcomes))
        except Exception as e:
            if _concerns_the_store(e):
                await self._later(deliveries, outcomes, e)
            elif len(outcomes) > 1:  # one of them is bad: find it, and write the others
                half = len(outcomes) // 2
                await self._settle(deliveries[:half], outcomes[:half])
                await self._settle(deliveries[half:], outcomes[half:])
            else:
                log.exception(
                    "the outcome of message %s cannot be written; it comes back when its lease ends",
                    deliveries[0].id,
                    extra={"queue": deliveries[0].queue, "message_id": str(deliveries[0].id)},
                )
                self._tell(deliveries, {outcomes[0].receipt})
        else:
            self._pause = _PAUSE
            self._tell(deliveries, refused)

    async def _later(self, deliveries: list[Delivery], outcomes: list[Outcome], error: Exception) -> None:
        if isinstance(error, Closed):
            raise error
        log.warning("%d outcomes wait: %s", len(outcomes), error)
        self._deliveries[:0], self._outcomes[:0] = deliveries, outcomes
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def _tell(self, deliveries: Sequence[Delivery], refused: set[Receipt]) -> None:
        if self._answers:
            for delivery in deliveries:
                answer = self._answers.pop(delivery, None)
                if answer is not None and not answer.done():
                    answer.set_result(delivery.claim.receipt not in refused)
        if deliveries:
            self._settled(deliveries, refused)


def _concerns_the_store(error: Exception) -> bool:
    """Trouble with the store itself passes, or is mended by somebody; any other is about what was written."""
    return isinstance(error, Closed) or (isinstance(error, StoreError) and type(error) is not StoreError)
