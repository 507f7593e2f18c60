"""Fixtures for what only databases do: a store on each in turn, emptied before each test, its clock standing still.

A folder of tests has them by importing them into its conftest.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from millpond import ManualClock, Store
from millpond.transports.database.store import DatabaseStore
from tests.conformance.backends import BACKENDS, DATABASES, Backend

Connect = Callable[..., Awaitable[DatabaseStore]]


@pytest.fixture(scope="session", params=DATABASES)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from BACKENDS[request.param](request)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def connect(backend: Backend, clock: ManualClock) -> AsyncIterator[Connect]:
    backend.empty()
    async with handles(backend, clock) as connect:
        yield connect


@contextlib.asynccontextmanager
async def handles(backend: Backend, clock: ManualClock) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Handles that share their messages; all are closed in the end."""
    opened: list[Store] = []

    async def connect(**options: object) -> Store:
        opened.append(await backend.connect(**{"clock": clock, **options}))
        return opened[-1]

    yield connect
    for store in opened:
        await store.close()


@pytest.fixture
async def store(connect: Connect) -> DatabaseStore:
    return await connect()
