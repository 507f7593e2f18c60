"""Messages that were claimed for no worker go back, uncounted; on a shard that is away when it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from millpond.errors import Closed
from millpond.loop import Backoff
from millpond.message import Claim
from millpond.outcome import GiveBack
from millpond.transports.sharded.shard import Shard

log = logging.getLogger("millpond")

_LAST = 5.0
"""Seconds to give messages back when the pond is closed. A reaper gives back those of a shard that does not answer."""


class GiveBackLater:
    """A task for each shard with such messages."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._owed: dict[str, list[GiveBack]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._owed.setdefault(str(claim.receipt.shard), []).append(GiveBack(claim.receipt))
        for shard in self._shards:
            if self._owed.get(shard.name) and shard.name not in self._tasks:
                self._tasks[shard.name] = asyncio.create_task(self._pay(shard))

    async def _pay(self, shard: Shard) -> None:
        name, pauses = shard.name, Backoff(0.5, 5.0)
        try:
            while back := self._owed.get(name):
                some = list(back)
                try:
                    await _settle(shard, some)
                except Closed:
                    return
                except Exception as e:
                    log.warning("messages of shard %s go back later: %d (%s)", name, len(some), e)
                    await asyncio.sleep(pauses.next())
                    continue
                del back[: len(some)]
        finally:
            self._tasks.pop(name, None)

    async def finished(self, within: float) -> None:
        """Wait until all messages are back, for a limited time."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=within)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        await self.finished(_LAST)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)


async def _settle(shard: Shard, back: list[GiveBack]) -> None:
    await shard.call(lambda store: store.settle(back), watched=True)
