"""A store on each database in turn, with a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

import millpond
from millpond import ManualClock, Store
from tests.shared import SharedDatabase

DATABASES = ["sqlite", "postgres", "mariadb"]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    shared: SharedDatabase = request.getfixturevalue(f"shared_{request.param}")
    shared.empty()
    return shared.url


@pytest.fixture
async def connect(clock: ManualClock) -> AsyncIterator[Callable[..., object]]:
    """Open stores that are closed with the test."""
    opened = []

    async def connect(url: str, **options: object) -> Store:
        store = await millpond.connect(url, **{"migrate": True, "clock": clock, **options})
        opened.append(store)
        return store  # type: ignore[return-value]

    yield connect
    for store in opened:
        await store.close()


@pytest.fixture
async def store(url: str, connect: Callable[..., object]) -> Store:
    return await connect(url)  # type: ignore[misc, no-any-return]
