"""The claim loop: keeps runners busy, and no more than that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from millpond.clock import monotonic
from millpond.errors import Closed, MillpondError
from millpond.message import Claim
from millpond.outcome import SUSPECT
from millpond.transport import Transport
from millpond.worker.attempt import Attempts
from millpond.worker.subscription import seconds

log = logging.getLogger("millpond.worker")

_SUSPECTS_EVERY = 2.0
"""Seconds after which a busy worker asks for messages that may be poison, which an idle one always does."""
_LOOK_AGAIN = 0.1
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Alone:
    """Lets one message run while no other does in this process, since it may take the process with it."""

    def __init__(self, everybody: Sequence[Attempts]) -> None:
        self._everybody = everybody
        self._turn = asyncio.Lock()
        self.others_may = asyncio.Event()
        """Cleared while nothing else is to be claimed."""
        self.others_may.set()

    async def run(self, attempts: Attempts, claim: Claim, patience: float, stopping: asyncio.Event) -> None:
        """Run the message when all others have come to their end; but do not wait for ever. Its lease is kept
        meanwhile. Until it has started, a stop gives it back as if it had never been claimed."""
        delivery = attempts.hold(claim)
        async with self._turn:
            self.others_may.clear()
            try:
                try:
                    async with asyncio.timeout(patience):
                        for other in self._everybody:
                            await _emptied(other, 1 if other is attempts else 0, stopping)
                except TimeoutError:
                    log.warning("a message that may be poison runs beside others, which take too long to wait for")
                attempts.start([delivery])
                await _emptied(attempts, 0, stopping)
            finally:
                self.others_may.set()


class Claiming:
    """Claims for one subscription. Without free capacity there is no claim."""

    def __init__(self, transport: Transport, attempts: Attempts, alone: Alone, may_claim: Callable[[], bool]) -> None:
        self._transport = transport
        self._attempts = attempts
        self._subscription = attempts.subscription
        self._alone = alone
        self._may_claim = may_claim
        self._stopping = asyncio.Event()
        self._waiting: asyncio.Future[Any] | None = None
        self._suspects_at = monotonic()
        self._batch = self._subscription.batch or 1
        self._prefetch_for = seconds(self._subscription.prefetch_for)

    def stop(self) -> None:
        """Claim no more. A claim that is under way comes to its end: its messages are given back."""
        self._stopping.set()
        self._attempts.freed.set()
        if self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> None:
        s = self._subscription
        min_poll, max_poll = seconds(s.min_poll), seconds(s.max_poll)
        in_vain = 0  # wake-ups that led to nothing, in a row
        pause = _PAUSE
        while not self._stopping.is_set():
            try:
                wanted, got = await self.claim()
                pause = _PAUSE
                if wanted == 0:
                    await self._room()
                elif got < wanted:
                    in_vain = 0 if got else in_vain + 1
                    if in_vain > 1:
                        await self._unless_stopped(asyncio.sleep(min_poll))
                    began = monotonic()
                    await self._unless_stopped(self._transport.wait(s.queues, max_poll))
                    if monotonic() - began >= max_poll:
                        in_vain = 0  # nobody woke us
            except Closed:
                raise
            except MillpondError as e:
                # The store has already waited and tried again: tell, pause, go on. Nothing is lost meanwhile.
                log.warning("no claims from %s: %s", ", ".join(s.queues), e)
                await self._unless_stopped(asyncio.sleep(pause))
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def claim(self) -> tuple[int, int]:
        """Claim what there is use for, and let it run: how many were wanted, and how many came."""
        s, attempts = self._subscription, self._attempts
        if not self._alone.others_may.is_set():
            await self._alone.others_may.wait()
        attempts.freed.clear()
        wanted = self._wanted()
        if wanted <= 0 or self._stopping.is_set() or not self._may_claim():
            return 0, 0
        suspects = not attempts.held or monotonic() - self._suspects_at > _SUSPECTS_EVERY
        if suspects:
            self._suspects_at = monotonic()
        claims = await self._transport.claim(
            s.queues,
            wanted,
            s.lease,
            max_crashes=s.max_crashes,
            max_deliveries=s.max_deliveries,
            suspects=suspects,
        )
        if len(claims) == 1 and claims[0].unfinished >= SUSPECT:
            await self._alone.run(attempts, claims[0], seconds(s.lease) / 2, self._stopping)
            return wanted, wanted
        attempts.take(claims)
        return wanted, len(claims)

    def _wanted(self) -> int:
        """How many messages there is use for: what runs, and a little of what comes next."""
        s, attempts = self._subscription, self._attempts
        ahead = min(s.fetch * s.overfetch, attempts.rate * self._prefetch_for)
        capacity = int((s.max_workers - attempts.stuck) * self._batch + ahead)
        unstarted = attempts.unstarted
        # Outcomes on their way to the database take no runner's time, so that they do not hold up claims until
        # there are many of them.
        room = min(capacity - unstarted - attempts.running, capacity + 2 * s.fetch - len(attempts.held))
        # Not one by one: a whole claim, or what is missing when half of what is ahead has been used up.
        if room >= s.fetch:
            return s.fetch
        return 0 if unstarted >= self._batch and unstarted > ahead / 2 else max(room, 0)

    async def _room(self) -> None:
        """Wait for a runner to be free, or a little: time alone may change what is wanted."""
        try:
            async with asyncio.timeout(_LOOK_AGAIN):
                await self._attempts.freed.wait()
        except TimeoutError:
            return

    async def _unless_stopped(self, work: Coroutine[Any, Any, Any]) -> None:
        """Wait for this, cut short by a stop."""
        self._waiting = waiting = asyncio.ensure_future(work)
        if self._stopping.is_set():
            waiting.cancel()
        try:
            await asyncio.wait([waiting])
        finally:
            waiting.cancel()
            self._waiting = None
        if not waiting.cancelled():
            waiting.result()


async def _emptied(attempts: Attempts, held: int, stopping: asyncio.Event) -> None:
    while (len(attempts.held) > held or attempts.running) and not stopping.is_set():
        attempts.freed.clear()
        await attempts.freed.wait()
