"""Delivery: the message as a handler receives it, and its verbs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, cast
from uuid import UUID

import msgspec

from millpond.clock import Seconds, micros
from millpond.errors import LeaseLost, MillpondError
from millpond.loop import running_loop
from millpond.message import Claim, Message, Receipt
from millpond.outcome import Ack, GiveBack, Outcome, Raised, Reject, Returned
from millpond.redaction import Redact
from millpond.seam.transactions import Transactions
from millpond.seam.transport import Transport
from millpond.seam.workers import Step, StepClaim, Workers, message_step, scoped_step
from millpond.worker.steps import begin_run, decode_result, encode_result, end_run, stored_result
from millpond.worker.subscription import Subscription

T = TypeVar("T")

current: ContextVar[Delivery | None] = ContextVar("millpond_delivery", default=None)
"""The delivery whose handler runs in this context."""

in_batch: ContextVar[bool] = ContextVar("millpond_batch", default=False)
"""Whether the handler of a batch runs in this context."""

CORRELATION_ID = "correlation-id"


def current_delivery() -> Delivery | None:
    """The delivery whose handler runs in this context, for loggers and libraries; None outside a handler."""
    return current.get()


def in_handler() -> bool:
    return current.get() is not None or in_batch.get()


class Settler(Protocol):
    """The part of a worker that a delivery needs to settle itself."""

    transport: Transport
    loop: asyncio.AbstractEventLoop
    keep_acked: bool
    keep_rejected: bool
    redact: Redact
    """Removes secrets from error texts and reasons before they are stored."""

    def of(self, queue: str) -> Subscription:
        """The subscription with the settings of this queue."""

    def nacked(self, delivery: Delivery, delay: Seconds | None, error: str | None) -> Outcome:
        """The outcome of a nack by hand, as the retry policy says; `delay` replaces its wait."""

    async def write(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Write an outcome; False if the receipt was stale."""

    def release(self, deliveries: Sequence[Delivery], refused: set[Receipt]) -> None:
        """Stop holding deliveries whose outcomes were written, or refused because of a stale receipt."""

    def abandon(self, deliveries: Sequence[Delivery]) -> None:
        """Stop holding deliveries that are never settled."""


