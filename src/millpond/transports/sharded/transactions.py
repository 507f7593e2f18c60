"""Transactions of callers: the row of the connection's own database names its shard and has the map."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from millpond.errors import WrongDatabase
from millpond.message import Message, Published, Receipt
from millpond.outcome import Outcome
from millpond.seam.transactions import Transactions
from millpond.transports.database.transactions import DatabaseTransactions
from millpond.transports.sharded.unique import placed_by_value

T = TypeVar("T")


class ShardedTransactions:
    """The transactions room: one for each kind of database among the shards."""

    def __init__(self, rooms: Sequence[DatabaseTransactions]) -> None:
        self._rooms = rooms
        self.check_open: Callable[[], None] = lambda: None
        """Raises if the store was closed to which this room belongs."""

    async def publish(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        keyed = [placed_by_value(message) for message in messages]
        return await self._first(lambda room: room.publish(keyed, within=within))

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        return await self._first(lambda room: room.settle(outcomes, within=within))

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        return await self._first(lambda room: room.once(id, key, within=within))

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        keyed = [placed_by_value(message) for message in messages]
        return self._first_sync(lambda room: room.publish_sync(keyed, within=within))

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        return self._first_sync(lambda room: room.settle_sync(outcomes, within=within))

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool:
        return self._first_sync(lambda room: room.once_sync(id, key, within=within))

    def learn_from(self, other: Transactions) -> None:
        """Each database names its shard by itself."""

    async def _first(self, work: Callable[[DatabaseTransactions], Awaitable[T]]) -> T:
        """The result of the first room that has the connection's kind of database."""
        self.check_open()
        *others, last = self._rooms
        for room in others:
            try:
                return await work(room)
            except WrongDatabase:
                continue
        return await work(last)

    def _first_sync(self, work: Callable[[DatabaseTransactions], T]) -> T:
        self.check_open()
        *others, last = self._rooms
        for room in others:
            try:
                return work(room)
            except WrongDatabase:
                continue
        return work(last)
