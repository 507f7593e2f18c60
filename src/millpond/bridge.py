"""Moves a queue from one transport to another: at least once, and under the same ids.

A batch is claimed, published at the other end, and acked when that is durable there. A crash between the two moves
the batch again; where the other end recognises ids, that is harmless, elsewhere consumers see the same id twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from millpond.clock import SECOND, Seconds, as_datetime, micros
from millpond.errors import InvalidMessage, InvalidOption, MillpondError
from millpond.message import Claim, Message, check_name
from millpond.outcome import Ack, Outcome, Reject, describe
from millpond.transport import DEFAULT_LEASE, Transport

log = logging.getLogger("millpond.bridge")

_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Bridge:
    """One way, for some queues. Names of queues stay as they are unless `into` gives another."""

    def __init__(
        self,
        source: Transport,
        target: Transport,
        queues: Sequence[str],
        *,
        into: str | None = None,
        batch: int = 500,
        lease: Seconds = DEFAULT_LEASE,
        poll: Seconds = 1.0,
    ) -> None:
        if not queues:
            raise InvalidOption("which queues? A bridge needs the name of one at least")
        if into is not None:
            check_name(into, "into")
        self._source = source
        self._target = target
        self._queues = list(queues)
        self._into = into
        self._batch = batch
        self._lease = lease
        self._poll = micros(poll, "poll") / SECOND
        self._stopping = asyncio.Event()
        self.moved = 0

    def stop(self) -> None:
        """End after the batch that is under way."""
        self._stopping.set()

    async def drain(self) -> int:
        """Move what is due now; returns how many."""
        before = self.moved
        while await self._move() and not self._stopping.is_set():
            pass
        return self.moved - before

    async def run(self) -> None:
        """Move what comes, until stopped; a database or broker that is away is waited for."""
        pause = _PAUSE
        while not self._stopping.is_set():
            try:
                await self.drain()
                await self._unless_stopped(self._source.wait(self._queues, self._poll))
                pause = _PAUSE
            except MillpondError as e:
                if not e.retryable:
                    raise
                log.warning("the bridge waits: %s", e)
                await self._unless_stopped(asyncio.sleep(pause))
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def _move(self) -> int:
        # Whoever handles the messages decides about crashes and expiry; here they only pass.
        claims = await self._source.claim(self._queues, self._batch, self._lease, max_crashes=None, max_deliveries=None)
        if claims:
            outcomes = await self._publish(claims)
            refused = await self._source.settle(outcomes)
            if refused:
                log.warning("%d messages were moved by another bridge too; their ids are the same", len(refused))
            self.moved += sum(type(outcome) is Ack for outcome in outcomes)
        return len(claims)

    async def _publish(self, claims: Sequence[Claim]) -> list[Outcome]:
        """What becomes of them here. One that the target would never take is FAILED, and holds up nobody else."""
        try:
            await self._target.publish([self._passed_on(claim) for claim in claims])
        except InvalidMessage as e:
            if len(claims) > 1:
                half = len(claims) // 2
                return [*await self._publish(claims[:half]), *await self._publish(claims[half:])]
            receipt = claims[0].receipt
            log.error("message %s cannot go over the bridge and is FAILED: %s", receipt.id, e)
            return [Reject(receipt, reason="refused by the bridge's target", error=describe(e), attempted=False)]
        return [Ack(claim.receipt) for claim in claims]

    def _passed_on(self, claim: Claim) -> Message:
        message = claim.message
        return Message(
            queue=self._into or message.queue,
            payload=message.payload,
            id=message.id,
            key=message.key,
            priority=message.priority,
            expires=None if claim.expires_us is None else as_datetime(claim.expires_us),
            headers=message.headers,
        )

    async def _unless_stopped(self, work: object) -> None:
        doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())  # type: ignore[call-overload]
        try:
            await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait([doing])
        if not doing.cancelled():
            doing.result()
