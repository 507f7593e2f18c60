"""What a handler receives: the message and its verbs."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, Protocol, cast
from uuid import UUID

import msgspec

from millpond.clock import Seconds, micros
from millpond.errors import LeaseLost, MillpondError, not_supported
from millpond.message import Claim, Message
from millpond.outcome import Ack, Nack, Outcome, Reject
from millpond.transport import Capability, Store, Transport

current: ContextVar[Delivery | None] = ContextVar("millpond_delivery", default=None)
"""The delivery whose handler runs here."""

CORRELATION_ID = "correlation-id"


def current_delivery() -> Delivery | None:
    """The delivery whose handler runs here, for loggers and libraries; None outside a handler."""
    return current.get()


class Home(Protocol):
    """Where a delivery is handled: what it needs to settle itself."""

    transport: Transport
    loop: asyncio.AbstractEventLoop
    keep_acked: bool
    keep_rejected: bool

    async def write(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Write an outcome; False if the receipt was stale."""


class Delivery(msgspec.Struct, eq=False):
    """One delivery of one message. `ack`, `nack` and `reject` decide by hand; the first decision counts."""

    claim: Claim
    _home: Home
    body: Any = None
    decided: Outcome | None = None
    within: bool = False
    """The decision was written in a transaction of the handler's: it counts once that commits."""
    lost: bool = False
    """The lease was lost: another worker has, or had, this message."""
    interrupted: bool = False
    """The handler ran out of time, or the worker stops: what it does now is in vain. For handlers in threads,
    which nothing can end from outside."""
    concluded: bool = False
    """The worker has decided; what a thread or task says after that is too late."""

    def __repr__(self) -> str:
        return f"<Delivery {self.id} of {self.queue!r}, attempt {self.attempt}>"

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
    def headers(self) -> Any:
        """The message's headers, a mapping."""
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
        await self._decide(self._ack(), within)

    async def nack(self, delay: Seconds = 0.0, *, error: str | None = None, within: Any = None) -> None:
        """Again after `delay`. How often is up to you: the retry policy is not asked."""
        await self._decide(self._nack(delay, error), within)

    async def reject(self, reason: str = "rejected by the handler", *, within: Any = None) -> None:
        """Never again; kept with the reason."""
        await self._decide(self._reject(reason), within)

    def ack_sync(self, *, within: Any = None) -> None:
        """`ack` for synchronous handlers."""
        self._decide_sync(self._ack(), within)

    def nack_sync(self, delay: Seconds = 0.0, *, error: str | None = None, within: Any = None) -> None:
        self._decide_sync(self._nack(delay, error), within)

    def reject_sync(self, reason: str = "rejected by the handler", *, within: Any = None) -> None:
        self._decide_sync(self._reject(reason), within)

    async def once(self, key: str, *, within: Any) -> bool:
        """True the first time this is asked for the message and `key`, in a transaction that commits.

        The second line of defence: a handler's effect in the same database happens once even when the
        message is delivered twice.
        """
        return await self._store().once(self.id, key, within=within)

    def once_sync(self, key: str, *, within: Any) -> bool:
        return self._store().once_sync(self.id, key, within=within)

    # --- inside -------------------------------------------------------------------------------------

    def _ack(self) -> Ack:
        return Ack(self.claim.receipt, self._home.keep_acked)

    def _nack(self, delay: Seconds, error: str | None) -> Nack:
        micros(delay, "nack(delay)")
        return Nack(self.claim.receipt, delay, None if error is None else str(error))

    def _reject(self, reason: str) -> Reject:
        return Reject(self.claim.receipt, str(reason), keep=self._home.keep_rejected)

    async def _decide(self, outcome: Outcome, within: Any) -> None:
        if self._is_decided(outcome, within):
            return
        if within is None:
            before, self.decided, self.within = self.decided, outcome, False
            self._written(await self._home.write(self, outcome), before)
        else:
            self._written_within(await self._store().settle([outcome], within=within) == [], outcome)

    def _decide_sync(self, outcome: Outcome, within: Any) -> None:
        if self._is_decided(outcome, within):
            return
        if within is None:
            loop = self._home.loop
            if _running_loop() is loop:
                raise MillpondError("in an async handler, await the verb without _sync")
            before, self.decided, self.within = self.decided, outcome, False
            writing = asyncio.run_coroutine_threadsafe(self._home.write(self, outcome), loop)
            self._written(writing.result(), before)
        else:
            self._written_within(self._store().settle_sync([outcome], within=within) == [], outcome)

    def _is_decided(self, outcome: Outcome, within: Any) -> bool:
        """Whether an earlier decision stands, so that this one has no effect."""
        if self.lost:
            raise LeaseLost([self.claim.receipt])
        if self.decided is not None and not self.within:
            return True
        if self.concluded:
            raise LeaseLost([self.claim.receipt], f"the worker has already settled message {self.id}: too late")
        # An earlier decision within a transaction may have been rolled back with it. So it may be made again in
        # another one, or a different one in its stead.
        return self.decided is not None and within is None and type(outcome) is type(self.decided)

    def _written(self, settled: bool, before: Outcome | None) -> None:
        if settled:
            return
        if before is not None:  # the transaction was committed after all, and the first decision counts
            self.decided, self.within = before, True
            return
        self.lost = True
        raise LeaseLost([self.claim.receipt])

    def _written_within(self, settled: bool, outcome: Outcome) -> None:
        if not settled:
            if self.decided is None:
                self.lost = True
            raise LeaseLost([self.claim.receipt])
        self.decided, self.within = outcome, True

    def _store(self) -> Store:
        transport = self._home.transport
        if Capability.TRANSACTIONS not in transport.capabilities:
            raise not_supported("a decision within your transaction", Capability.TRANSACTIONS)
        return cast(Store, transport)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
