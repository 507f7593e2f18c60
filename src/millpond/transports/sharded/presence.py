"""A worker's presence on the shards that it has joined."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millpond.clock import Seconds, monotonic
from millpond.seam.workers import Presence, check_dead_after
from millpond.transports.sharded.members import first_error

_BEAT_GRACE = 0.2
"""Seconds after the first beat of a round from which the next round does not wait for the others."""
_LEAST_LEASE = 1.0
"""Seconds: two beats. A shorter silence is none."""


class _Part:
    """A worker's presence on one shard."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self.beat_at = monotonic()
        """Start of the last beat that succeeded."""
        self.beats = True
        self.lease: float | None = None
        """The shortest lease in seconds of the claims that it holds."""
        self.task: asyncio.Task[bool] | None = None

    async def beat(self) -> bool:
        began = monotonic()
        try:
            self.beats = await self.presence.beat()
        except BaseException:
            self.beats = False
            raise
        if self.beats:
            self.beat_at = began
        return self.beats


class ShardedPresence:
    """A worker's presence on every shard that it has joined. Each beats by itself: none waits for a silent one.

    After a silence other workers may have taken messages of that shard: it is in doubt, and the worker claims nothing
    from it until its own messages there have been checked.
    """

    def __init__(self, dead_after: Seconds) -> None:
        self._parts: dict[str, _Part] = {}
        self.dead_after = check_dead_after(dead_after)
        self.left = False
        self._stopping = False
        self._queues: Sequence[str] | None = None
        self._doubtful: dict[str, int] = {}
        self._silences = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._parting: set[str] = set()
        self._id: int | None = None

    @property
    def id(self) -> int:
        """The worker's id on the shard that it joined first."""
        assert self._id is not None
        return self._id

    def id_on(self, shard: str) -> int | None:
        """The worker's id on a shard, or None if it has not joined it."""
        part = self._parts.get(shard)
        return None if part is None else part.presence.id

    def part_with(self, shard: str) -> None:
        """Leave one shard with the next beat: in the event loop that has its session. No claim may be held there."""
        if shard in self._parts:
            self._parting.add(shard)

    @property
    def doubtful(self) -> dict[str, int]:
        return self._doubtful.copy()

    def trust(self, shard: str, silence: int) -> None:
        if self._doubtful.get(shard) == silence:
            del self._doubtful[shard]

    @property
    def cut_off(self) -> frozenset[str]:
        now = monotonic()
        return frozenset(name for name, part in list(self._parts.items()) if now - part.beat_at > self.dead_after)

    @property
    def joined(self) -> frozenset[str]:
        """Names of the shards on which the worker has a row."""
        return frozenset(self._parts)

    def add(self, shard: str, presence: Presence) -> None:
        if self._stopping:
            presence.announce_stop()
        if self._queues is not None:
            presence.consume(self._queues)
        self._parts[shard] = _Part(presence)
        self._id = presence.id if self._id is None else self._id

    def may_claim(self, shard: str, lease: float) -> bool:
        """Whether claims of this shard are safe. True if the shard is not joined yet: a claim joins it."""
        part = self._parts.get(shard)
        if part is None:
            return True
        part.lease = min(part.lease or lease, lease)
        silence = monotonic() - part.beat_at
        return part.beats and shard not in self._doubtful and silence <= max(_LEAST_LEASE, lease)

    async def beat(self) -> bool:
        """True if a beat reached any shard: the messages of a shard that is away wait for that shard."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # tasks of another loop end there
            self._loop = loop
            for part in list(self._parts.values()):
                part.task = None
        await self._part()
        if not self._parts:
            return True  # many shards, and none has messages: a claim joins the next one that has
        tasks = []
        for name, part in list(self._parts.items()):
            if part.task is None:
                part.task = asyncio.create_task(self._beat(name, part))
            tasks.append(part.task)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if len(done) < len(tasks):
            done, _ = await asyncio.wait(tasks, timeout=_BEAT_GRACE)
        for part in self._parts.values():
            if part.task in done:
                part.task = None
        errors = [error for task in done if (error := task.exception()) is not None]
        if any(task.exception() is None and task.result() for task in done):
            return True
        if errors:
            raise first_error(errors)
        return False

    async def _part(self) -> None:
        for name in list(self._parting):
            part = self._parts[name]
            if part.task is None or part.task.done():
                await part.presence.leave()
                self._parting.discard(name)
                self._doubtful.pop(name, None)
                del self._parts[name]

    def consume(self, queues: Sequence[str]) -> None:
        self._queues = queues
        for part in list(self._parts.values()):
            part.presence.consume(queues)

    async def _beat(self, name: str, part: _Part) -> bool:
        before = part.beat_at
        if not await part.beat():
            return False
        if monotonic() - before > min(self.dead_after, max(_LEAST_LEASE, part.lease or self.dead_after)):
            self._silences += 1
            self._doubtful[name] = self._silences
        return True

    def announce_stop(self) -> None:
        self._stopping = True
        for part in list(self._parts.values()):
            part.presence.announce_stop()

    async def leave(self) -> None:
        self.left = True
        parts = list(self._parts.values())
        tasks = [part.task for part in parts if part.task is not None and self._loop is asyncio.get_running_loop()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        await asyncio.gather(*(part.presence.leave() for part in parts), return_exceptions=True)
