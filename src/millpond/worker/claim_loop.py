"""The claim loop: claims as many messages as there is room for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from millpond.clock import monotonic, seconds
from millpond.errors import Closed, MillpondError
from millpond.loop import Backoff, until_stopped
from millpond.seam.transport import Capability, Transport
from millpond.worker.handler_pool import HandlerPool

log = logging.getLogger("millpond.worker")

_SUSPECTS_EVERY = 2.0
"""Seconds between two claims of a busy worker that include suspects. Claims of an idle worker always do."""
_CHECK_AGAIN = 0.1


class ClaimLoop:
    """Claims for one subscription, while it has free capacity.

    `suspects`: they run among other messages, because the worker has no child processes for them.
    """

    def __init__(
        self, transport: Transport, pool: HandlerPool, may_claim: Callable[[], bool], *, suspects: bool
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._subscription = pool.subscription
        self._may_claim = may_claim
        self._suspects = suspects
        self._by_worker = Capability.PRESENCE in transport.capabilities
        self._stopping = asyncio.Event()
        self._suspects_at = monotonic()
        self._turn = 0
        self.trying_since: float | None = None
        """Start of the first claim since the last one that succeeded; None: none is open or failed."""
        self._batch = self._subscription.batch or 1
        self._prefetch_for = seconds(self._subscription.prefetch_for)

    def stop(self) -> None:
        """Claim no more. Messages of a claim that is in progress are given back."""
        self._stopping.set()
        self._pool.freed.set()

    async def run(self) -> None:
        s = self._subscription
        min_poll, max_poll = seconds(s.min_poll), seconds(s.max_poll)
        vain_wakes = 0  # consecutive wake-ups without a message
        backoff = Backoff(0.1, 5.0)
        while not self._stopping.is_set():
            try:
                wanted, got = await self.claim()
                backoff.reset()
                if wanted == 0:
                    await self._wait_for_room()
                elif got < wanted:
                    vain_wakes = 0 if got else vain_wakes + 1
                    if vain_wakes > 1:
                        await until_stopped(self._stopping, asyncio.sleep(min_poll))
                    began = monotonic()
                    await until_stopped(self._stopping, self._transport.wait(s.queues, max_poll))
                    if monotonic() - began >= max_poll:
                        vain_wakes = 0  # it was the timeout, not a wake-up
            except Closed:
                raise
            except Exception as e:
                # The store has already retried. Log, pause, continue: no message is lost meanwhile.
                trace = None if isinstance(e, MillpondError) else e
                log.warning("no claims from %s: %s", ", ".join(s.queues), e, exc_info=trace)
                await until_stopped(self._stopping, asyncio.sleep(backoff.next()))

    async def claim(self) -> tuple[int, int]:
        """Claim messages and start them; return the numbers wanted and claimed.

        After a suspect both are the number wanted, because more messages may be due: the loop claims again at once.
        """
        s, pool = self._subscription, self._pool
        pool.freed.clear()
        wanted = self._wanted()
        if wanted <= 0 or self._stopping.is_set() or not self._may_claim():
            return 0, 0
        suspects = self._suspects and (not pool.held or monotonic() - self._suspects_at > _SUSPECTS_EVERY)
        if suspects:
            self._suspects_at = monotonic()
        if self.trying_since is None:
            self.trying_since = monotonic()
        got, alone = 0, False
        groups = pool.settings.alike(s)
        self._turn += 1
        for n in range(len(groups)):
            options, queues = groups[(self._turn + n) % len(groups)]
            claims = await self._transport.claim(
                queues,
                wanted - got,
                options.lease,
                max_deliveries=options.max_deliveries,
                suspects=suspects and not got,
                ahead=pool.unstarted > 0,
                by_worker=self._by_worker,
            )
            pool.take(claims)
            got += len(claims)
            alone = len(claims) == 1 and claims[0].suspect
            if alone or got >= wanted:
                break
        self.trying_since = None
        return wanted, wanted if alone else got

    def _wanted(self) -> int:
        """Number of messages to claim: enough to keep all slots busy, and a few ahead."""
        s, pool = self._subscription, self._pool
        ahead = min(s.fetch * s.overfetch, pool.rate * self._prefetch_for)
        if pool.stuck == s.max_workers:
            return 0
        capacity = int((s.max_workers - pool.stuck) * self._batch + ahead)
        unstarted = pool.unstarted
        # Outcomes that wait to be written occupy no slot. They hold up claims only when there are many of them.
        held = len(pool.held) - len(pool.apart)
        room = min(capacity - unstarted - pool.running, capacity + 2 * s.fetch - held)
        # Not one by one: a full claim, or the missing ones when half of the messages ahead have been started.
        if room >= s.fetch:
            return s.fetch
        return 0 if unstarted >= self._batch and unstarted > ahead / 2 else max(room, 0)

    async def _wait_for_room(self) -> None:
        """Wait until a slot is free, 0.1 s at most: the number wanted may change with time alone."""
        try:
            async with asyncio.timeout(_CHECK_AGAIN):
                await self._pool.freed.wait()
        except TimeoutError:
            return
