"""A worker's lock proves nothing while its connections break often, and again when one lasts."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.transports.database.workers import presence as presence_module
from tests.triggers import execute

BY_LOCK = "SELECT by_lock FROM millpond_worker"


async def test_the_lock_counts_again_when_the_network_is_good(
    url: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = 0.0
    real = presence_module.monotonic
    monkeypatch.setattr(presence_module, "monotonic", lambda: real() + later)
    presence = await store.workers.join("w")
    assert await presence.beat()
    assert execute(url, BY_LOCK) == [(1,)]
    for _ in range(5):
        await presence._drop()
        assert await presence.beat()
    assert execute(url, BY_LOCK) == [(0,)]
    later = 50
    assert await presence.beat()
    assert execute(url, BY_LOCK) == [(0,)]
    later = 70
    assert await presence.beat()
    assert execute(url, BY_LOCK) == [(1,)]
    assert presence._held is not None
    await presence._drop()
    assert await presence.beat()
    assert execute(url, BY_LOCK) == [(1,)]
