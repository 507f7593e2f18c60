"""Tokens and operators' actions over shards: every shard has all tokens, and an action is recorded on one of them."""

from __future__ import annotations

from collections.abc import Callable

from millpond.errors import ShardUnavailable
from millpond.seam.access import Access, Action, StoredToken
from millpond.transports.sharded.members import Members
from millpond.transports.sharded.shard import ANSWER_WITHIN
from millpond.transports.validation import page_size


class ShardedAccess:
    """The access room. A change that did not reach a shard raises, and is to be repeated."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def tokens(self) -> list[StoredToken]:
        """The tokens that every shard has that answers: one that was removed while a shard was away stays removed."""
        parts = await self._members.ask(lambda store: store.access.tokens())
        first, *others = parts
        known = [{(token.id, token.hash) for token in part} for part in others]
        return [token for token in first if all((token.id, token.hash) in part for part in known)]

    async def add_token(self, token: StoredToken) -> None:
        await self._members.tell(lambda store: store.access.add_token(token))

    async def remove_token(self, name: str) -> bool:
        return any(await self._members.tell(lambda store: store.access.remove_token(name)))

    async def had_tokens(self) -> bool:
        return any(await self._members.ask(lambda store: store.access.had_tokens()))

    async def reset_tokens(self) -> None:
        await self._members.tell(lambda store: store.access.reset_tokens())

    async def record(self, action: Action) -> None:
        """Record the action on the first shard that answers."""
        *others, last = self._members.shards
        for shard in others:
            try:
                return await shard.call(lambda store: store.access.record(action), within=ANSWER_WITHIN)
            except ShardUnavailable:
                continue
        await last.call(lambda store: store.access.record(action), within=ANSWER_WITHIN)

    async def actions(self, limit: int = 100) -> list[Action]:
        page_size(limit)
        parts = await self._members.ask(lambda store: store.access.actions(limit))
        return sorted((one for part in parts for one in part), key=lambda one: one.at_us, reverse=True)[:limit]


_room: Callable[[Members], Access] = ShardedAccess
