"""Helpers that most tests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millpond import Claim, GiveBack, Message, Row, State, Transport


def message(payload: bytes = b"body", queue: str = "q", **fields: Any) -> Message:
    return Message(queue=queue, payload=payload, **fields)


async def publish(transport: Transport, payload: bytes = b"body", queue: str = "q", **fields: Any) -> UUID:
    """One new message."""
    (published,) = await transport.publish([message(payload, queue, **fields)])
    assert published.new
    return published.id


async def claim_one(transport: Transport, queue: str = "q", **options: Any) -> Claim:
    (claim,) = await transport.claim([queue], **options)
    return claim


async def crash(transport: Transport, times: int, queue: str = "q") -> None:
    """Claim a message and report that its process died, `times` times."""
    for _ in range(times):
        claim = await claim_one(transport, queue)
        assert await transport.settle([GiveBack(claim.receipt, crashed=True)]) == []


async def bodies(transport: Transport, queues: Sequence[str] = ("q",), limit: int = 100, **options: Any) -> list[bytes]:
    """The bodies of one claim, in their order."""
    return [claim.message.payload for claim in await transport.claim(queues, limit, **options)]


async def row(transport: Transport, id_: UUID) -> Row:
    (found,) = await transport.operations.find([id_])
    return found


async def counts(transport: Transport, queue: str = "q") -> dict[State, int]:
    """The number of messages in each state, without zeros."""
    return {
        state: number
        for stats in await transport.operations.count([queue])
        for state, number in stats.counts.items()
        if number
    }
