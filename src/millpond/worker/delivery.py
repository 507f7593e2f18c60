"""What a handler receives: the message and its verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, cast
from uuid import UUID

from millpond.clock import Seconds
from millpond.errors import LeaseLost, MillpondError, not_supported
from millpond.message import Claim, Message
from millpond.outcome import Ack, Nack, Outcome, Reject
from millpond.transport import Capability, Store, Transport

current: ContextVar[Delivery | None] = ContextVar("millpond_delivery", default=None)
"""The delivery whose handler runs here, for loggers and libraries."""

CORRELATION_ID = "correlation-id"

Settle = Callable[[Outcome], Awaitable[bool]]


class Delivery:
    """One delivery of one message. `ack`, `nack` and `reject` decide by hand; the first decision counts."""

    __slots__ = ("_keep", "_loop", "_settle", "_transport", "body", "claim", "decided", "lost", "within")

    def __init__(self, claim: Claim, transport: Transport, settle: Settle, keep: tuple[bool, bool]) -> None:
        self.claim = claim
        self._transport = transport
        self._settle = settle
        self._keep = keep
        self._loop: asyncio.AbstractEventLoop | None = None
        self.body: Any = None
        self.decided: Outcome | None = None
        self.within = False
        """The decision was written in a transaction of the handler's: it counts once that commits."""
        self.lost = False
        """The lease was lost: another worker has, or had, this message."""

    @property
    def message(self) -> Message:
        return self.claim.message

    @property
    def id(self) -> UUID:
        return self.claim.receipt.id

    @property
    def queue(self) -> str:
        return self.claim.message.queue

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.claim.message.headers

    @property
    def attempt(self) -> int:
        """The number of this handler run: 1, 2, …"""
        return self.claim.attempts + 1

    @property
    def redelivered(self) -> bool:
        return self.claim.redelivered

    @property
    def correlation_id(self) -> str:
        """The header of that name, or the message's own id: what ties log lines together."""
        return str(self.headers.get(CORRELATION_ID) or self.id)

    async def ack(self, *, within: Any = None) -> None:
        """Processed. Durable on return; `within` a transaction of yours, when that commits."""
        await self._decide(Ack(self.claim.receipt, self._keep[0]), within)

    async def nack(self, delay: Seconds = 0.0, *, error: str | None = None, within: Any = None) -> None:
        """Again after `delay`."""
        await self._decide(Nack(self.claim.receipt, delay, error), within)

    async def reject(self, reason: str = "rejected by the handler", *, within: Any = None) -> None:
        """Never again; kept with the reason."""
        await self._decide(Reject(self.claim.receipt, reason, keep=self._keep[1]), within)

    def ack_sync(self, *, within: Any = None) -> None:
        """`ack` for synchronous handlers."""
        self._decide_sync(Ack(self.claim.receipt, self._keep[0]), within)

    def nack_sync(self, delay: Seconds = 0.0, *, error: str | None = None, within: Any = None) -> None:
        self._decide_sync(Nack(self.claim.receipt, delay, error), within)

    def reject_sync(self, reason: str = "rejected by the handler", *, within: Any = None) -> None:
        self._decide_sync(Reject(self.claim.receipt, reason, keep=self._keep[1]), within)

    async def once(self, key: str, *, within: Any) -> bool:
        """True the first time this is asked for the message and `key`, in a transaction that commits.

        The second line of defence: a handler's effect in the same database happens once even when the
        message is delivered twice.
        """
        return await self._store().once(self.id, key, within=within)

    def once_sync(self, key: str, *, within: Any) -> bool:
        return self._store().once_sync(self.id, key, within=within)

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the `_sync` verbs, called from a thread, find the worker's loop."""
        self._loop = loop

    async def _decide(self, outcome: Outcome, within: Any) -> None:
        if self._already(outcome):
            return
        if within is None:
            self.decided = outcome
            settled = await self._settle(outcome)
        else:
            self._store()
            settled = not await self._transport.settle([outcome], within=within)
            self.decided, self.within = outcome, True
        self._check(settled)

    def _decide_sync(self, outcome: Outcome, within: Any) -> None:
        if self._already(outcome):
            return
        if within is None:
            if self._loop is None:
                raise MillpondError("in an async handler, await the verb without _sync")
            self.decided = outcome
            settled = asyncio.run_coroutine_threadsafe(_awaited(self._settle(outcome)), self._loop).result()
        else:
            settled = not self._store().settle_sync([outcome], within=within)
            self.decided, self.within = outcome, True
        self._check(settled)

    def _already(self, outcome: Outcome) -> bool:
        return self.decided is not None

    def _check(self, settled: bool) -> None:
        if not settled:
            self.lost = True
            raise LeaseLost([self.claim.receipt])

    def _store(self) -> Store:
        if Capability.TRANSACTIONS not in self._transport.capabilities:
            raise not_supported("a decision within your transaction", Capability.TRANSACTIONS)
        return cast(Store, self._transport)


async def _awaited(awaitable: Awaitable[bool]) -> bool:
    return await awaitable
