"""Messages in every state, made with the verbs of the seam."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from millpond import Ack, Claim, GiveBack, Message, Reject, State, Transport

HOSTILE = [
    "o'clock",
    '"double"',
    "`tick`",
    "a;DROP TABLE millpond_message--",
    "%s :x ${y} {z}",
    "\N{DUCK} pond",
    "é" * 255,
    "q\\",
]


def message(queue: str = "q", **more: object) -> Message:
    return Message(**{"queue": queue, "payload": b"x", **more})  # type: ignore[arg-type]


async def publish(store: Transport, *messages: Message) -> list[UUID]:
    return [published.id for published in await store.publish(messages)]


async def claim(store: Transport, queue: str = "q", number: int = 1, **more: object) -> list[Claim]:
    claims = await store.claim([queue], number, **more)  # type: ignore[arg-type]
    assert len(claims) == number
    return claims


async def complete(store: Transport, queue: str = "q", number: int = 1) -> list[UUID]:
    """Publish `count` messages and ack them."""
    await publish(store, *(message(queue, priority=0) for _ in range(number)))
    claims = await claim(store, queue, number)
    assert await store.settle([Ack(c.receipt) for c in claims]) == []
    return [c.receipt.id for c in claims]


async def fail(store: Transport, queue: str = "q", number: int = 1, **more: object) -> list[UUID]:
    """Publish `count` messages and reject them."""
    await publish(store, *(message(queue, priority=0, **more) for _ in range(number)))
    claims = await claim(store, queue, number)
    assert await store.settle([Reject(c.receipt, reason="bad") for c in claims]) == []
    return [c.receipt.id for c in claims]


async def crash(store: Transport, queue: str = "q", times: int = 1) -> None:
    """Claim a message and report that its process died."""
    for _ in range(times):
        (held,) = await claim(store, queue)
        assert await store.settle([GiveBack(held.receipt, crashed=True)]) == []


async def counts(store: Transport, queue: str = "q") -> dict[State, int]:
    (stats,) = await store.operations.count([queue])
    return {state: number for state, number in stats.counts.items() if number}


async def pages(verb: object, size: int, **filters: object) -> list[Sequence[object]]:
    """All rows, page by page, until a page is empty."""
    found: list[Sequence[object]] = []
    after = None
    while page := await verb(limit=size, after=after, **filters):  # type: ignore[operator]
        assert len(page) <= size
        found.append(page)
        after = page[-1].position
    return found
