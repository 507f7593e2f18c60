"""A short run of every verb of a store, to prove that it works in some environment."""

import asyncio
from uuid import uuid4

from millpond import Ack, Claim, GiveBack, Message, Nack, Reject, Transport


async def everything(store: Transport, queue: str) -> None:
    """Publish in every way, claim, extend, settle in every way, browse; afterwards the queue is empty."""
    given = [Message(queue=queue, payload=b"given", id=uuid4()) for _ in range(3)]
    assert [p.new for p in await store.publish(given)] == [True] * 3
    assert [p.new for p in await store.publish(given)] == [False] * 3
    assert (await store.publish([Message(queue=queue, payload=b"single", key="k", headers={"a": 1})]))[0].new
    bulk = [Message(queue=queue, payload=bytes([n]) * 100, priority=n) for n in range(60)]
    assert all(p.new for p in await store.publish(bulk))
    claims = await claim_all(store, queue, 64)
    assert await store.extend([claim.receipt for claim in claims], lease=120) == []
    first, second, third, *others = (claim.receipt for claim in claims)
    outcomes = [Nack(first, delay=0, error="again"), GiveBack(second), Reject(third, reason="no")]
    assert await store.settle([*outcomes, *map(Ack, others)]) == []
    again = await claim_all(store, queue, 2)
    assert {claim.receipt.id for claim in again} == {first.id, second.id}
    assert await store.settle([Ack(claim.receipt) for claim in again]) == []
    assert await store.settle([Ack(first)]) == [first]
    assert await store.claim([queue]) == []


async def claim_all(store: Transport, queue: str, count: int) -> list[Claim]:
    """A claim steps over rows that other sessions lock briefly as neighbours of these rows."""
    claims: list[Claim] = []
    async with asyncio.timeout(60):
        while len(claims) < count:
            claims += await store.claim([queue], limit=100, lease=60)
    assert len(claims) == count
    return claims


async def everything_at_once(store: Transport, tasks: int) -> None:
    async with asyncio.TaskGroup() as group:
        for n in range(tasks):
            group.create_task(everything(store, f"queue-{n}"))
