"""The lag of streams: known from the messages that each holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import millpond
from millpond import Message, Transport
from millpond.control import Control, lag


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Transport]:
    store = await millpond.connect(f"sqlite:///{tmp_path}/q.db", migrate=True)
    yield store
    await store.close()


async def held(store: Transport, name: str, queues: list[str], number: int) -> None:
    epoch, acked = await store.streams.open(name)
    assert await store.streams.claim(name, epoch, acked + 1, queues, number) is not None


async def test_due_messages_of_its_queues_wait_behind_a_stream(store: Transport) -> None:
    await store.publish([Message(queue="orders", payload=b"1") for _ in range(5)])
    await held(store, "audit", ["orders"], 2)
    await store.publish([Message(queue="orders", payload=b"1", delay=3600), Message(queue="other", payload=b"1")])
    (view,) = await Control(store).stream_views()
    assert (view.status.name, view.status.held, view.queues) == ("audit", 2, ("orders",))
    assert (view.waiting, view.complete) == (3, True)  # neither the later one nor that of another queue
    assert view.behind is not None and view.behind >= 0


async def test_a_stream_without_a_claim_has_an_unknown_lag(store: Transport) -> None:
    await store.streams.open("idle")
    (view,) = await Control(store).stream_views()
    assert (view.queues, view.waiting, view.behind, view.complete) == ((), None, None, True)


async def test_nothing_behind_is_zero(store: Transport) -> None:
    await store.publish([Message(queue="orders", payload=b"1")])
    await held(store, "audit", ["orders"], 5)
    (view,) = await Control(store).stream_views()
    assert (view.waiting, view.behind) == (0, None)


async def test_the_count_ends_at_a_limit(store: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "MOST_COUNTED", 3)
    await store.publish([Message(queue="orders", payload=b"1") for _ in range(6)])
    await held(store, "audit", ["orders"], 1)
    (view,) = await Control(store).stream_views()
    assert (view.waiting, view.complete) == (3, False)


async def test_a_stream_that_is_released_meanwhile_is_listed(store: Transport) -> None:
    await store.publish([Message(queue="orders", payload=b"1")])
    await held(store, "audit", ["orders"], 1)
    before = await store.streams.status()
    await store.streams.release("audit")

    class Late:
        """Has read the list before the release."""

        def __getattr__(self, name: str) -> object:
            return getattr(store.streams, name)

        async def status(self) -> object:
            return before

    (view,) = await lag.with_lag(Late(), store.operations)  # type: ignore[arg-type]
    assert (view.status.name, view.waiting) == ("audit", None)
