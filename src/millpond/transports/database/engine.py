"""What a database's driver does for the store: run an operation's steps on a connection of our own."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol, TypeVar

from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Steps

T = TypeVar("T")


class Mode(Enum):
    """What an operation needs of its connection."""

    READ = auto()
    """Only reads; each statement sees what is committed when it begins."""
    WRITE = auto()
    """All or nothing: one transaction."""
    LOOSE = auto()
    """Each step is whole in itself: one transaction, or none where the database fuses steps to statements."""
    ONE = auto()
    """One statement, which is a transaction of its own."""


class Engine(Protocol):
    """Connections of our own. Errors of the driver pass through; the store gives them their meaning."""

    @property
    def dialect(self) -> Dialect: ...

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        """Run the steps on one connection."""

    async def hold(self, worker: int) -> Session:
        """A session for one worker alone, that can hold its lock."""

    async def listen(self, channel: str, heard: Callable[[str | None], None]) -> None:
        """Until cancelled: tell the queues that are announced, and None whenever some may have been missed.

        Returns at once where nothing can be heard; polling finds everything anyway.
        """

    async def discard(self, worker: int) -> None:
        """Remove what the lock of a worker that is no more may have left behind."""

    async def close(self) -> None: ...


class Session(Protocol):
    """What a worker holds as long as it lives; its lock ends with it, whatever the reason."""

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        """Run the steps here, in one transaction."""

    async def close(self) -> None: ...
