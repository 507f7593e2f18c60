"""Tokens: made once, shown once, stored as hashes, and compared in constant time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Sequence

from millpond.clock import monotonic
from millpond.seam.access import Access, StoredToken
from millpond.server.grants import Grant, Role, known_roles

PREFIX = "mp"
_READ_AGAIN = 2.0
"""Seconds for which tokens are remembered: a removed token works no longer than this."""
_NO_HASH = "0" * 64


def new_token(
    name: str, roles: Sequence[Role], queues: Sequence[str], expires_us: int | None = None
) -> tuple[str, StoredToken]:
    """The text for the client, which is nowhere kept, and the token as it is stored."""
    id_, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    stored = StoredToken(
        id=id_,
        name=name,
        hash=_hash(secret),
        roles=tuple(sorted(roles)),
        queues=tuple(queues),
        expires_us=expires_us,
    )
    return f"{PREFIX}_{id_}_{secret}", stored


def _hash(secret: str) -> str:
    # Secrets are 256 random bits: there is nothing to guess, so a slow hash would only slow down callers.
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def matching(text: str, tokens: dict[str, StoredToken]) -> StoredToken | None:
    """The token with this text. A wrong one takes as long as a right one."""
    prefix, _, rest = text.partition("_")
    id_, _, secret = rest.partition("_")
    stored = tokens.get(id_)
    right = hmac.compare_digest(_hash(secret), _NO_HASH if stored is None else stored.hash)
    return stored if right and stored is not None and prefix == PREFIX else None


class TokenBook:
    """The tokens of a database, read again every few seconds."""

    def __init__(self, access: Access | None) -> None:
        self._access = access
        self._tokens: dict[str, StoredToken] = {}
        self._had_tokens = False
        self._read_at: float | None = None
        self._lock = asyncio.Lock()

    async def never_made(self) -> bool:
        """Whether no token was ever made. Removed and expired ones count: their end opens nothing."""
        return not await self._current() and not self._had_tokens

    async def grant(self, text: str) -> Grant | None:
        """The rights of the caller with this token; None: there is no such token."""
        stored = matching(text, await self._current())
        if stored is None:
            return None
        return Grant(stored.name, known_roles(stored.roles), stored.queues)

    def forget(self) -> None:
        """Read the tokens before the next use."""
        self._read_at = None

    async def _current(self) -> dict[str, StoredToken]:
        if self._access is None:
            return {}
        async with self._lock:
            if self._read_at is None or monotonic() - self._read_at > _READ_AGAIN:
                self._tokens = {token.id: token for token in await self._access.tokens()}
                self._had_tokens = bool(self._tokens) or await self._access.had_tokens()
                self._read_at = monotonic()
        return self._tokens
