"""A worker of many shards attends a bounded number of them: it has a row, beats, listens and claims only there.

It checks the other shards in turn, with one connection for a moment. A shard where a check finds work takes the place
of one that is idle. If none is idle, it takes the place of the one that was attended longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque

from millpond.clock import monotonic
from millpond.errors import ShardUnavailable
from millpond.transports.database.messages.work_check import WorkFound
from millpond.transports.sharded import members as members_
from millpond.transports.sharded.claims import ShardedClaims
from millpond.transports.sharded.members import Members, briefly
from millpond.transports.sharded.presence import ShardedPresence
from millpond.transports.sharded.shard import Shard

log = logging.getLogger("millpond")

_CHECK_EVERY = 0.25
"""Seconds between two checks of shards that are not attended."""
_CHECK_WITHIN = 5.0
"""Seconds for which a check waits for a shard."""
_MOST_CHECKS = 4
"""Maximum number of checks at once, while they find work."""
_DRAINED = 0.5
"""Seconds without a claimed message after which a shard with due messages may take the place."""
_IDLE = 5.0
"""The same for a shard with claimed messages only, which may be those of a dead worker."""
_TERM = 10.0
"""Seconds for which a shard with messages keeps its place while others wait for one."""


class Attention:
    """Chooses the shards that a worker attends, and holds their number down."""

    def __init__(self, members: Members, claims: ShardedClaims, presence: ShardedPresence) -> None:
        self.queues: set[str] = set()
        """The queues of the worker's claims."""
        self._claims = claims
        self._presence = presence
        self._here = members.claimed
        # Another order in each worker: together they attend more shards than one.
        self._turns = random.sample(members.chosen, len(members.chosen))
        self._here[:] = self._turns[: members_.AT_ONCE]
        self._next = 0
        self._since = dict.fromkeys(self._here, monotonic())
        self._busy: dict[Shard, float] = {}
        """Times of the last claimed messages."""
        self._held: set[Shard] = set()
        """Shards on which the worker may hold messages."""
        self._leaving: dict[Shard, float] = {}
        """Shards that are left when nothing is held there, and the times at which that began."""
        self._wanted: deque[Shard] = deque()
        """Shards that take their places."""
        self._found: asyncio.Event = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def claimed(self, shard: Shard) -> None:
        """Note that messages of this shard were claimed."""
        self._busy[shard] = monotonic()
        self._held.add(shard)

    async def found(self) -> None:
        """Wait until a shard with work was added."""
        self._found.clear()
        await self._found.wait()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        for shard in self._turns:
            shard.attended = False

    async def _run(self) -> None:
        checks = 1
        while True:
            await asyncio.sleep(_CHECK_EVERY)
            try:
                await self._note_settled()
                for shard in list(self._leaving):
                    await self._leave(shard)
                # While there is work elsewhere, more shards are checked.
                found = await asyncio.gather(*(self._check() for _ in range(checks)))
                checks = _MOST_CHECKS if WorkFound.DUE in found else 1
            except Exception as e:
                log.warning("a check of shards failed, tried again later: %s", e)

    async def _check(self) -> WorkFound:
        """Check the next shard that is not attended, and attend it if it has work and there is a place."""
        for _ in self._turns:
            self._next = (self._next + 1) % len(self._turns)
            shard = self._turns[self._next]
            if not shard.attended and shard not in self._wanted and shard.available:
                break
        else:
            return WorkFound.NONE
        try:
            work = await briefly(shard, lambda store: store.check_work(sorted(self.queues)), within=_CHECK_WITHIN)
        except ShardUnavailable:
            return WorkFound.NONE
        if work is WorkFound.NONE:
            return work
        if not shard.attended and self._has_place():
            self._attend(shard)
        elif shard not in self._wanted and self._begin_to_leave(work):
            self._wanted.append(shard)
        return work

    def _has_place(self) -> bool:
        """A shard that does not answer takes no place: it has no connections."""
        living = sum(not shard.breaker.is_open for shard in self._turns if shard.attended)
        return living < members_.AT_ONCE

    def _attend(self, shard: Shard) -> None:
        shard.attended = True
        self._since[shard] = monotonic()
        self._here.append(shard)
        self._found.set()

    async def _note_settled(self) -> None:
        """Find out whether the worker still holds messages of shards that have been idle for a while."""
        now = monotonic()
        for shard in list(self._here):
            if shard in self._held and now - self._busy[shard] > _DRAINED:
                await self._note_if_settled(shard)

    async def _note_if_settled(self, shard: Shard) -> None:
        worker, before = self._presence.id_on(shard.name), self._busy[shard]
        with contextlib.suppress(ShardUnavailable):
            holds = worker is not None and await shard.call(
                lambda store: store.workers.holds(worker), within=_CHECK_WITHIN
            )
            if not holds and self._busy[shard] == before:
                self._held.discard(shard)

    def _begin_to_leave(self, work: WorkFound) -> bool:
        """Choose a shard to leave. It is claimed from no more. Most places stay as they are."""
        if len(self._leaving) >= max(1, members_.AT_ONCE // _MOST_CHECKS):
            return False
        now, enough = monotonic(), _DRAINED if work is WorkFound.DUE else _IDLE
        idle = [shard for shard in self._here if shard not in self._held and now - self._active(shard) > enough]
        if idle:
            shard = min(idle, key=self._active)
        else:
            old = [shard for shard in self._here if now - self._since[shard] > _TERM]
            if work is not WorkFound.DUE or self._leaving or not old:
                return False
            shard = min(old, key=self._since.__getitem__)
        self._here.remove(shard)
        self._leaving[shard] = now
        return True

    def _active(self, shard: Shard) -> float:
        return max(self._since[shard], self._busy.get(shard, 0.0))

    async def _leave(self, shard: Shard) -> None:
        """Leave a shard when the worker holds nothing there. One with long handlers gets its place back."""
        if shard.name not in self._claims.under_way(list(self.queues)):
            if shard in self._held:
                await self._note_if_settled(shard)
            if shard not in self._held:
                self._presence.part_with(shard.name)
                if self._presence.id_on(shard.name) is None:
                    del self._leaving[shard]
                    shard.attended = False
                    await shard.rest()
                    self._attend(self._wanted.popleft())
                return
        if monotonic() - self._leaving[shard] > _TERM:
            del self._leaving[shard]
            self._since[shard] = monotonic()
            self._here.append(shard)
            self._wanted.pop()