class Delivery(msgspec.Struct, eq=False):
    """One delivery of one message. `ack`, `nack`, `snooze` and `reject` decide by hand; the first decision counts."""

    claim: Claim
    _settler: Settler
    body: Any = None
    decided: Outcome | None = None
    decided_in_transaction: bool = False
    """The decision was written in the handler's transaction: it counts once that commits."""
    lost: bool = False
    """The lease was lost: another worker has or had this message."""
    interrupted: bool = False
    """The handler exceeded its timeout, or the worker stops: its result no longer counts. Handlers in threads should
    check this, because a thread cannot be ended from outside."""
    cancelled: str | None = None
    """The reason, if an operator cancels this message while it runs."""
    result: Returned | Raised | None = None
    """The result of the handler, from its end on while its middleware ends: an interruption no longer changes it."""
    concluded: bool = False
    """The worker has settled the delivery; a later decision by a thread or task is refused."""

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
    def lease(self) -> Seconds:
        """The lease of the subscription, or of the queue."""
        return self._settler.of(self.queue).lease

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
        """The header of that name, or else the message's id; it connects log lines."""
        return str(self.headers.get(CORRELATION_ID) or self.id)

    async def ack(self, *, within: Any = None) -> None:
        """The message is processed. Durable on return, or, `within` your transaction, when that commits."""
        await self._decide(self._ack(), within)

    async def nack(self, delay: Seconds | None = None, *, error: str | None = None, within: Any = None) -> None:
        """Deliver again as the retry policy says, as after an error. `delay` replaces its wait, not its limits."""
        await self._decide(self._nack(delay, error), within)

    async def snooze(self, delay: Seconds, *, within: Any = None) -> None:
        """Give back, due after `delay`. Neither attempt nor delivery is counted: for rate limits and closed shops."""
        await self._decide(self._snooze(delay), within)

    async def reject(self, reason: str = "rejected by the handler", *, within: Any = None) -> None:
        """Never deliver again; the message is kept with the reason."""
        await self._decide(self._reject(reason), within)

    def ack_sync(self, *, within: Any = None) -> None:
        """`ack` for synchronous handlers."""
        self._decide_sync(self._ack(), within)

    def nack_sync(self, delay: Seconds | None = None, *, error: str | None = None, within: Any = None) -> None:
        """`nack` for synchronous handlers."""
        self._decide_sync(self._nack(delay, error), within)

    def snooze_sync(self, delay: Seconds, *, within: Any = None) -> None:
        """`snooze` for synchronous handlers."""
        self._decide_sync(self._snooze(delay), within)

    def reject_sync(self, reason: str = "rejected by the handler", *, within: Any = None) -> None:
        """`reject` for synchronous handlers."""
        self._decide_sync(self._reject(reason), within)

    async def once(self, key: str, *, within: Any) -> bool:
        """True in the first transaction that asks for this message and `key` and commits.

        A second line of defence: a handler's effect in the same database happens once even if the message is
        delivered twice.
        """
        return await self._transactions.once(self.id, key, within=within)

    def once_sync(self, key: str, *, within: Any) -> bool:
        """`once` for synchronous handlers."""
        return self._transactions.once_sync(self.id, key, within=within)

    async def step(self, name: str, fn: Callable[[Step], Awaitable[T] | T], *, scope: str | None = None) -> T:
        """Do work outside of a transaction, such as a call of another service, and remember its result.

        Returns the stored result if the step is done. `fn` receives a `Step`, whose `key` is the same in every try, and
        returns a value that JSON has. Without `scope` a step belongs to this message; with one, to every message that
        uses the same text. While another delivery has it, `StepHeld` is raised and the message goes back uncounted.
        """
        step = self._step(name, scope)
        while (other := begin_run(self, step)) is not None:
            await asyncio.wrap_future(other)
        try:
            claim = await self._in_loop(self._workers.begin_step(self.claim.receipt, step))
            result = self._result_of(claim, step)
            if result is None:
                value = fn(step)
                result = encode_result(await value if inspect.isawaitable(value) else value, step)
                finishing = self._workers.finish_step(self.claim.receipt, step, result)
                self._check_current(await self._in_loop(finishing))
        finally:
            end_run(self, step)
        return cast(T, decode_result(result))

    def step_sync(self, name: str, fn: Callable[[Step], T], *, scope: str | None = None) -> T:
        """`step` for synchronous handlers."""
        step = self._step(name, scope)
        loop = self._settler.loop
        if running_loop() is loop:
            raise MillpondError("in an async handler, await the verb without _sync")
        while (other := begin_run(self, step)) is not None:
            other.result()
        try:
            begin = self._workers.begin_step(self.claim.receipt, step)
            result = self._result_of(asyncio.run_coroutine_threadsafe(begin, loop).result(), step)
            if result is None:
                result = encode_result(fn(step), step)
                finish = self._workers.finish_step(self.claim.receipt, step, result)
                self._check_current(asyncio.run_coroutine_threadsafe(finish, loop).result())
        finally:
            end_run(self, step)
        return cast(T, decode_result(result))

    # --- inside -------------------------------------------------------------------------------------

    def _ack(self) -> Ack:
        return Ack(self.claim.receipt, self._settler.keep_acked)

    def _nack(self, delay: Seconds | None, error: str | None) -> Outcome:
        if delay is not None:
            micros(delay, "nack(delay)")
        return self._settler.nacked(self, delay, None if error is None else self._settler.redact(str(error)))

    def _snooze(self, delay: Seconds) -> GiveBack:
        micros(delay, "snooze(delay)")
        return GiveBack(self.claim.receipt, delay=delay)

    def _reject(self, reason: str) -> Reject:
        return Reject(self.claim.receipt, self._settler.redact(str(reason)), keep=self._settler.keep_rejected)

    async def _decide(self, outcome: Outcome, within: Any) -> None:
        if self._is_decided(outcome, within):
            return
        if within is None:
            before, self.decided, self.decided_in_transaction = self.decided, outcome, False
            self._check_settled(await self._write(outcome), before)
        else:
            self._check_settled_within(await self._settler.transport.settle([outcome], within=within) == [], outcome)

    async def _write(self, outcome: Outcome) -> bool:
        return await self._in_loop(self._settler.write(self, outcome))

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run this in the worker's event loop: a handler in a thread may have its own loop."""
        loop = self._settler.loop
        if running_loop() is loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def _step(self, name: str, scope: str | None) -> Step:
        if self.lost:
            raise LeaseLost([self.claim.receipt])
        return message_step(self.id, name) if scope is None else scoped_step(scope, name)

    def _result_of(self, claim: StepClaim, step: Step) -> bytes | None:
        self._check_current(claim.state != "stale")
        return stored_result(claim, step)

    def _check_current(self, current: bool) -> None:
        if not current:
            self.lost = True
            raise LeaseLost([self.claim.receipt])

    def _decide_sync(self, outcome: Outcome, within: Any) -> None:
        if self._is_decided(outcome, within):
            return
        if within is None:
            loop = self._settler.loop
            if running_loop() is loop:
                raise MillpondError("in an async handler, await the verb without _sync")
            before, self.decided, self.decided_in_transaction = self.decided, outcome, False
            writing = asyncio.run_coroutine_threadsafe(self._settler.write(self, outcome), loop)
            self._check_settled(writing.result(), before)
        else:
            self._check_settled_within(self._transactions.settle_sync([outcome], within=within) == [], outcome)

    def _is_decided(self, outcome: Outcome, within: Any) -> bool:
        """Whether an earlier decision holds and this one has no effect."""
        if self.lost:
            raise LeaseLost([self.claim.receipt])
        if self.decided is not None and not self.decided_in_transaction:
            return True
        if self.concluded:
            raise LeaseLost([self.claim.receipt], f"the worker has already settled message {self.id}: too late")
        # An earlier decision within a transaction may have been rolled back with it. It may then be made again in
        # another transaction, or replaced by a different decision.
        return self.decided is not None and within is None and type(outcome) is type(self.decided)

    def _check_settled(self, settled: bool, before: Outcome | None) -> None:
        if settled:
            return
        if before is not None:  # the transaction was committed, so the first decision counts
            self.decided, self.decided_in_transaction = before, True
            return
        self.lost = True
        raise LeaseLost([self.claim.receipt])

    def _check_settled_within(self, settled: bool, outcome: Outcome) -> None:
        if not settled:
            if self.decided is None:
                self.lost = True
            raise LeaseLost([self.claim.receipt])
        self.decided, self.decided_in_transaction = outcome, True

    @property
    def _workers(self) -> Workers:
        return self._settler.transport.workers

    @property
    def _transactions(self) -> Transactions:
        return self._settler.transport.transactions
