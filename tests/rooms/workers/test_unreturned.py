"""Claims that a blocked event loop does not return: the heartbeat's thread gives their messages back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millpond import Ack, ManualClock, Message, State
from millpond.transports.database.workers import unreturned_claims
from tests.rooms.workers.conftest import Connect
from tests.triggers import failing


async def begin(store: Any, returned: asyncio.Event, *, count: int = 3) -> asyncio.Task[Any]:
    """A claim whose reply has come, in an event loop that does not return it."""
    await store.publish([Message(queue="q", payload=b"x") for _ in range(count)])
    run, answered = store._run_claim, asyncio.Event()

    async def blocked(*args: Any, **options: Any) -> Any:
        claims = await run(*args, **options)
        answered.set()
        await returned.wait()
        return claims

    store._run_claim = blocked
    claim = asyncio.create_task(store.claim(["q"], count, 5, by_worker=True))
    await answered.wait()
    store._run_claim = run
    return claim


async def pending(store: Any) -> int:
    (stats,) = await store.operations.count(["q"])
    return int(stats.counts[State.PENDING])


async def test_an_overdue_claim_goes_back_and_is_not_returned(
    store: Any, connect: Connect, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    presence, returned = await store.workers.join(), asyncio.Event()
    claim = await begin(store, returned)
    other = await connect()
    assert await presence.beat() and await pending(other) == 0, "it may still return"
    monkeypatch.setattr(unreturned_claims, "monotonic", lambda: 1e12)
    assert await presence.beat() and await pending(other) == 3
    others = await other.claim(["q"], 9)
    assert [c.deliveries for c in others] == [1, 1, 1], "a claim that never returned counts no delivery"
    returned.set()
    assert await claim == []
    assert await other.settle([Ack(c.receipt) for c in others]) == []


async def test_a_claim_that_returned_stays(store: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    presence, returned = await store.workers.join(), asyncio.Event()
    claim = await begin(store, returned)
    returned.set()
    claims = await claim
    monkeypatch.setattr(unreturned_claims, "monotonic", lambda: 1e12)
    assert await presence.beat() and await pending(await connect()) == 0
    assert await store.settle([Ack(c.receipt) for c in claims]) == []


async def test_a_message_that_cannot_go_back_stops_no_beat(
    url: str, store: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    presence, returned = await store.workers.join(), asyncio.Event()
    claim = await begin(store, returned)
    monkeypatch.setattr(unreturned_claims, "monotonic", lambda: 1e12)
    other = await connect()
    with failing(url, "UPDATE", "millpond_message"):
        assert await presence.beat() and await pending(other) == 0
    returned.set()
    assert await claim == []
    await store.workers.reap()
    assert await pending(other) == 3
