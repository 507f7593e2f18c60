"""A worker: claims, runs handlers, settles, and stops without losing anything."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from millpond.clock import Seconds, monotonic
from millpond.errors import InvalidOption
from millpond.message import Receipt
from millpond.telemetry import LeasesLost, Telemetry
from millpond.transport import Capability, Presence, Store, Transport
from millpond.worker.attempt import Attempts
from millpond.worker.claim import Alone, Claiming
from millpond.worker.delivery import Delivery
from millpond.worker.handler import Handler
from millpond.worker.heartbeat import Heartbeat
from millpond.worker.purge import purge
from millpond.worker.reap import reap
from millpond.worker.settle import Settling
from millpond.worker.subscription import Subscription, seconds, whole

log = logging.getLogger("millpond.worker")

_UNWIND = 2.0
"""Seconds for interrupted handlers to come to their end."""
_LAST_FLUSH = 5.0
"""Seconds for the last outcomes to be written, when the store does not answer."""


class Worker:
    """The loops of one process. Made before there is a connection, so that it can be told to stop at any time."""

    def __init__(
        self,
        subscriptions: Sequence[Subscription],
        *,
        graceful_timeout: Seconds = 15.0,
        flush_size: int = 500,
        flush_interval: Seconds = 0.005,
        name: str | None = None,
        until_idle: bool = False,
        telemetry: Telemetry | None = None,
    ) -> None:
        if not subscriptions:
            raise InvalidOption("there is nothing to do: no subscriber was declared")
        # Made here, so that a handler that asks for what nobody can give is told before anything starts.
        self._handlers = [(s, Handler(s.handler, batch=s.batch is not None)) for s in subscriptions]
        self._graceful = seconds(graceful_timeout)
        whole("flush_size", flush_size, 1)
        self._flush = (flush_size, seconds(flush_interval))
        self._name = name
        self._until_idle = until_idle
        self._telemetry = telemetry
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._give_up = asyncio.Event()
        self._attempts: list[Attempts] = []
        self._heartbeat: Heartbeat | None = None
        self.claiming = asyncio.Event()
        """Set while the worker claims."""
        self.lost = 0
        """Leases lost, so far."""

    def stop(self) -> None:
        """Claim no more, let running handlers finish, write every outcome; `run` then returns.

        Told a second time, it interrupts the handlers that still run; a third time, it waits for nothing.
        """
        if self._hurry.is_set():
            self._give_up.set()
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    @property
    def stopping(self) -> asyncio.Event:
        return self._stop

    @property
    def ready(self) -> bool:
        """Whether it claims, and its last sign of life got through."""
        return self.claiming.is_set() and self._heartbeat is not None and self._heartbeat.alive

    @property
    def in_flight(self) -> int:
        """Messages claimed and not yet settled."""
        return sum(len(attempts.held) for attempts in self._attempts)

    @property
    def running(self) -> int:
        """Messages whose handlers run now."""
        return sum(attempts.running for attempts in self._attempts)

    @property
    def deliveries(self) -> int:
        """Messages given to handlers, so far."""
        return sum(attempts.taken for attempts in self._attempts)

    async def run(self, transport: Transport, beside: Callable[[], Awaitable[Transport]] | None = None) -> None:
        """Work until told to stop, or, if so made, until nothing is due. The transport stays open.

        `beside` opens another one to the same messages, for the heartbeat's thread. Cancelled, the worker stops
        as if told to.
        """
        work = asyncio.create_task(self._work(transport, beside))
        cancelled = False
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                cancelled = True
                self.stop()
        work.result()
        if cancelled:
            raise asyncio.CancelledError

    async def _work(self, transport: Transport, beside: Callable[[], Awaitable[Transport]] | None) -> None:
        settling = Settling(
            transport, size=self._flush[0], interval=self._flush[1], idle=self._idle, settled=self._settled
        )
        everybody = [Attempts(s, handler, transport, settling, self._lose) for s, handler in self._handlers]
        alone = Alone(everybody)
        presence: Presence | None = None
        chores: list[asyncio.Task[None]] = []
        store = cast(Store, transport)
        if Capability.PRESENCE in transport.capabilities:
            presence = await store.join(self._name)
            chores.append(asyncio.create_task(reap(store)))
        if Capability.ARCHIVE in transport.capabilities:
            chores.append(asyncio.create_task(purge(store)))
        self._attempts = everybody
        self._heartbeat = heartbeat = Heartbeat(transport, beside, presence, everybody)
        heartbeat.start()
        claims = [Claiming(transport, attempts, alone, lambda: heartbeat.alive) for attempts in everybody]
        settle = asyncio.create_task(settling.run())
        handlers = [asyncio.create_task(attempts.run()) for attempts in everybody]
        if self._until_idle:
            claiming = [asyncio.create_task(self._drain(claims))]
        else:
            claiming = [asyncio.create_task(claim.run()) for claim in claims]
        stopped = asyncio.create_task(self._stop.wait())
        self.claiming.set()
        try:
            await asyncio.wait([stopped, settle, *handlers, *claiming], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.claiming.clear()
            log.info("stopping: nothing more is claimed, %d messages are finished first", self.running)
            self._stop.set()
            stopped.cancel()
            for claim in claims:
                claim.stop()
            for attempts in everybody:
                attempts.stop()
            await self._finish(claiming, handlers)
            settling.stop()
            await self._first([settle], _LAST_FLUSH, self._give_up)
            if not settle.done():
                log.error(
                    "%d messages could not be settled: the store does not answer; they come back when their leases end",
                    self.in_flight,
                )
                settle.cancel()
            for chore in chores:
                chore.cancel()
            await asyncio.wait([settle, *chores], timeout=1.0)
            await heartbeat.stop()
        for task in (settle, *handlers, *claiming):
            if task.done() and not task.cancelled():
                task.result()  # a loop that broke is told, not hidden

    async def _drain(self, claims: Sequence[Claiming]) -> None:
        """Until nothing is due: a round of claims that brings nothing, while nothing was held from its beginning."""
        while not self._stop.is_set():
            was_idle = self.in_flight == 0 and self.running == 0
            rounds = [await claim.claim() for claim in claims]
            if any(got for _, got in rounds):
                continue
            if was_idle and all(wanted for wanted, _ in rounds):
                return
            busy = [a for a in self._attempts if a.held or a.running]
            waits = [asyncio.create_task(a.freed.wait()) for a in busy]
            if waits:
                await asyncio.wait(waits, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            elif not all(wanted for wanted, _ in rounds):  # no sign of life gets through at the moment
                await asyncio.sleep(0.01)

    async def _finish(self, claiming: list[asyncio.Task[None]], handlers: list[asyncio.Task[None]]) -> None:
        """Let claims and handlers come to their end, for as long as is granted; then interrupt them."""
        await self._first([*claiming, *handlers], self._graceful, self._hurry)
        late = [task for task in (*claiming, *handlers) if not task.done()]
        if not late:
            return
        if self.running:
            log.warning("%d messages are interrupted: the time to finish them is over", self.running)
        for task in claiming:
            task.cancel()
        for attempts in self._attempts:
            attempts.abandon()
        await self._first(late, _UNWIND, self._give_up)
        late = [task for task in late if not task.done()]
        if late:
            log.error("%d messages are left behind: their handlers do not end when cancelled", self.running)
            for task in late:
                task.cancel()

    async def _first(self, tasks: Sequence[asyncio.Task[Any]], timeout: float, cut_short: asyncio.Event) -> None:
        """Wait until all of these are done, or the time is over, or somebody cuts it short."""
        deadline = monotonic() + timeout
        cut = asyncio.create_task(cut_short.wait())
        while not (cut.done() or all(task.done() for task in tasks)):
            left = deadline - monotonic()
            if left <= 0:
                break
            pending = [task for task in tasks if not task.done()]
            await asyncio.wait([*pending, cut], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()

    def _idle(self) -> bool:
        """Whether nothing is about to finish, so that outcomes need not wait for company."""
        return not any(attempts.running or attempts.unstarted for attempts in self._attempts)

    def _settled(self, deliveries: Sequence[Delivery], refused: set[Receipt]) -> None:
        if len(self._attempts) == 1:
            self._attempts[0].settled(deliveries, refused)
            return
        by_home: dict[Attempts, list[Delivery]] = {}
        for delivery in deliveries:
            by_home.setdefault(cast(Attempts, delivery._home), []).append(delivery)
        for attempts, own in by_home.items():
            attempts.settled(own, refused)

    def _lose(self, deliveries: Sequence[Delivery], announced: bool) -> None:
        """Leases are lost. What a refused settle told was announced at the seam; an extension's is announced here."""
        self.lost += len(deliveries)
        if not announced and self._telemetry is not None:
            for queue, count in Counter(delivery.queue for delivery in deliveries).items():
                self._telemetry.announce(LeasesLost(queue, count))
