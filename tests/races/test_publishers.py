"""Publishers against claimers, nackers, reapers and a purger: no deadlock and no lock wait reaches a caller."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from uuid import UUID, uuid4

import pytest

from millpond import Ack, Message, State, Transport
from tests.races.processes import Actors, report
from tests.waiting import until

pytestmark = pytest.mark.slow

FOR_SECONDS = 3.0


async def test_no_caller_gets_a_deadlock(server_url: str, server_store: Transport, actors: Actors) -> None:
    publishers = [
        *await actors.start_many(3, "publisher", url=server_url, queue="q", kind="single"),
        *await actors.start_many(2, "publisher", url=server_url, queue="q", kind="bulk", pause=0.1),
        *await actors.start_many(3, "publisher", url=server_url, queue="q", kind="given", pause=0.01),
    ]
    consumers = await actors.start_many(4, "consumer", url=server_url, queue="q", batch=50)
    others = [
        *await actors.start_many(1, "reaper", url=server_url, pause=0.05),
        *await actors.start_many(1, "purger", url=server_url, pause=0.1),
    ]
    for actor in (*publishers, *consumers, *others):
        actor.send("go")
    await asyncio.sleep(FOR_SECONDS)
    published: Counter[str] = Counter()
    for publisher in publishers:
        publisher.send("stop")
    for publisher in publishers:
        published.update((await publisher.receive())["new"])
        await publisher.ends()

    async def drained() -> bool:
        return not await server_store.operations.browse("q", limit=1)

    await until(drained, every=0.1)
    done: Counter[str] = Counter()
    for actor in (*consumers, *others):
        actor.send("stop")
    for actor in consumers:
        done.update((await actor.receive())["done"])
        await actor.ends()
    reply = [await actor.receive() for actor in others]
    for actor in others:
        await actor.ends()
    doubled = sum(n - 1 for n in done.values())
    lost = len(published.keys() - done.keys())
    report("publishers and claimers", server_url, messages=len(published), lost=lost, doubled=doubled, **reply[1])
    assert max(published.values()) == 1
    assert (lost, doubled, done.keys() - published.keys()) == (0, 0, set())


async def test_two_publish_the_same_ids(url: str, store: Transport, actors: Actors) -> None:
    """Overlapping sets in both orders: each id is new for one publisher, and neither gets an error."""
    rounds = 15
    ids = [[str(uuid4()) for _ in range(60)] for _ in range(rounds)]
    first = [r[:40] for r in ids]
    second = [list(reversed(r[20:])) for r in ids]
    third = [random.sample(r, 40) for r in ids]
    one, two, three = [
        await actors.start("given_publisher", url=url, number=n, queue="q", rounds=mine)
        for n, mine in enumerate((first, second, third))
    ]
    for actor in (one, two, three):
        await actor.receive()
    new: Counter[str] = Counter()
    for _ in range(rounds):
        for actor in (one, two, three):
            actor.send("next")
        for actor in (one, two, three):
            new.update((await actor.receive())["new"])
    for actor in (one, two, three):
        actor.send("end")
        await actor.ends()
    wanted = {id_ for r in (*first, *second, *third) for id_ in r}
    (stats,) = await store.operations.count(["q"])
    report(
        "the same ids",
        url,
        messages=len(wanted),
        lost=len(wanted - new.keys()),
        doubled=stats.counts[State.PENDING] - len(wanted),
    )
    assert new == Counter(dict.fromkeys(wanted, 1))
    assert stats.counts[State.PENDING] == len(wanted)
    claims = await store.claim(["q"], len(wanted))
    assert {c.receipt.id for c in claims} == {UUID(id_) for id_ in wanted}
    assert await store.settle([Ack(c.receipt) for c in claims]) == []
    again = await store.publish([Message(queue="q", payload=b"x", id=c.receipt.id) for c in claims])
    assert not any(p.new for p in again)
