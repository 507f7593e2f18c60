"""Stores on each database, with a clock that tests move."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import millpond
from millpond import ManualClock
from millpond.clock import SECOND
from tests.shared import KINDS, empty_database

Connect = Callable[..., Awaitable[Any]]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


class SteppedClock(ManualClock):
    """A database clock that may also be set back."""

    def step(self, hours: int) -> None:
        self._now += hours * 3600 * SECOND


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock(NOON)


@pytest.fixture
async def connect(url: str, clock: SteppedClock) -> AsyncIterator[Connect]:
    """Handles that share their messages; all are closed at the end."""
    opened: list[Any] = []

    async def connect(**options: Any) -> Any:
        opened.append(await millpond.connect(url, **{"migrate": True, "clock": clock, **options}))
        return opened[-1]

    yield connect
    for store in opened:
        await store.close()


@pytest.fixture
async def store(connect: Connect) -> Any:
    return await connect()
