"""Reapers against those who settle late, and against those who have just claimed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from millpond import Ack, Message, State, Store
from tests.races.processes import Actors, report
from tests.waiting import until


async def test_a_late_settle_wins_or_is_refused(url: str, store: Store, actors: Actors) -> None:
    """Either COMPLETED, and the settle was accepted, or waiting again, and it was refused."""
    reapers = await actors.start_many(2, "reaper", url=url, pause=0.002)
    for reaper in reapers:
        reaper.tell("go")
    enough, batch = 30, 10
    won = lost_race = rounds = 0
    while won < enough or lost_race < enough:
        rounds += 1
        assert rounds < 2_000, (won, lost_race)
        await store.publish([Message(queue="q", payload=b"x") for _ in range(batch)])
        claims = await store.claim(["q"], batch, 0.004, max_crashes=None)
        await asyncio.sleep(random.random() * 0.012)
        refused = set(await store.settle([Ack(c.receipt) for c in claims]))
        state = {row.id: row.state for row in await store.find([c.receipt.id for c in claims])}
        for claim in claims:
            if claim.receipt in refused:
                lost_race += 1
                assert state[claim.receipt.id] is State.PENDING
            else:
                won += 1
                assert state[claim.receipt.id] is State.COMPLETED
        await ack_all(store, batch)
    for reaper in reapers:
        reaper.tell("stop")
    reaped = sum([(await reaper.says())["reaped"] for reaper in reapers])
    await ack_all(store, batch)  # also what a reaper had in its hands when the rounds were over
    (stats,) = await store.count(["q"])
    lost = rounds * batch - stats.counts[State.COMPLETED]
    report("reaper and late settle", url, messages=rounds * batch, faults=lost_race, lost=lost, won=won, reaped=reaped)
    assert lost == 0
    assert reaped >= lost_race


async def ack_all(store: Store, batch: int) -> None:
    while claims := await store.claim(["q"], batch, 60, max_crashes=None):
        assert await store.settle([Ack(c.receipt) for c in claims]) == []


async def test_a_fresh_claim_is_never_taken_away(url: str, store: Store, actors: Actors) -> None:
    """A reaper that waited for a row must look again: the row may have been reaped and claimed meanwhile."""
    messages = 100 if url.startswith("sqlite") else 200
    await store.publish([Message(queue="q", payload=b"x") for _ in range(messages)])
    reapers = await actors.start_many(2, "reaper", url=url, pause=0.002)
    flaky = await actors.start_many(3, "flaky", url=url, queue="q")
    for actor in (*reapers, *flaky):
        actor.tell("go")

    async def drained() -> bool:
        (stats,) = await store.count(["q"])
        return stats.counts[State.COMPLETED] == messages

    await until(drained, every=0.1)
    for actor in (*reapers, *flaky):
        actor.tell("stop")
    settled: Counter[str] = Counter()
    refused = abandoned = 0
    for actor in flaky:
        said = await actor.says()
        settled.update(said["settled"])
        refused += said["refused"]
        abandoned += said["abandoned"]
    reaped = sum([(await reaper.says())["reaped"] for reaper in reapers])
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
