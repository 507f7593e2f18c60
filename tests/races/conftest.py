"""Every race runs on the databases where it can happen."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import millpond
from tests.races.processes import Actors

DATABASES = ("sqlite", "postgres", "mariadb")
SERVERS = ("postgres", "mariadb")
"""Databases in which several transactions write at once; SQLite has one writer at a time."""


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def actors() -> AsyncIterator[Actors]:
    async with Actors() as actors:
        yield actors


@pytest.fixture
async def store(url: str) -> AsyncIterator[millpond.Transport]:
    store = await millpond.connect(url, migrate=True, busy_timeout=40)
    yield store  # type: ignore[misc]
    await store.close()


@pytest.fixture
async def server_store(server_url: str) -> AsyncIterator[millpond.Transport]:
    store = await millpond.connect(server_url, migrate=True, busy_timeout=40)
    yield store  # type: ignore[misc]
    await store.close()
