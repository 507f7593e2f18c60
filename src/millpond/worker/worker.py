"""A worker: claims, runs handlers, settles, and stops without losing anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from millpond.clock import Seconds
from millpond.errors import InvalidOption
from millpond.message import Receipt
from millpond.transport import Capability, Presence, Store, Transport
from millpond.worker.attempt import Attempts
from millpond.worker.claim import Claiming
from millpond.worker.heartbeat import Heartbeat
from millpond.worker.reap import reap
from millpond.worker.settle import Settling
from millpond.worker.subscription import Subscription, seconds

log = logging.getLogger("millpond.worker")


class Worker:
    """The loops of one process over one transport; `connect` opens another for the heartbeat's thread."""

    def __init__(
        self,
        transport: Transport,
        subscriptions: Sequence[Subscription],
        *,
        connect: Callable[[], Awaitable[Transport]],
        graceful_timeout: Seconds = 15.0,
        flush_size: int = 500,
        flush_interval: Seconds = 0.005,
        name: str | None = None,
    ) -> None:
        if not subscriptions:
            raise InvalidOption("there is nothing to do: no subscriber was declared")
        self._transport = transport
        self._connect = connect
        self._subscriptions = subscriptions
        self._graceful = seconds(graceful_timeout)
        self._flush = (flush_size, seconds(flush_interval))
        self._name = name
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._attempts: list[Attempts] = []
        self.ready = asyncio.Event()
        """Set while the worker claims."""
        self.lost = 0
        """Leases lost, so far."""

    def stop(self) -> None:
        """Claim no more, let running handlers finish, write every outcome; `run` then returns.

        Told a second time, it interrupts the handlers that still run.
        """
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    @property
    def running(self) -> int:
        return sum(attempts.running for attempts in self._attempts)

    @property
    def held(self) -> int:
        return sum(len(attempts.held) for attempts in self._attempts)

    async def run(self) -> None:
        """Work until told to stop. The transport stays open."""
        transport = self._transport
        settling = Settling(
            transport, size=self._flush[0], interval=self._flush[1], idle=self._idle, settled=self._settled
        )
        self._attempts = [Attempts(subscription, transport, settling) for subscription in self._subscriptions]
        presence: Presence | None = None
        reaping = None
        if Capability.PRESENCE in transport.capabilities:
            store = cast(Store, transport)
            presence = await store.join(self._name)
            reaping = asyncio.create_task(reap(store))
        heartbeat = Heartbeat(transport, self._connect, presence, self._attempts, self._lose)
        claims = [Claiming(transport, attempts, lambda: heartbeat.alive) for attempts in self._attempts]
        heartbeat.start()
        settle = asyncio.create_task(settling.run())
        handlers = [asyncio.create_task(attempts.run()) for attempts in self._attempts]
        claiming = [asyncio.create_task(claim.run()) for claim in claims]
        stopped = asyncio.create_task(self._stop.wait())
        self.ready.set()
        try:
            await asyncio.wait([stopped, settle, *handlers, *claiming], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.ready.clear()
            stopped.cancel()
            for claim in claims:
                claim.stop()
            for attempts in self._attempts:
                attempts.stop()
            await self._finish(claiming, handlers)
            settling.stop()
            await asyncio.wait([settle])
            await heartbeat.stop()
            if reaping is not None:
                reaping.cancel()
        for task in (settle, *handlers, *claiming):
            task.result()  # a loop that broke is told, not hidden

    async def _finish(self, claiming: list[asyncio.Task[None]], handlers: list[asyncio.Task[None]]) -> None:
        await asyncio.wait(claiming)
        for attempts in self._attempts:
            attempts.stop()  # what the last claim brought
        hurry = asyncio.create_task(self._hurry.wait())
        ends: list[asyncio.Future[Any]] = [hurry, asyncio.gather(*handlers, return_exceptions=True)]
        await asyncio.wait(ends, timeout=self._graceful, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        late = [handler for handler in handlers if not handler.done()]
        if late:
            log.warning("%d handlers did not finish in %g s and are interrupted", self.running, self._graceful)
            for attempts in self._attempts:
                attempts.abandon()
            await asyncio.wait(late)

    def _idle(self) -> bool:
        return all(attempts.running <= 1 and not attempts.unstarted for attempts in self._attempts)

    def _settled(self, receipt: Receipt, stale: bool) -> None:
        for attempts in self._attempts:
            delivery = attempts.held.get(receipt.id)
            if delivery is not None and attempts.settled(receipt, stale):
                if stale and not delivery.within:
                    self._count_lost(1)
                return

    def _lose(self, attempts: Attempts, receipts: list[Receipt]) -> None:
        attempts.lose(receipts)
        self._count_lost(len(receipts))

    def _count_lost(self, count: int) -> None:
        self.lost += count
        log.warning("%d leases were lost: other workers have those messages now", count)
