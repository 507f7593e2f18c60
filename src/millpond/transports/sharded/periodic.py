"""Periodic messages over shards: the name is the key of the messages, and the shard of that key owns the schedule."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from millpond.errors import ShardMapChanged, ShardMapMismatch, ShardUnavailable
from millpond.schedule import Missed, Periodic, PeriodicRow
from millpond.seam.periodic import PeriodicMessages
from millpond.transports.database.store import DatabaseStore
from millpond.transports.sharded.members import Members
from millpond.transports.sharded.shard import ANSWER_WITHIN

T = TypeVar("T")
log = logging.getLogger("millpond.periodic")


class ShardedPeriodic:
    """The periodic room."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._declared: set[str] = set()
        """Names that this process declared: their shards are asked, also if they are not attended."""
        self._undeclared: dict[str, Periodic] = {}
        """Declarations for shards that were away."""

    async def declare(self, periodics: Sequence[Periodic]) -> None:
        """Declare each on its shard. For a shard that is away this is done when it is back, by `publish_due`."""
        self._declared.update(periodic.name for periodic in periodics)
        for periodic in periodics:
            self._undeclared[periodic.name] = periodic
        for name, periodic in list(self._undeclared.items()):
            is_new = periodic in periodics
            try:
                await self._declare(periodic, within=None if is_new else 0.0)
            except (ShardUnavailable, ShardMapChanged, ShardMapMismatch) as e:
                if is_new and isinstance(e, ShardMapMismatch):
                    raise
                if is_new:
                    log.warning("periodic message %r is declared later: %s", name, e)
                continue
            if self._undeclared.get(name) is periodic:
                del self._undeclared[name]

    async def _declare(self, periodic: Periodic, *, within: float | None) -> None:
        await self._on_owner(periodic.name, lambda store: store.periodic.declare([periodic]), within=within)

    async def all(self) -> list[PeriodicRow]:
        parts = await self._members.ask(lambda store: store.periodic.all())
        return sorted((row for part in parts for row in part), key=lambda row: row.periodic.name)

    async def change(
        self,
        name: str,
        *,
        schedule: str | None = None,
        timezone: str | None = None,
        missed: Missed | None = None,
        queue: str | None = None,
        paused: bool | None = None,
    ) -> bool:
        return await self._on_owner(
            name,
            lambda store: store.periodic.change(
                name, schedule=schedule, timezone=timezone, missed=missed, queue=queue, paused=paused
            ),
        )

    async def remove(self, name: str) -> bool:
        return await self._on_owner(name, lambda store: store.periodic.remove(name))

    async def publish_due(self) -> float | None:
        if self._undeclared:
            await self.declare([])
        # The shard's own map decides about its schedules: this handle may have an old one.
        owners = {self._members.map.place(name, b"") for name in self._declared}
        shards = [*self._members.attended, *(self._members[name] for name in owners if name in self._members)]
        if not shards:
            return None
        waits = await self._members.ask(lambda store: store.periodic.publish_due(), shards=list(dict.fromkeys(shards)))
        return min((wait for wait in waits if wait is not None), default=None)

    async def _on_owner(
        self, name: str, work: Callable[[DatabaseStore], Awaitable[T]], *, within: float | None = None
    ) -> T:
        """Call the shard that owns the schedule. `within`: seconds to wait for the end of a change of the map."""
        members = self._members

        async def call() -> T:
            return await members[members.map.place(name, b"")].call(work, within=ANSWER_WITHIN)

        return await members.follow(call, within=within)


_room: Callable[[Members], PeriodicMessages] = ShardedPeriodic
