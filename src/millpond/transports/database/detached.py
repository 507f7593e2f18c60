"""What a store can do without a connection of its own: work on the caller's, and say its tables as SQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from millpond.errors import Unsupported
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.engine import Mode, Session
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.statement import Steps
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url

T = TypeVar("T")


class _NoEngine:
    """A dialect with no database behind it."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        raise Unsupported("this store has no connection of its own: give it yours with within=, or connect(url)")

    async def hold(self, worker: int) -> Session:
        raise Unsupported("this store has no connection of its own: connect(url)")

    async def listen(self, channel: str, heard: Callable[[str | None], None]) -> None:
        """Without a connection there is nothing to hear."""

    async def discard(self, worker: int) -> None: ...

    async def close(self) -> None: ...


def detached(dialect: Dialect, options: StoreOptions, url: Url) -> DatabaseStore:
    """A store for `publish_sync` and `settle_sync`: it needs no event loop, and nobody looks at the schema."""
    return DatabaseStore(_NoEngine(dialect), options, url)
