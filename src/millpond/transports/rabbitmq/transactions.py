"""The transactions room of a broker: `once`, in the database of `archive=`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn
from uuid import UUID

from millpond.errors import not_supported
from millpond.message import Message
from millpond.outcome import Outcome
from millpond.seam.transactions import Transactions
from millpond.seam.transport import Capability


class ArchiveTransactions:
    """Recognises a message that was delivered twice. A publish or an ack cannot be part of a database's transaction."""

    def __init__(self, archive: Transactions) -> None:
        self._archive = archive

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> NoReturn:
        raise not_supported("publish_sync(within=…) on RabbitMQ", Capability.TRANSACTIONS)

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> NoReturn:
        raise not_supported("settle_sync(within=…) on RabbitMQ", Capability.TRANSACTIONS)

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        return await self._archive.once(id, key, within=within)

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool:
        return self._archive.once_sync(id, key, within=within)

    def learn_from(self, other: Transactions) -> None:
        self._archive.learn_from(other)
