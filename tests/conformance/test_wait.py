"""Wait: returns early when a message may be due. It is a hint; only a claim is certain."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from millpond import GiveBack, ManualClock, Nack, Transport
from millpond.errors import InvalidTime
from tests.conformance.messages import claim_one, publish

LONG = 300.0
"""Seconds until a test fails; a wake-up takes milliseconds."""
SOON = 60.0


async def waiting(transport: Transport, queues: list[str]) -> asyncio.Task[None]:
    """A task that is waiting. A few extra hints are allowed (the listener of each shard starts), a busy loop is not.

    A hint holds until the next claim, so each further try claims first; nothing is due.
    """
    for n in range(8):
        if n:
            assert await transport.claim(queues) == []
        task = asyncio.create_task(transport.wait(queues, LONG))
        done, _ = await asyncio.wait({task}, timeout=0.1)
        if not done:
            return task
    raise AssertionError("returned again and again although nothing was due")


async def test_it_returns_after_the_timeout(transport: Transport) -> None:
    times = []
    for timeout in (*[0.05] * 8, 0, timedelta(milliseconds=1)):
        await transport.claim(["q"])
        started = time.monotonic()
        await transport.wait(["q"], timeout)
        times.append(time.monotonic() - started)
    assert max(times) < SOON
    assert max(times[:8]) > 0.04  # the start of each shard's listener is a hint, which ends one wait


async def test_a_publish_wakes_it(transport: Transport) -> None:
    """A publish reaches a subscriber without a poll."""
    await transport.claim(["q"])
    task = await waiting(transport, ["q", "other"])
    await publish(transport)
    await asyncio.wait_for(task, SOON)
    await claim_one(transport)


async def test_what_was_published_since_the_last_claim_needs_no_waiting(transport: Transport) -> None:
    """A publish between a claim that was not full and the wait must end the wait."""
    await transport.claim(["q"])
    await publish(transport)
    await asyncio.wait_for(transport.wait(["q"], LONG), SOON)


async def test_a_due_time_wakes_it(transport: Transport, clock: ManualClock) -> None:
    """Scheduled messages do not wait for the next poll."""
    await publish(transport, delay=0.2)
    assert await transport.claim(["q"]) == []
    await asyncio.wait_for(transport.wait(["q"], LONG), SOON)


async def test_a_short_retry_wakes_it(transport: Transport) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    await transport.settle([Nack(claim.receipt, delay=0.2)])
    assert await transport.claim(["q"]) == []
    await asyncio.wait_for(transport.wait(["q"], LONG), SOON)


@pytest.mark.parametrize("outcome", [Nack, GiveBack])
async def test_what_comes_back_wakes_it(transport: Transport, outcome: type[Nack] | type[GiveBack]) -> None:
    await publish(transport)
    claim = await claim_one(transport)
    task = await waiting(transport, ["q"])
    await transport.settle([outcome(claim.receipt)])
    await asyncio.wait_for(task, SOON)


async def test_closing_ends_it(transport: Transport) -> None:
    task = await waiting(transport, ["q"])
    await transport.close()
    await asyncio.wait_for(task, SOON)


async def test_a_cancelled_wait_leaves_nothing_behind(transport: Transport) -> None:
    task = await waiting(transport, ["q"])
    task.cancel()
    await asyncio.wait({task}, timeout=SOON)
    assert task.done()  # cancelled, or ended by a hint at the same time
    await publish(transport)
    await claim_one(transport)


async def test_the_timeout_must_be_a_time(transport: Transport) -> None:
    with pytest.raises(InvalidTime):
        await transport.wait(["q"], -1)
