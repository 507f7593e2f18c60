"""Fixtures for tests of rooms: a store on each database in turn, emptied before each test; its clock stands still.

A folder of tests imports them into its conftest.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from millpond import ManualClock, Transport
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
    """Handles that share their messages; all are closed at the end."""
    opened: list[Transport] = []

    async def connect(**options: object) -> Transport:
        opened.append(await backend.connect(**{"clock": clock, **options}))
        return opened[-1]

    yield connect
    for store in opened:
        await store.close()


def steps_of(verb: Any, *args: Any, **options: Any) -> Any:
    """The steps of a room's verb, without running them."""
    return verb.__wrapped__(verb.__self__, *args, **options)


@pytest.fixture
async def store(connect: Connect) -> DatabaseStore:
    return await connect()
