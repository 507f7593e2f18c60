"""The fixtures of these tests: every database in turn, its rows gone before each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from millpond import ManualClock
from millpond.transports.database.store import DatabaseStore
from tests.conformance.backends import BACKENDS, DATABASES, Backend

Connect = Callable[..., Awaitable[DatabaseStore]]


@pytest.fixture(scope="session", params=DATABASES)
def database(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from BACKENDS[request.param](request)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def connect(database: Backend, clock: ManualClock) -> AsyncIterator[Connect]:
    database.empty()
    opened: list[Any] = []

    async def connect(**options: object) -> DatabaseStore:
        opened.append(await database.connect(**{"clock": clock, **options}))
        return opened[-1]  # type: ignore[no-any-return]

    yield connect
    for store in opened:
        await store.close()


@pytest.fixture
async def store(connect: Connect) -> DatabaseStore:
    return await connect()
