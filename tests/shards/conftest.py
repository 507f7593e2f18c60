"""A pond of three SQLite files, and helpers for shards that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Message, transports
from millpond.transports.sharded.store import ShardedStore
from tests import templates
from tests.patience import patient_shards
from tests.shared import empty_databases

NAMES = list(templates.SHARDS)


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Three shards."""
    return templates.shards(tmp_path)


def three_shards(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Three shards on the kind of database that is the parameter."""
    if request.param == "sqlite":
        return templates.shards(tmp_path)
    found = empty_databases(request, request.param, 3)
    asyncio.run(transports.init_shards(found, names=NAMES))
    return found


@pytest.fixture
def patient() -> Iterator[None]:
    """For tests of the messages that a claim returns."""
    with patient_shards():
        yield


@pytest.fixture
async def store(urls: list[str]) -> AsyncIterator[ShardedStore]:
    opened = await millpond.connect(urls)
    assert isinstance(opened, ShardedStore)
    yield opened
    await opened.close()


def keys_of(store: ShardedStore, shard: str, count: int) -> list[str]:
    """Keys that belong to a shard."""
    found = (f"key-{n}" for n in range(10_000))
    return [key for key in found if store.members.map.place(key, b"") == shard][:count]


def message(key: str | None = None, body: bytes = b"x", **more: Any) -> Message:
    return Message(queue="q", payload=body, key=key, **more)
