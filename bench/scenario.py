"""A scenario, and a fresh database for it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.databases import Database
from bench.measure import Measurement
from bench.sizes import Sizes

Run = Callable[["Scenario", Database, Sizes], Awaitable[list[Measurement]]]


@dataclass(frozen=True)
class Scenario:
    """One kind of measurement on one database."""

    database: str
    kind: str
    run: Run
    bar: float | None = None
    peers: bool = False
    """Whether it needs other queues, which are then installed."""

    @property
    def name(self) -> str:
        return f"{self.database}-{self.kind}"


@asynccontextmanager
async def fresh(database: Database) -> AsyncIterator[str]:
    url = database.create()
    try:
        yield url
    finally:
        database.drop(url)
