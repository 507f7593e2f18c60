"""Moves queues from one transport to another: at least once, and with the same ids.

A batch is claimed, published at the target, and acked when it is durable there. After a crash between the two it is
moved again. That is harmless if the target recognises ids; otherwise consumers receive an id twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from millpond.clock import as_datetime
from millpond.errors import DataRefused, InvalidMessage, InvalidOption, MillpondError, StoreUnavailable
from millpond.loop import Backoff, until_stopped
from millpond.message import LIVE, Claim, Message, check_name
from millpond.outcome import Ack, GiveBack, Outcome, Reject, describe
from millpond.seam.transport import Capability, Transport

log = logging.getLogger("millpond.bridge")

_POLL = 1.0
"""Maximum seconds between two claims while no message is due."""


class Bridge:
    """Moves queues in one direction. `into` is the queue at the target, if not the same."""

    def __init__(
        self,
        source: Transport,
        target: Transport,
        queues: Sequence[str],
        *,
        into: str | None = None,
        batch: int = 500,
    ) -> None:
        if not queues:
            raise InvalidOption("queues is empty: a bridge needs at least one queue name")
        if into is not None:
            check_name(into, "into")
        self._source = source
        self._target = target
        self._queues = list(queues)
        self._into = into
        self._batch = batch
        self._stopping = asyncio.Event()
        self.moved = 0
        self.left: int | None = None
        """Number of messages that `drain` or `run` left at the source, not due yet or claimed. None: not known."""

    def stop(self) -> None:
        """Stop after the current batch."""
        self._stopping.set()

    async def drain(self) -> int:
        """Move the messages that are due now, and return their number. Log how many stay because they are not due."""
        before = self.moved
        await self._drain()
        await self._report_left()
        return self.moved - before

    async def _report_left(self) -> None:
        if Capability.BROWSE not in self._source.capabilities:
            return
        self.left = 0
        for stats in await self._source.operations.count(self._queues):
            left = sum(stats.counts.get(state, 0) for state in LIVE)
            self.left += left
            if left:
                log.warning("messages stay at the source: %d of queue %r, not due yet or claimed", left, stats.queue)

    async def _drain(self) -> None:
        while await self._move_batch() and not self._stopping.is_set():
            pass

    async def run(self) -> None:
        """Move messages as they become due, until stopped. Wait for a database or broker that is away.

        Log in the end how many stay.
        """
        backoff = Backoff(0.1, 5.0)
        while not self._stopping.is_set():
            try:
                await self._drain()
                await until_stopped(self._stopping, self._source.wait(self._queues, _POLL))
                backoff.reset()
            except MillpondError as e:
                if not e.retryable:
                    raise
                log.warning("bridge waiting: %s", e)
                await until_stopped(self._stopping, asyncio.sleep(backoff.next()))
        with contextlib.suppress(StoreUnavailable):
            await self._report_left()

    async def _move_batch(self) -> int:
        # Without a limit: the workers at the target decide.
        claims = await self._source.claim(self._queues, self._batch, max_deliveries=None)
        if claims:
            try:
                outcomes, error = await self._publish(claims)
            except BaseException:
                await asyncio.shield(self._settle([GiveBack(claim.receipt) for claim in claims]))
                raise
            await self._settle(outcomes)
            if error is not None:
                raise error
        return len(claims)

    async def _settle(self, outcomes: Sequence[Outcome]) -> None:
        refused = await self._source.settle(outcomes)
        if refused:
            log.warning("moved by another bridge too: %d messages, with the same ids", len(refused))
        self.moved += sum(type(outcome) is Ack for outcome in outcomes)

    async def _publish(self, claims: Sequence[Claim]) -> tuple[list[Outcome], MillpondError | None]:
        """Publish a batch and return the outcomes. A message that the target refuses is FAILED and delays no other.

        While the target is away, messages are given back: a delivery that reached no handler does not count.
        """
        try:
            await self._target.publish([self._copy(claim) for claim in claims])
        except (InvalidMessage, DataRefused) as e:
            if len(claims) > 1:
                half = len(claims) // 2
                first, error = await self._publish(claims[:half])
                if error is not None:
                    return [*first, *(GiveBack(claim.receipt) for claim in claims[half:])], error
                second, error = await self._publish(claims[half:])
                return [*first, *second], error
            receipt = claims[0].receipt
            log.error("message %s was refused by the target and is FAILED: %s", receipt.id, e)
            return [Reject(receipt, reason="refused by the bridge's target", error=describe(e), attempted=False)], None
        except MillpondError as e:
            return [GiveBack(claim.receipt) for claim in claims], e
        return [Ack(claim.receipt) for claim in claims], None

    def _copy(self, claim: Claim) -> Message:
        return msgspec.structs.replace(
            claim.message,
            queue=self._into or claim.message.queue,
            expires=None if claim.expires_us is None else as_datetime(claim.expires_us),
        )
