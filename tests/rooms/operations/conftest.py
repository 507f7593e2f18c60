"""A store on each database in turn, with a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

import millpond
from millpond import ManualClock, Transport
from tests.shared import KINDS, empty_database


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.fixture
async def connect(clock: ManualClock) -> AsyncIterator[Callable[..., object]]:
    """Connect stores; they are closed after the test."""
    opened = []

    async def connect(url: str, **options: object) -> Transport:
        store = await millpond.connect(url, **{"migrate": True, "clock": clock, **options})
        opened.append(store)
        return store  # type: ignore[return-value]

    yield connect
    for store in opened:
        await store.close()


@pytest.fixture
async def store(url: str, connect: Callable[..., object]) -> Transport:
    return await connect(url)  # type: ignore[misc, no-any-return]
