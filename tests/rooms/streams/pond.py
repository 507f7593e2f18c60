"""Shards with messages for a stream, and checks of their final states."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID, uuid4

import millpond
from millpond import Ack, Message, State
from millpond.loop import LoopThread
from millpond.transports.database.store import DatabaseStore
from tests.rooms.streams.engine import Checkpoint


class Shards:
    """Databases with a connection to each, shared by tests."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self._loop = LoopThread()

        async def connect() -> dict[str, Any]:
            return {url: await millpond.connect(url, migrate=True) for url in urls}

        self._stores = self._loop.wait_for(connect())

    def each(self, work: Callable[[DatabaseStore], Coroutine[Any, Any, Any]], urls: list[str]) -> list[Any]:
        return [self._loop.wait_for(work(self._stores[url])) for url in urls]

    def close(self) -> None:
        self.each(lambda store: store.close(), self.urls)
        self._loop.end()


class Pond:
    """Messages of one queue, and a stream's options for them."""

    def __init__(self, shards: Shards, urls: list[str] | None = None, **options: str) -> None:
        self._shards = shards
        self.urls = urls or shards.urls
        self.queue = self.stream = uuid4().hex
        self.published: set[UUID] = set()
        self.options = {
            "url": " ".join(self.urls),
            "queue": self.queue,
            "stream": self.stream,
            "maxMessagesPerTrigger": "40",
            "minPartitions": "3",
            **options,
        }

    def each(
        self, work: Callable[[DatabaseStore], Coroutine[Any, Any, Any]], urls: list[str] | None = None
    ) -> list[Any]:
        return self._shards.each(work, urls or self.urls)

    def publish(self, count: int) -> None:
        async def some(store: DatabaseStore) -> None:
            messages = [Message(queue=self.queue, payload=b"x", priority=n % 3) for n in range(count)]
            self.published |= {p.id for p in await store.publish(messages)}

        self.each(some)

    def work(self, limit: int) -> set[UUID]:
        """Claim messages of the queue as a worker, and ack them."""

        async def some(store: DatabaseStore) -> set[UUID]:
            claims = await store.claim([self.queue], limit)
            assert await store.settle([Ack(claim.receipt) for claim in claims]) == []
            return {claim.receipt.id for claim in claims}

        return set().union(*self.each(some))

    def release(self, urls: list[str] | None = None) -> int:
        return sum(self.each(lambda store: store.streams.release(self.stream), urls))

    def held(self) -> int:
        return sum(
            s.held for found in self.each(lambda store: store.streams.status()) for s in found if s.name == self.stream
        )

    def archived(self) -> list[UUID]:
        """All settled messages; checks that none is left and none was counted twice."""

        async def rows(store: DatabaseStore) -> list[Any]:
            (stats,) = await store.operations.count([self.queue])
            assert not any(stats.counts[state] for state in (State.PENDING, State.PROCESSING, State.RETRYABLE)), stats
            (status,) = [s for s in await store.streams.status() if s.name == self.stream]
            assert (status.held, status.held_for) == (0, None)
            return list(await store.operations.archived(self.queue, limit=10_000))

        found = [row for rows_ in self.each(rows) for row in rows_]
        assert {(row.state, row.deliveries, row.attempts) for row in found} <= {(State.COMPLETED, 1, 1)}
        return [row.id for row in found]

    def exactly_once(self, checkpoint: Checkpoint, worked: set[UUID] = frozenset()) -> None:  # type: ignore[assignment]
        rows = checkpoint.rows()
        assert len(rows) == len(set(rows)), "doubled"
        assert {UUID(row) for row in rows} | worked == self.published, "lost"
        archived = self.archived()
        assert len(archived) == len(set(archived))
        assert set(archived) == self.published
