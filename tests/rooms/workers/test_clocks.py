"""Which clock decides: that of the database, also when it makes a step; never that of a process."""

from __future__ import annotations

import time
from typing import Any

import pytest

import millpond
from millpond import Ack, Message
from tests.rooms.workers.conftest import SteppedClock
from tests.rooms.workers.test_held import LEASE


@pytest.mark.parametrize("hours", [1, -1])
async def test_the_clock_of_a_process_decides_nothing(url: str, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """A process whose clock is wrong publishes, claims and reaps as any other."""
    right, right_ns = time.time, time.time_ns
    store = await millpond.connect(url, migrate=True)
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: right() + hours * 3600)
        wrong.setattr(time, "time_ns", lambda: right_ns() + hours * 3600 * 10**9)
        other: Any = await millpond.connect(url)
        await other.publish([Message(queue="q", payload=b"x", expires=1800) for _ in range(2)])
        (theirs,) = await other.claim(["q"], 1, 600)
        assert await other.workers.reap() == 0
        (later,) = await other.publish([Message(queue="q", payload=b"x", delay=600)])
    (ours,) = await store.claim(["q"], 9, 600)
    for claim in (theirs, ours):
        assert abs(claim.due_us / 1e6 - right()) < 300
    assert await store.settle([Ack(theirs.receipt), Ack(ours.receipt)]) == []
    assert [row.id for row in await store.operations.find([later.id])] == [later.id]
    await other.close()
    await store.close()


async def test_after_a_clock_was_set_forward_own_leases_lapse(store: Any, clock: SteppedClock) -> None:
    await store.publish([Message(queue="q", payload=b"x")])
    (claim,) = await store.claim(["q"], 1, LEASE)
    clock.step(1)
    (again,) = await store.claim(["q"])
    assert (again.receipt.id, again.deliveries) == (claim.receipt.id, 2)


async def test_messages_that_wait_keep_their_due_time(store: Any, clock: SteppedClock) -> None:
    await store.publish([Message(queue="q", payload=b"x")])
    clock.step(-1)
    assert await store.claim(["q"]) == []
    clock.advance(3599)
    assert await store.claim(["q"]) == []
    clock.advance(1)
    assert len(await store.claim(["q"])) == 1
