"""Messages in every state, made by the seam's own verbs."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from millpond import Ack, Claim, ManualClock, Message, Reject, State, Store

HOSTILE = [
    "o'clock",
    '"double"',
    "`tick`",
    "a;DROP TABLE message--",
    "%s :x ${y} {z}",
    "\N{DUCK} pond",
    "é" * 255,
    "q\\",
]


def message(queue: str = "q", **more: object) -> Message:
    return Message(**{"queue": queue, "payload": b"x", **more})  # type: ignore[arg-type]


async def publish(store: Store, *messages: Message) -> list[UUID]:
    return [published.id for published in await store.publish(messages)]


async def claim(store: Store, queue: str = "q", number: int = 1, **more: object) -> list[Claim]:
    claims = await store.claim([queue], number, **more)  # type: ignore[arg-type]
    assert len(claims) == number
    return claims


async def complete(store: Store, queue: str = "q", number: int = 1) -> list[UUID]:
    """Publish so many and ack them."""
    await publish(store, *(message(queue, priority=0) for _ in range(number)))
    claims = await claim(store, queue, number)
    assert await store.settle([Ack(c.receipt) for c in claims]) == []
    return [c.receipt.id for c in claims]


async def fail(store: Store, queue: str = "q", number: int = 1, **more: object) -> list[UUID]:
    """Publish so many and reject them."""
    await publish(store, *(message(queue, priority=0, **more) for _ in range(number)))
    claims = await claim(store, queue, number)
    assert await store.settle([Reject(c.receipt, reason="bad") for c in claims]) == []
    return [c.receipt.id for c in claims]


async def crash(store: Store, clock: ManualClock, queue: str = "q", times: int = 1) -> None:
    """Claim and forget, as a worker that dies does."""
    for _ in range(times):
        await claim(store, queue, lease=1, max_crashes=None)
        clock.advance(2)
        await store.reap()


async def counts(store: Store, queue: str = "q") -> dict[State, int]:
    (stats,) = await store.count([queue])
    return {state: number for state, number in stats.counts.items() if number}


async def pages(verb: object, size: int, **filters: object) -> list[Sequence[object]]:
    """Every page, until one is empty."""
    found: list[Sequence[object]] = []
    after = None
    while page := await verb(limit=size, after=after, **filters):  # type: ignore[operator]
        assert len(page) <= size
        found.append(page)
        after = page[-1].position
    return found
