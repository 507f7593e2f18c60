"""A message whose change the database refuses: a user's trigger here. Its neighbours come back without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millpond import ManualClock, Message, State
from millpond.transports.database.messages import refused_rows
from tests.rooms.workers.conftest import Connect, SteppedClock
from tests.rooms.workers.test_held import LEASE, held
from tests.rooms.workers.test_no_row_no_beat import DOUBTED
from tests.triggers import execute, failing, id_literal


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused message is tried again with the next call."""
    monkeypatch.setattr(refused_rows, "_FIRST_PAUSE", 0.0)


@contextmanager
def stubborn(url: str, id_: Any) -> Iterator[None]:
    with failing(url, "UPDATE", "millpond_message", f"ROW.id = {id_literal(url, id_)} AND ROW.state = 'PENDING'"):
        yield


async def states(store: Any) -> dict[State, int]:
    (stats,) = await store.operations.count(["q"])
    return {state: number for state, number in stats.counts.items() if number}


async def test_lapsed_messages_come_back(url: str, store: Any, clock: ManualClock) -> None:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(20)])
    claims = await store.claim(["q"], 20, LEASE)
    clock.advance(LEASE)
    with stubborn(url, claims[3].receipt.id):
        assert await store.workers.reap() == 19
        assert await store.workers.reap() == 0
        assert await states(store) == {State.PENDING: 19, State.PROCESSING: 1}
    assert await store.workers.reap() == 1


async def test_an_error_that_concerns_all_is_raised(url: str, store: Any, clock: ManualClock) -> None:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(200)])
    await store.claim(["q"], 200, LEASE)
    clock.advance(LEASE)
    with failing(url, "UPDATE", "millpond_message"):
        for _ in range(2):
            with pytest.raises(Exception, match="no"):
                await store.workers.reap()
    assert await store.workers.reap() == 200


async def test_the_messages_of_a_silent_worker_come_back(
    url: str, store: Any, connect: Connect, clock: ManualClock
) -> None:
    """Those of the other workers too."""
    await store.workers.join()
    claims = await held(store, 20)
    other = await connect()
    await other.workers.join("other")
    await held(other, 5)
    with stubborn(url, claims[3].receipt.id):
        reaper = await connect()
        for seconds in DOUBTED:
            clock.advance(seconds)
            reaped = await reaper.workers.reap()
        assert reaped == 24
        assert await states(store) == {State.PENDING: 24, State.PROCESSING: 1}


async def test_leases_that_are_too_long_are_shortened(url: str, store: Any, clock: SteppedClock) -> None:
    await store.publish([Message(queue="q", payload=b"x") for _ in range(20)])
    claims = await store.claim(["q"], 20, LEASE)
    clock.step(-1)
    with failing(url, "UPDATE", "millpond_message", f"ROW.id = {id_literal(url, claims[3].receipt.id)}"):
        await store.workers.reap()
        clock.advance(LEASE)
        assert await store.workers.reap() == 19


async def test_a_worker_that_leaves_detaches_the_others(url: str, store: Any, clock: ManualClock) -> None:
    presence = await store.workers.join()
    claims = await held(store, 20)
    with failing(url, "UPDATE", "millpond_message", f"ROW.id = {id_literal(url, claims[3].receipt.id)}"):
        await presence.leave()
    assert execute(url, "SELECT count(*) FROM millpond_message WHERE lease_until IS NULL") == [(1,)]
    clock.advance(LEASE)
    assert await store.workers.reap() == 19


async def test_abandoned_messages_go_back(url: str, store: Any, clock: ManualClock) -> None:
    """Lost claims and receipts, after one of another claim that is refused."""
    await store.workers.join()
    first, second, third = await held(store, 5), await held(store, 5), await held(store, 5)
    abandoned = store.workers.abandoned
    abandoned.lose({first[0].receipt.token})
    abandoned.lose({second[0].receipt.token})
    abandoned.leave(claim.receipt for claim in third)
    with failing(
        url,
        "UPDATE",
        "millpond_message",
        f"ROW.id IN ({id_literal(url, first[0].receipt.id)}, {id_literal(url, third[0].receipt.id)})",
    ):
        for _ in range(2):
            await store.workers.reap()
        assert await states(store) == {State.PENDING: 9, State.PROCESSING: 6}
        assert execute(url, "SELECT count(*) FROM millpond_message WHERE lease_until IS NOT NULL") == [(4,)]
