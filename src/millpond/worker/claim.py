"""The claim loop: keeps runners busy, and no more than that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from millpond.clock import monotonic
from millpond.errors import Closed, MillpondError
from millpond.outcome import SUSPECT
from millpond.transport import Transport
from millpond.worker.attempt import Attempts
from millpond.worker.subscription import seconds

log = logging.getLogger("millpond.worker")

_SUSPECTS_EVERY = 2.0
"""Seconds after which a busy worker lets its handlers finish, to see to a message that may be poison."""


class Claiming:
    """Claims for one subscription. Without free capacity there is no claim."""

    def __init__(self, transport: Transport, attempts: Attempts, may_claim: Callable[[], bool]) -> None:
        self._transport = transport
        self._attempts = attempts
        self._subscription = attempts.subscription
        self._may_claim = may_claim
        self._stopping = asyncio.Event()
        self._suspects_at = monotonic()

    def stop(self) -> None:
        self._stopping.set()
        self._attempts.freed.set()

    async def run(self) -> None:
        subscription, attempts = self._subscription, self._attempts
        trouble = 0.1
        while not self._stopping.is_set():
            attempts.freed.clear()
            wanted = self._wanted()
            if wanted <= 0 or not self._may_claim():
                await self._room()
                continue
            suspects = not attempts.held or monotonic() - self._suspects_at > _SUSPECTS_EVERY
            if suspects:
                self._suspects_at = monotonic()
            try:
                claims = await self._transport.claim(
                    subscription.queues,
                    wanted,
                    subscription.lease,
                    max_crashes=subscription.max_crashes,
                    max_deliveries=subscription.max_deliveries,
                    suspects=suspects,
                )
                trouble = 0.1
                if len(claims) == 1 and claims[0].unfinished >= SUSPECT:
                    await self._alone()
                    attempts.take(claims)
                    await self._settled(0)
                    continue
                attempts.take(claims)
                if len(claims) < wanted and not self._stopping.is_set():
                    await self._wait()
            except Closed:
                raise
            except MillpondError as e:
                # The store has already waited and tried again: tell, pause, go on. Nothing is lost meanwhile.
                log.warning("no claims from %s: %s", ", ".join(subscription.queues), e)
                await self._pause(trouble)
                trouble = min(trouble * 2, 5.0)

    def _wanted(self) -> int:
        """How many messages there is use for: what runs, and a little of what comes next."""
        s, attempts = self._subscription, self._attempts
        attempts.measure()
        ahead = min(s.fetch * s.overfetch, attempts.rate * seconds(s.prefetch_for))
        per_runner = s.batch or 1
        capacity = int(s.max_workers * per_runner + ahead)
        # Outcomes on their way to the database take no runner's time, so that they do not hold up claims until
        # there are many of them.
        room = min(
            capacity - attempts.unstarted - attempts.running * per_runner, capacity + 2 * s.fetch - len(attempts.held)
        )
        # Not one by one: a whole claim, or what is missing when half of what is ahead has been used up.
        if room >= s.fetch:
            return s.fetch
        return 0 if attempts.unstarted > ahead / 2 else max(room, 0)

    async def _alone(self) -> None:
        """Let the others finish first, so that a poison takes nobody with it; but do not wait for ever."""
        try:
            async with asyncio.timeout(seconds(self._subscription.lease) / 2):
                await self._settled(0)
        except TimeoutError:
            log.warning("a message that may be poison runs beside others, which take too long to wait for")

    async def _settled(self, held: int) -> None:
        attempts = self._attempts
        while len(attempts.held) > held and not self._stopping.is_set():
            attempts.freed.clear()
            await attempts.freed.wait()

    async def _room(self) -> None:
        try:
            async with asyncio.timeout(0.1):
                await self._attempts.freed.wait()
        except TimeoutError:
            return

    async def _wait(self) -> None:
        """For a wake-up, at most one poll's time; cut short by a stop."""
        s = self._subscription
        waiting = asyncio.ensure_future(self._transport.wait(s.queues, s.max_poll))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and not waiting.cancelled() and waiting.exception() is not None:
                raise waiting.exception()  # type: ignore[misc]
        finally:
            waiting.cancel()
            stopping.cancel()

    async def _pause(self, duration: float) -> None:
        try:
            async with asyncio.timeout(duration):
                await self._stopping.wait()
        except TimeoutError:
            return
