"""A short driver of a stream, and queries about its traces in the database."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from millpond import Message, State
from millpond.seam.streams import StreamClaim
from millpond.transports.database.store import DatabaseStore


class Driver:
    """One driver of the stream `s` on the queue `q`."""

    def __init__(self, store: DatabaseStore, name: str = "s") -> None:
        self.store = store
        self.name = name
        self.epoch = self.acked = 0

    async def open(self) -> Driver:
        self.epoch, self.acked = await self.store.streams.open(self.name)
        return self

    async def claim(self, seq: int, limit: int = 100, queues: Any = ("q",), **options: Any) -> StreamClaim | None:
        return await self.store.streams.claim(self.name, self.epoch, seq, queues, limit, **options)

    async def held(self, seq: int, limit: int = 100, **options: Any) -> StreamClaim:
        claim = await self.claim(seq, limit, **options)
        assert claim is not None
        return claim

    async def ack(self, seq: int, **options: Any) -> None:
        await self.store.streams.ack(self.name, self.epoch, seq, **options)


async def publish(store: DatabaseStore, count: int = 1, queue: str = "q", **fields: Any) -> list[UUID]:
    messages = [Message(queue=queue, payload=b"%d" % n, **fields) for n in range(count)]
    return [published.id for published in await store.publish(messages)]


async def processing(store: DatabaseStore, queue: str | None = None) -> set[UUID]:
    return {row.id for row in await store.operations.browse(queue, states=[State.PROCESSING], limit=10_000)}


async def counts(store: DatabaseStore, queue: str = "q") -> dict[State, int]:
    (stats,) = await store.operations.count([queue])
    return {state: number for state, number in stats.counts.items() if number}
