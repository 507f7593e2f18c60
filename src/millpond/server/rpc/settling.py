"""Settle outcomes of many calls together: while one batch is written, the next one gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millpond.message import Receipt
from millpond.outcome import Outcome
from millpond.seam.transport import Transport

_MOST = 2000
"""Outcomes of one batch."""
_Waiting = tuple[Sequence[Outcome], "asyncio.Future[set[Receipt]]"]


class Settling:
    """One write at a time; each caller gets its own stale receipts and its own error."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def settle(self, outcomes: Sequence[Outcome]) -> set[Receipt]:
        """Write outcomes; returns the stale receipts."""
        if not outcomes:
            return set()
        future: asyncio.Future[set[Receipt]] = asyncio.get_running_loop().create_future()
        self._waiting.append((outcomes, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="settle")
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch: list[_Waiting] = []
            size = 0
            while self._waiting and (not batch or size + len(self._waiting[0][0]) <= _MOST):
                batch.append(self._waiting.pop(0))
                size += len(batch[-1][0])
            await self._write(batch)

    async def _write(self, batch: list[_Waiting]) -> None:
        try:
            stale = set(await self._transport.settle([outcome for outcomes, _ in batch for outcome in outcomes]))
        except Exception as e:
            if len(batch) == 1:
                _answer(batch[0][1], e)
            else:  # one bad outcome concerns its caller only
                for one in batch:
                    await self._write([one])
            return
        for outcomes, future in batch:
            _answer(future, {outcome.receipt for outcome in outcomes} & stale)


def _answer(future: asyncio.Future[set[Receipt]], result: set[Receipt] | Exception) -> None:
    if future.done():  # the caller left
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
