"""Reapers against late settles and against fresh claims."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from millpond import Ack, Message, State, Transport
from tests.races.processes import Actors, report
from tests.waiting import until

pytestmark = pytest.mark.slow


async def test_a_late_settle_wins_or_is_refused(url: str, store: Transport, actors: Actors) -> None:
    """Either the settle was accepted and the message is COMPLETED, or it was refused and the message waits again."""
    reapers = await actors.start_many(2, "reaper", url=url, pause=0.002)
    for reaper in reapers:
        reaper.send("go")
    enough, batch = 30, 10
    won = lost_race = rounds = 0
    while won < enough or lost_race < enough:
        rounds += 1
        assert rounds < 2_000, (won, lost_race)
        await store.publish([Message(queue="q", payload=b"x") for _ in range(batch)])
        claims = await store.claim(["q"], batch, 0.004)
        await asyncio.sleep(random.random() * 0.012)
        refused = set(await store.settle([Ack(c.receipt) for c in claims]))
        state = {row.id: row.state for row in await store.operations.find([c.receipt.id for c in claims])}
        for claim in claims:
            if claim.receipt in refused:
                lost_race += 1
                assert state[claim.receipt.id] is State.PENDING
            else:
                won += 1
                assert state[claim.receipt.id] is State.COMPLETED
        await ack_all(store, batch)
    for reaper in reapers:
        reaper.send("stop")
    reaped = sum([(await reaper.receive())["reaped"] for reaper in reapers])

    async def drained() -> bool:
        await ack_all(store, batch)
        (stats,) = await store.operations.count(["q"])
        return stats.counts[State.COMPLETED] == rounds * batch

    # A message that a reaper held during `ack_all` may have lapsed in a later round too: then it waits for a second
    # or more.
    await until(drained, "all messages", every=0.1)
    report("reaper and late settle", url, messages=rounds * batch, faults=lost_race, lost=0, won=won, reaped=reaped)
    assert reaped >= lost_race


async def ack_all(store: Transport, batch: int) -> None:
    while claims := await store.claim(["q"], batch, 60):
        assert await store.settle([Ack(c.receipt) for c in claims]) == []


async def test_a_fresh_claim_is_never_taken_away(url: str, store: Transport, actors: Actors) -> None:
    """A reaper that waited for a row must check it again: it may have been reaped and claimed meanwhile."""
    messages = 100 if url.startswith("sqlite") else 200
    await store.publish([Message(queue="q", payload=b"x") for _ in range(messages)])
    reapers = await actors.start_many(2, "reaper", url=url, pause=0.002)
    flaky = await actors.start_many(3, "flaky", url=url, queue="q")
    for actor in (*reapers, *flaky):
        actor.send("go")

    async def drained() -> bool:
        (stats,) = await store.operations.count(["q"])
        return stats.counts[State.COMPLETED] == messages

    await until(drained, every=0.1)
    for actor in (*reapers, *flaky):
        actor.send("stop")
    settled: Counter[str] = Counter()
    refused = abandoned = 0
    for actor in flaky:
        reply = await actor.receive()
        settled.update(reply["settled"])
        refused += reply["refused"]
        abandoned += reply["abandoned"]
    reaped = sum([(await reaper.receive())["reaped"] for reaper in reapers])
    doubled = sum(n - 1 for n in settled.values())
    report(
        "reaper and fresh claim",
        url,
        messages=messages,
        faults=abandoned,
        lost=messages - len(settled),
        doubled=doubled,
        reaped=reaped,
    )
    assert (refused, len(settled), doubled) == (0, messages, 0)
    assert abandoned
