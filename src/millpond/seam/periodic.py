"""The periodic room: messages that are published at the times of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millpond.schedule import Missed, Periodic, PeriodicRow


class PeriodicMessages(Protocol):
    """Declare, list, change and publish periodic messages."""

    async def declare(self, periodics: Sequence[Periodic]) -> None:
        """Store the declarations of a program. Changes by an operator stay until the declaration changes."""

    async def all(self) -> list[PeriodicRow]:
        """All periodic messages, by name."""

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
        """Change one; False if there is none of this name. A new schedule, or the end of a pause, begins now."""

    async def remove(self, name: str) -> bool:
        """Remove one; False if there is none of this name. A program that declares it stores it again."""

    async def publish_due(self) -> float | None:
        """Publish all that is due; returns the seconds until the next time, None if there is none.

        Any number of processes may call this: each time is published once.
        """
