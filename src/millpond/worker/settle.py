"""The settle loop: gathers outcomes and writes them together; at once when nothing else is going on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from millpond.errors import MillpondError
from millpond.message import Receipt
from millpond.outcome import Outcome
from millpond.transport import Transport

log = logging.getLogger("millpond.worker")

MOST = 5000
"""Outcomes in one settle at most."""


class Settling:
    """Outcomes on their way to the transport. None is forgotten: what cannot be written is tried again."""

    def __init__(
        self,
        transport: Transport,
        *,
        size: int,
        interval: float,
        idle: Callable[[], bool],
        settled: Callable[[Receipt, bool], None],
    ) -> None:
        self._transport = transport
        self._size = size
        self._interval = interval
        self._idle = idle
        self._settled = settled
        self._outcomes: list[Outcome] = []
        self._answers: dict[Receipt, asyncio.Future[bool]] = {}
        self._some = asyncio.Event()
        self._now = asyncio.Event()
        self._stopping = False

    def add(self, outcome: Outcome) -> None:
        """Take an outcome; it is written within a few milliseconds."""
        self._outcomes.append(outcome)
        if not self._some.is_set():
            self._some.set()
        if len(self._outcomes) >= self._size or self._idle():
            self._now.set()

    async def write(self, outcome: Outcome) -> bool:
        """Take an outcome and wait until it is durable; False if its receipt was stale."""
        answer = asyncio.get_running_loop().create_future()
        self._answers[outcome.receipt] = answer
        self.add(outcome)
        self._now.set()
        return bool(await answer)

    async def run(self) -> None:
        """Until stopped, and everything taken is written."""
        while True:
            await self._some.wait()
            if not self._outcomes:
                if self._stopping:
                    return
                self._some.clear()
                continue
            if not (self._now.is_set() or self._stopping):
                try:
                    async with asyncio.timeout(self._interval):
                        await self._now.wait()
                except TimeoutError:
                    pass
            self._now.clear()
            await self._flush()

    def stop(self) -> None:
        self._stopping = True
        self._some.set()
        self._now.set()

    async def _flush(self) -> None:
        batch, self._outcomes = self._outcomes[:MOST], self._outcomes[MOST:]
        try:
            refused = set(await self._transport.settle(batch))
        except MillpondError as e:
            if not e.retryable and len(batch) > 1:
                refused = await self._one_by_one(batch)
            elif e.retryable:
                log.warning("outcomes wait, the store is not available: %s", e)
                self._outcomes = batch + self._outcomes
                await asyncio.sleep(0.5)
                return
            else:
                log.error("the outcome of message %s cannot be written: %s", batch[0].receipt.id, e)
                refused = {batch[0].receipt}
        for outcome in batch:
            receipt = outcome.receipt
            stale = receipt in refused if refused else False
            answer = self._answers.pop(receipt, None) if self._answers else None
            if answer is not None and not answer.done():
                answer.set_result(not stale)
            self._settled(receipt, stale)

    async def _one_by_one(self, batch: list[Outcome]) -> set[Receipt]:
        """A bad outcome never blocks its neighbours."""
        refused: set[Receipt] = set()
        for outcome in batch:
            try:
                refused.update(await self._transport.settle([outcome]))
            except MillpondError as e:
                log.error("the outcome of message %s cannot be written: %s", outcome.receipt.id, e)
                refused.add(outcome.receipt)
        return refused
