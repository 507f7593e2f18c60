"""A worker: starts the loops that claim, run handlers and settle, and stops them without losing a message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from millpond.checks import integer
from millpond.clock import Seconds, monotonic, seconds
from millpond.errors import InvalidOption, WorkerStuck
from millpond.loop import until_stopped
from millpond.message import Receipt
from millpond.redaction import Redact, hide
from millpond.schedule import Periodic
from millpond.seam.transport import Capability, Transport
from millpond.seam.workers import DEAD_AFTER, Presence, check_dead_after
from millpond.telemetry import LeasesLost, Telemetry
from millpond.worker.children import Children
from millpond.worker.chores import cancel_loop, periodic_loop, purge_loop, raise_first_error, reap_loop
from millpond.worker.claim_loop import ClaimLoop
from millpond.worker.delivery import Delivery, Settler
from millpond.worker.handler import Handler
from millpond.worker.handler_pool import HandlerPool
from millpond.worker.heartbeat import Connect, Heartbeat
from millpond.worker.middleware import Middleware, with_middleware
from millpond.worker.queue_settings import Settings
from millpond.worker.results import OnError
from millpond.worker.settle_loop import SettleLoop
from millpond.worker.settle_loops import SettleLoops
from millpond.worker.subscription import Subscription
from millpond.worker.suspects import MOST_CHILDREN, SuspectLoop

log = logging.getLogger("millpond.worker")

_UNWIND = 2.0
"""Seconds for interrupted handlers to end."""
_CHECK_EVERY = 0.5
_LAST_FLUSH = 5.0
"""Seconds for the last outcomes to be written if the store does not answer."""
_LAST_MOMENT = 0.5
"""Seconds for them when the worker is to wait for nothing: a store that answers has written them by then."""


class Worker:
    """The loops of one process. It is made before a connection exists and can be stopped at any time."""

    def __init__(
        self,
        subscriptions: Sequence[Subscription],
        *,
        graceful_timeout: Seconds = 15.0,
        flush_size: int = 500,
        flush_interval: Seconds = 0.005,
        name: str | None = None,
        until_idle: bool = False,
        end_when_stuck: bool = False,
        child_command: Sequence[str] | None = None,
        dead_after: Seconds = DEAD_AFTER,
        cancel_cut_off: bool = False,
        telemetry: Telemetry | None = None,
        redact: Redact = hide,
        on_error: OnError | None = None,
        middleware: Sequence[Middleware] = (),
        periodics: Sequence[Periodic] = (),
    ) -> None:
        if not subscriptions:
            raise InvalidOption("there is nothing to do: no subscriber was declared")
        # Made here: a handler with a parameter that cannot be filled raises before anything starts.
        self._handlers = [
            (s, with_middleware(Handler(s.handler, batch=s.batch is not None), middleware)) for s in subscriptions
        ]
        self._graceful = seconds(graceful_timeout)
        integer(flush_size, "flush_size", 1)
        self._flush = (flush_size, seconds(flush_interval))
        self._name = name
        self._periodics = periodics
        self._until_idle = until_idle
        self._end_when_stuck = end_when_stuck
        self._child_command = child_command
        self._telemetry = telemetry or Telemetry()
        self._dead_after = check_dead_after(dead_after)
        self._cancel_cut_off = cancel_cut_off
        self._redact = redact
        self._on_error = on_error
        self._stop = asyncio.Event()
        self._interrupt = asyncio.Event()
        self._give_up = asyncio.Event()
        self._pools: list[HandlerPool] = []
        self._claim_loops: list[ClaimLoop] = []
        self._suspect_loops: list[SuspectLoop] = []
        self._settle_loop: SettleLoops | None = None
        self._heartbeat: Heartbeat | None = None
        self.claiming = asyncio.Event()
        """Set while the worker claims."""
        self.lost = 0
        """Number of leases lost so far."""

    def stop(self) -> None:
        """Claim no more, let running handlers finish, write every outcome; `run` then returns.

        A second call interrupts the handlers that still run. After a third the worker waits for no handler, and only
        for a moment for the outcomes of those that have ended.
        """
        if self._interrupt.is_set():
            self._give_up.set()
        if self._stop.is_set():
            self._interrupt.set()
        self._stop.set()

    def begin_stop(self) -> None:
        """Stop as after one call of `stop`, however often it is called."""
        self._stop.set()

    def announce_stop(self) -> None:
        """Record that the worker stops, before it does so. Other threads may call this while a handler blocks the loop.

        From then on the death of the worker is no crash of its messages.
        """
        if self._heartbeat is not None:
            self._heartbeat.announce_stop()

    @property
    def stopping(self) -> asyncio.Event:
        return self._stop

    @property
    def ready(self) -> bool:
        """Whether the worker claims and makes progress."""
        return self.obstacle is None

    @property
    def obstacle(self) -> str | None:
        """The reason why the worker is not ready; None if it is.

        A handler within its timeout makes progress, however long it runs. So does an idle worker.
        """
        if not self.claiming.is_set():
            return "it does not claim"
        if self._heartbeat is None or not self._heartbeat.alive:
            return "its heartbeat fails"
        now = monotonic()
        unwritten = None if self._settle_loop is None else self._settle_loop.waiting_since
        if unwritten is not None and now - unwritten > min(seconds(pool.shortest.lease) for pool in self._pools):
            return "a result cannot be written"
        for pool, loop in zip(self._pools, self._claim_loops, strict=True):
            s, lease = pool.subscription, seconds(pool.shortest.lease)
            if pool.stuck_since is not None:
                return f"all handlers of {s.name} hang beyond their timeout"
            if loop.trying_since is not None and now - loop.trying_since > lease:
                return f"no claim from {', '.join(s.queues)} succeeds"
        return None

    @property
    def in_flight(self) -> int:
        """Number of messages claimed and not yet settled."""
        return sum(len(pool.held) for pool in self._pools)

    @property
    def running(self) -> int:
        """Number of messages whose handlers run now."""
        return sum(pool.running + len(pool.apart) for pool in self._pools)

    @property
    def deliveries(self) -> int:
        """Number of messages given to handlers so far."""
        return sum(pool.started_count for pool in self._pools)

    async def run(self, transport: Transport, connect_heartbeat: Connect | None = None) -> None:
        """Run until stopped or, with `until_idle`, until no message is due. The transport stays open.

        `connect_heartbeat` opens another transport to the same messages, for the heartbeat's thread. A cancelled
        worker stops as after `stop`.
        """
        work = asyncio.create_task(self._work(transport, connect_heartbeat))
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

    async def _work(self, transport: Transport, connect_heartbeat: Connect | None) -> None:
        size, interval = self._flush
        self._settle_loop = settle_loop = SettleLoops(
            lambda: SettleLoop(transport, size=size, interval=interval, is_idle=self._is_idle, on_settled=self._release)
        )
        settings = Settings([s for s, _ in self._handlers])
        pools = [
            HandlerPool(s, handler, transport, settle_loop, self._count_lost, self._redact, self._on_error, settings)
            for s, handler in self._handlers
        ]
        presence: Presence | None = None
        reaped = asyncio.Event()
        await settings.read(transport)
        chores: list[asyncio.Task[None]] = [asyncio.create_task(settings.run(transport))]
        if self._periodics or Capability.PERIODIC in transport.capabilities:
            await transport.periodic.declare(self._periodics)
            if self._until_idle:
                while not self._stop.is_set() and await transport.periodic.publish_due() == 0:
                    pass  # more is due
            else:
                chores.append(asyncio.create_task(periodic_loop(transport.periodic)))
        if Capability.PRESENCE in transport.capabilities:
            queues = sorted({queue for s, _ in self._handlers for queue in s.queues})
            presence = await transport.workers.join(self._name, dead_after=self._dead_after, queues=queues)
            chores.append(asyncio.create_task(reap_loop(transport.workers, reaped)))
            chores.append(asyncio.create_task(cancel_loop(transport.workers, self._cancel)))
        else:
            reaped.set()
        if Capability.ARCHIVE in transport.capabilities:
            chores.append(asyncio.create_task(purge_loop(transport.operations)))
        self._pools = pools
        self._heartbeat = heartbeat = Heartbeat(
            transport, connect_heartbeat, presence, pools, cancel_cut_off=self._cancel_cut_off
        )
        heartbeat.start()
        children = self._children(transport)
        self._claim_loops = [
            ClaimLoop(transport, pool, lambda: heartbeat.alive, suspects=children is None) for pool in pools
        ]
        if children is not None:
            share = max(1, MOST_CHILDREN // len(pools))
            self._suspect_loops = [
                SuspectLoop(transport, pool, settle_loop, children, share, lambda: heartbeat.alive, self.begin_stop)
                for pool in pools
            ]
        loops: list[ClaimLoop | SuspectLoop] = [*self._claim_loops, *self._suspect_loops]
        settle = asyncio.create_task(settle_loop.run())
        handlers = [asyncio.create_task(pool.run()) for pool in pools]
        if self._until_idle:
            claiming = [asyncio.create_task(self._drain(loops, reaped))]
        else:
            claiming = [asyncio.create_task(loop.run()) for loop in loops]
        stopped = asyncio.create_task(self._stop.wait())
        stuck = asyncio.create_task(self._raise_when_stuck())
        ended = asyncio.create_task(heartbeat.raise_when_ended())
        failed = asyncio.create_task(raise_first_error(chores))
        watches = [stuck, ended, failed]
        self.claiming.set()
        try:
            await asyncio.wait([stopped, settle, *watches, *handlers, *claiming], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.claiming.clear()
            log.info("stopping: no new claims, %d messages still running", self.running)
            self._stop.set()
            heartbeat.announce_stop()
            stopped.cancel()
            for watch in watches:
                watch.cancel()
            for loop in loops:
                loop.stop()
            for pool in pools:
                pool.stop()
            if children is not None:
                handlers.append(asyncio.create_task(self._finish_suspects(children, claiming)))
            await self._finish(claiming, handlers)
            settle_loop.stop()
            await self._wait_for_all([settle], _LAST_FLUSH, self._give_up)
            if not settle.done():
                await asyncio.wait([settle], timeout=_LAST_MOMENT)
            if not settle.done():
                log.error(
                    "messages not settled: %d, because the store does not answer; they come back when their leases end",
                    self.in_flight,
                )
                settle.cancel()
            for chore in chores:
                chore.cancel()
            await asyncio.wait([settle, *chores], timeout=1.0)
            await heartbeat.stop()
        for task in (settle, *watches, *handlers, *claiming):
            if task.done() and not task.cancelled():
                task.result()  # an error of a loop is raised, not hidden

    def _cancel(self, requests: Mapping[Receipt, str]) -> None:
        for pool in self._pools:
            pool.cancel(requests)
        for loop in self._suspect_loops:
            loop.cancel(requests)

    def _children(self, transport: Transport) -> Children | None:
        """Child processes for suspects; None if this worker cannot start any: suspects then run among the others."""
        if self._child_command is None or Capability.SHARED not in transport.capabilities:
            return None
        return Children(self._child_command, self._telemetry.announce)

    async def _finish_suspects(self, children: Children, claiming: Sequence[asyncio.Task[None]]) -> None:
        """Wait until no suspect is claimed and none runs, then end the child processes."""
        try:
            await asyncio.wait(claiming)
            for loop in self._suspect_loops:
                await loop.finish()
            await children.end()
        finally:
            children.kill()

    async def _drain(self, claim_loops: Sequence[ClaimLoop | SuspectLoop], reaped: asyncio.Event) -> None:
        """Claim until a round of claims brings no message although none was held when it began.

        `reaped`: messages of dead workers were given back. A round after that finds them.
        """
        while not self._stop.is_set():
            was_idle = self.in_flight == 0 and self.running == 0 and reaped.is_set()
            rounds = [await loop.claim() for loop in claim_loops]
            if any(got for _, got in rounds):
                continue
            if was_idle and all(wanted for wanted, _ in rounds):
                return
            busy = [pool for pool in self._pools if pool.held or pool.running]
            waits = [asyncio.create_task(pool.freed.wait()) for pool in busy]
            if waits:
                await asyncio.wait(waits, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            elif not reaped.is_set():
                await until_stopped(self._stop, reaped.wait())
            elif not all(wanted for wanted, _ in rounds):  # the heartbeat fails at present
                await asyncio.sleep(0.01)

    async def _raise_when_stuck(self) -> None:
        """Wait until all handlers of a subscription have hung for a lease, if that is to end the worker."""
        while True:
            await asyncio.sleep(_CHECK_EVERY)
            for pool in self._pools:
                s, since = pool.subscription, pool.stuck_since
                if self._end_when_stuck and since is not None and monotonic() - since > seconds(pool.shortest.lease):
                    raise WorkerStuck(f"all {s.max_workers} handlers of {s.name} have hung for longer than a lease")

    async def _finish(self, claiming: list[asyncio.Task[None]], handlers: list[asyncio.Task[None]]) -> None:
        """Let claims and handlers end within the grace period; then interrupt them."""
        await self._wait_for_all([*claiming, *handlers], self._graceful, self._interrupt)
        late = [task for task in (*claiming, *handlers) if not task.done()]
        if not late:
            return
        if self.running:
            log.warning("messages interrupted: %d, because the grace period is over", self.running)
        for pool in self._pools:
            pool.interrupt_running()
        for loop in self._suspect_loops:
            loop.interrupt_running()
        # Claims in progress are waited for as well: messages of a cancelled one would stay with this worker.
        await self._wait_for_all(late, _UNWIND, self._give_up)
        if self.running:
            log.error(
                "messages left behind: %d, because their handlers do not end when interrupted; they come back when "
                "their leases end",
                self.running,
            )
        for task in late:
            task.cancel()

    async def _wait_for_all(self, tasks: Sequence[asyncio.Task[Any]], timeout: float, cut_short: asyncio.Event) -> None:
        """Wait until all of these are done, the time is over, or `cut_short` is set."""
        deadline = monotonic() + timeout
        cut = asyncio.create_task(cut_short.wait())
        while not (cut.done() or all(task.done() for task in tasks)):
            left = deadline - monotonic()
            if left <= 0:
                break
            pending = [task for task in tasks if not task.done()]
            await asyncio.wait([*pending, cut], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()

    def _is_idle(self) -> bool:
        """Whether no handler is about to finish: outcomes then need not wait for more."""
        return not any(pool.running or pool.unstarted for pool in self._pools)

    def _release(self, deliveries: Sequence[Delivery], refused: set[Receipt]) -> None:
        if len(self._pools) == 1:
            self._pools[0].release(deliveries, refused)
            return
        by_pool: dict[Settler, list[Delivery]] = {}
        for delivery in deliveries:
            by_pool.setdefault(delivery._settler, []).append(delivery)
        for pool, own in by_pool.items():
            pool.release(own, refused)

    def _count_lost(self, deliveries: Sequence[Delivery], announced: bool) -> None:
        """Count lost leases, and announce those of an extension. The transport announces those of a refused settle."""
        self.lost += len(deliveries)
        if not announced:
            lost: dict[str, list[UUID]] = {}
            for delivery in deliveries:
                lost.setdefault(delivery.queue, []).append(delivery.id)
            for queue, ids in lost.items():
                self._telemetry.announce(LeasesLost(queue, len(ids), tuple(ids)))
