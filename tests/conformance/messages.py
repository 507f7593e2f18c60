"""Short ways to say what most tests say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond import Claim, Message, Row, State, Store


def message(payload: bytes = b"body", queue: str = "q", **fields: Any) -> Message:
    return Message(queue=queue, payload=payload, **fields)


async def publish(transport: Store, payload: bytes = b"body", queue: str = "q", **fields: Any) -> UUID:
    """One new message."""
    (published,) = await transport.publish([message(payload, queue, **fields)])
    assert published.new
    return published.id


async def claim_one(transport: Store, queue: str = "q", **options: Any) -> Claim:
    (claim,) = await transport.claim([queue], **options)
    return claim


async def bodies(transport: Store, queues: Sequence[str] = ("q",), limit: int = 100, **options: Any) -> list[bytes]:
    """The bodies of one claim, in their order."""
    return [claim.message.payload for claim in await transport.claim(queues, limit, **options)]


async def row(transport: Store, id_: UUID) -> Row:
    (found,) = await transport.find([id_])
    return found


async def counts(transport: Store, queue: str = "q") -> dict[State, int]:
    """How many messages are in each state, without the zeros."""
    return {
        state: number for stats in await transport.count([queue]) for state, number in stats.counts.items() if number
    }
