"""Wait: returns early when something may be due. A hint: claim tells the truth."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from millpond import GiveBack, ManualClock, Nack, Store
from millpond.errors import InvalidTime
from tests.conformance.messages import claim_one, publish

LONG = 300.0
"""Nobody waits this long: what should wake up does so in milliseconds."""
SOON = 60.0


async def waiting(transport: Store, queues: list[str]) -> asyncio.Task[None]:
    """A task that waits by now. A few hints too many are allowed (one begins to listen), a busy loop is not."""
    for _ in range(3):
        task = asyncio.create_task(transport.wait(queues, LONG))
        done, _ = await asyncio.wait({task}, timeout=0.1)
        if not done:
            return task
    raise AssertionError("returned again and again although nothing was due")


async def test_it_returns_after_the_timeout(transport: Store) -> None:
    await transport.claim(["q"])
    times = []
    for timeout in (0.05, 0.05, 0.05, 0, timedelta(milliseconds=1)):
        started = time.monotonic()
        await transport.wait(["q"], timeout)
        times.append(time.monotonic() - started)
    assert max(times) < SOON
    assert max(times[:3]) > 0.04


async def test_a_publish_wakes_it(transport: Store) -> None:
    """VT-C16, TSK-C10: reaches a subscriber without a poll"""
    await transport.claim(["q"])
    task = await waiting(transport, ["q", "other"])
    await publish(transport)
    await asyncio.wait_for(task, SOON)
    await claim_one(transport)


async def test_what_was_published_since_the_last_claim_needs_no_waiting(transport: Store) -> None:
    """Between a claim that was not full and the wait a publish may slip in; it must not be slept over"""
    await transport.claim(["q"])
    await publish(transport)
    await asyncio.wait_for(transport.wait(["q"], LONG), SOON)


async def test_a_due_time_wakes_it(transport: Store, clock: ManualClock) -> None:
    """VT-D7: scheduled messages are not late by a poll"""
    await publish(transport, delay=0.2)
    assert await transport.claim(["q"]) == []
    await asyncio.wait_for(transport.wait(["q"], LONG), SOON)


async def test_a_short_retry_wakes_it(transport: Store) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt, delay=0.2)])
    assert await transport.claim(["q"]) == []
    await asyncio.wait_for(transport.wait(["q"], LONG), SOON)


@pytest.mark.parametrize("outcome", [Nack, GiveBack])
async def test_what_comes_back_wakes_it(transport: Store, outcome: type[Nack] | type[GiveBack]) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    task = await waiting(transport, ["q"])
    await transport.settle([outcome(claim.receipt)])
    await asyncio.wait_for(task, SOON)


async def test_closing_ends_it(transport: Store) -> None:
    """VT-C9, VT-C10"""
    task = await waiting(transport, ["q"])
    await transport.close()
    await asyncio.wait_for(task, SOON)


async def test_a_cancelled_wait_leaves_nothing_behind(transport: Store) -> None:
    """VT-C9"""
    task = await waiting(transport, ["q"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await publish(transport)
    await claim_one(transport)


async def test_the_timeout_must_be_a_time(transport: Store) -> None:
    with pytest.raises(InvalidTime):
        await transport.wait(["q"], -1)
