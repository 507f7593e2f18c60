"""The access room: tokens of the server, stored hashed, and a record of operators' actions."""

from __future__ import annotations

from typing import Protocol

import msgspec


class StoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token of the server. The secret itself is never stored."""

    id: str
    """The public part: 1 to 32 letters and digits."""
    name: str
    hash: str
    """SHA-256 of the secret, in hexadecimal digits."""
    roles: tuple[str, ...]
    queues: tuple[str, ...]
    """Patterns of queue names: `*` stands for any characters."""
    created_us: int = 0
    expires_us: int | None = None


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """An action of an operator that changed something."""

    at_us: int = 0
    actor: str
    """Name of the token, or the user of the mounted application."""
    action: str
    queue: str | None = None
    detail: str = ""
    """Arguments and result as JSON, without bodies."""


class Access(Protocol):
    """Store tokens and record actions. Times are the database's."""

    async def tokens(self) -> list[StoredToken]:
        """All tokens that have not expired, by name."""

    async def add_token(self, token: StoredToken) -> None:
        """Store a token, which replaces one of the same name."""

    async def remove_token(self, name: str) -> bool:
        """End a token; False if there is none of this name. Its row stays without the hash, for `had_tokens`."""

    async def had_tokens(self) -> bool:
        """Whether a token was ever stored; removed and expired ones count, until `reset_tokens`."""

    async def reset_tokens(self) -> None:
        """Forget all tokens, and that there were any: a server on loopback needs none afterwards."""

    async def record(self, action: Action) -> None: ...

    async def actions(self, limit: int = 100) -> list[Action]:
        """The last recorded actions, newest first."""
