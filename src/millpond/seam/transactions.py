"""The transactions room: verbs that run on the caller's own connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from uuid import UUID

from millpond.message import Message, Published, Receipt
from millpond.outcome import Outcome


class Transactions(Protocol):
    """Publish and settle on a synchronous connection, and recognise a message that was delivered twice."""

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        """`publish` on the caller's synchronous connection; needs no event loop."""

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        """`settle` on the caller's synchronous connection; needs no event loop."""

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        """True for the first transaction that asks for (id, key) and commits."""

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool: ...

    def learn_from(self, other: Transactions) -> None:
        """Recognise the database on a caller's connection as another room does, which is connected to it."""
