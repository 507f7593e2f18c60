"""Publishers against claimers, nackers, reapers and a purger: no deadlock and no lock wait reaches a caller."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from uuid import UUID, uuid4

from millpond import Ack, Message, State, Store
from tests.races.processes import Actors, report
from tests.waiting import until

FOR_SECONDS = 3.0


async def test_nobody_meets_a_deadlock(server_url: str, server_store: Store, actors: Actors) -> None:
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
        actor.tell("go")
    await asyncio.sleep(FOR_SECONDS)
    published: Counter[str] = Counter()
    for publisher in publishers:
        publisher.tell("stop")
    for publisher in publishers:
        published.update((await publisher.says())["new"])
        await publisher.ends()

    async def drained() -> bool:
        return not await server_store.browse("q", limit=1)

    await until(drained, every=0.1)
    done: Counter[str] = Counter()
    for actor in (*consumers, *others):
        actor.tell("stop")
    for actor in consumers:
        done.update((await actor.says())["done"])
        await actor.ends()
    said = [await actor.says() for actor in others]
    for actor in others:
        await actor.ends()
    doubled = sum(n - 1 for n in done.values())
    lost = len(published.keys() - done.keys())
    report("publishers and claimers", server_url, messages=len(published), lost=lost, doubled=doubled, **said[1])
    assert max(published.values()) == 1
    assert (lost, doubled, done.keys() - published.keys()) == (0, 0, set())


async def test_two_publish_the_same_ids(url: str, store: Store, actors: Actors) -> None:
    """Overlapping sets, in both orders: each id is new to one of them, and neither meets an error."""
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
        await actor.says()
    new: Counter[str] = Counter()
    for _ in range(rounds):
        for actor in (one, two, three):
            actor.tell("next")
        for actor in (one, two, three):
            new.update((await actor.says())["new"])
    for actor in (one, two, three):
        actor.tell("end")
        await actor.ends()
    wanted = {id_ for r in (*first, *second, *third) for id_ in r}
    (stats,) = await store.count(["q"])
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
