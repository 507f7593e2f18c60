"""Copy the dedupe rows of a shard to another one: nearly all while the shard accepts publishes, the rest afterwards.

The rest has to be found at once, because no shard accepts the key range meanwhile. Rows are read in the order of their
expiry, so new ones are at the end. A publisher with a shorter window, or a long transaction, puts some before it: there
the database counts the rows, and only a part with another number than was copied is read again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from uuid import UUID

from millpond.transports.database.moves.move_steps import DatabaseMoving

PAGE = 5_000
"""Rows that are read at once; a part with fewer rows is not divided to find the new ones."""
BATCH = 500
"""Rows that are stored in one transaction."""
_LAST = UUID(int=(1 << 128) - 1)


class DedupeCopy:
    """One copy. All rows are copied, for they have no key: none is known to belong to another range."""

    def __init__(
        self, source: DatabaseMoving, target: DatabaseMoving, epoch: int, on_step: Callable[[str], Awaitable[None]]
    ) -> None:
        self._source = source
        self._target = target
        self._epoch = epoch
        self._on_step = on_step
        self._sent = array("q")
        """Expiry times of the copied rows, in their order. Before its expiry a row neither changes nor goes."""

    async def most(self) -> None:
        """Copy the rows while new ones are stored."""
        start = await self._source.clock()
        # Publishers may be faster than the copy: it does not follow them for ever.
        enough = 2 * await self._source.count_dedupe(start, None) + PAGE
        after = (start, _LAST)
        while (rows := await self._source.dedupe_page(*after, None, PAGE)) and len(self._sent) < enough:
            await self._send(rows)
            self._sent.extend(expires for _, _, expires in rows)
            after = (rows[-1][2], rows[-1][0])

    async def rest(self) -> None:
        """Copy the rows that were stored since `most` began. The shard accepts none any more."""
        low = await self._source.clock()
        high = max(low, self._sent[-1]) if self._sent else low
        await self._missed(low, high)
        await self._between(high, None)

    async def _missed(self, low: int, high: int) -> None:
        """Copy rows that expire in (low, high] and came after the copy had passed there."""
        first, stop = bisect_right(self._sent, low), bisect_right(self._sent, high)
        if low >= high or await self._source.count_dedupe(low, high) == stop - first:
            return
        middle = self._sent[(first + stop) // 2] if stop - first > PAGE else high
        if middle == high:
            await self._between(low, high)
        else:
            await self._missed(low, middle)
            await self._missed(middle, high)

    async def _between(self, low: int, high: int | None) -> None:
        after = (low, _LAST)
        while rows := await self._source.dedupe_page(*after, high, PAGE):
            await self._send(rows)
            after = (rows[-1][2], rows[-1][0])

    async def _send(self, rows: list[tuple[UUID, int, int]]) -> None:
        for begin in range(0, len(rows), BATCH):
            await self._on_step("copy dedupe")
            await self._target.keep_dedupe(self._epoch, rows[begin : begin + BATCH])
