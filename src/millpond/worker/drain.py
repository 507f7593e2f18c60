"""Work until nothing is due, then return: for tests, scripts and cron. No loop waits for the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millpond.message import Receipt
from millpond.transport import Transport
from millpond.worker.attempt import Attempts
from millpond.worker.settle import Settling
from millpond.worker.subscription import Subscription


async def drain(transport: Transport, subscriptions: Sequence[Subscription]) -> int:
    """Run the handlers on everything that is due; returns how many deliveries there were."""
    attempts: list[Attempts] = []

    def settled(receipt: Receipt, stale: bool) -> None:
        for a in attempts:
            if a.settled(receipt, stale):
                return

    settling = Settling(transport, size=500, interval=0.0, idle=lambda: True, settled=settled)
    attempts += [Attempts(subscription, transport, settling) for subscription in subscriptions]
    settle = asyncio.create_task(settling.run())
    running = [asyncio.create_task(a.run()) for a in attempts]
    total = 0
    try:
        while count := sum([await _round(transport, a) for a in attempts]):
            total += count
    finally:
        for a in attempts:
            a.stop()
        await asyncio.gather(*running)
        settling.stop()
        await settle
    return total


async def _round(transport: Transport, attempts: Attempts) -> int:
    s = attempts.subscription
    claims = await transport.claim(
        s.queues, s.fetch, s.lease, max_crashes=s.max_crashes, max_deliveries=s.max_deliveries
    )
    attempts.take(claims)
    while attempts.held:
        attempts.freed.clear()
        await attempts.freed.wait()
    return len(claims)
