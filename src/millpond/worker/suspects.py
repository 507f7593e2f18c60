"""Suspects of a worker: each runs alone in a child process, whose death is then its own fault.

The worker claims a suspect, keeps its lease and writes its outcome; the child runs the handler (`child_worker.py`).
Suspects therefore delay neither other messages nor each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial

from millpond.clock import monotonic
from millpond.errors import Closed, MillpondError
from millpond.loop import Backoff, until_stopped
from millpond.message import Claim, Receipt
from millpond.outcome import GiveBack, Outcome, Reject, crash_delay, describe
from millpond.seam.transport import Capability, Transport
from millpond.worker.child_messages import (
    Announce,
    Idle,
    Interrupt,
    Lost,
    ReceiptStale,
    Run,
    Settle,
    Started,
    StopWorker,
    Write,
    WriteAnswer,
)
from millpond.worker.child_process import ChildProcess
from millpond.worker.children import Children, NotStarted
from millpond.worker.delivery import Delivery
from millpond.worker.failure_log import log_fields
from millpond.worker.handler_pool import HandlerPool
from millpond.worker.settle_loops import SettleLoops

log = logging.getLogger("millpond.worker")

MOST_CHILDREN = 10
"""Maximum number of suspects that a worker runs at once. Its subscribers share it evenly; each may run at least one."""
_CLAIM_EVERY = 2.0
"""Seconds between two claims that find no suspect."""
_TIMEOUT_WITHIN = 10.0
"""Seconds for a child to report the timeout of its handler, also on a busy machine. Then it hangs, and is killed."""
_END_WITHIN = 1.0
"""Seconds for a handler to end when it was interrupted, or when its outcome is decided."""


class SuspectLoop:
    """Claims the suspects of one subscription, and runs each in a child."""

    def __init__(
        self,
        transport: Transport,
        pool: HandlerPool,
        settle_loop: SettleLoops,
        children: Children,
        most: int,
        may_claim: Callable[[], bool],
        stop_worker: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._subscription = pool.subscription
        self._settle_loop = settle_loop
        self._children = children
        self._most = min(most, pool.subscription.max_workers)
        """Maximum number of suspects at once."""
        self._may_claim = may_claim
        self._by_worker = Capability.PRESENCE in transport.capabilities
        self._stop_worker = stop_worker
        self._runs: set[asyncio.Task[None]] = set()
        self._running: dict[Delivery, ChildProcess] = {}
        self._stopping = asyncio.Event()
        self._freed = asyncio.Event()
        self._more = True
        """The last claim found a suspect."""
        self._claimed_at = 0.0
        self._error: BaseException | None = None
        """The error of a run, which ends the worker."""

    # --- claim --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Claim until stopped."""
        pauses = Backoff(_CLAIM_EVERY, 30.0)
        while not self._stopping.is_set():
            try:
                _, got = await self.claim()
                pauses.reset()
            except Closed:
                raise
            except Exception as e:
                if self._error is not None:
                    raise
                trace = None if isinstance(e, MillpondError) else e
                queues = ", ".join(self._subscription.queues)
                log.warning("no claims of suspects from %s: %s", queues, e, exc_info=trace)
                await until_stopped(self._stopping, asyncio.sleep(pauses.next()))
                continue
            if not got:
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLAIM_EVERY):
                        await self._freed.wait()

    async def claim(self) -> tuple[int, int]:
        """Claim a suspect and start it; return the numbers wanted and claimed."""
        s = self._subscription
        if self._error is not None:
            raise self._error
        if len(self._runs) >= self._most or self._stopping.is_set() or not self._may_claim():
            return 0, 0
        recently = self._pool.held and not self._more and monotonic() - self._claimed_at < _CLAIM_EVERY
        if recently or not self._children.may_start:
            return 1, 0
        self._claimed_at = monotonic()
        claims: list[Claim] = []
        for options, queues in self._pool.settings.alike(s):
            limit = options.max_deliveries
            claims = await self._transport.claim(
                queues, 1, options.lease, max_deliveries=limit, others=False, by_worker=self._by_worker
            )
            if claims:
                break
        self._more = bool(claims)
        for delivery in self._pool.hold(claims):
            run = asyncio.create_task(self._run(delivery))
            self._runs.add(run)
            run.add_done_callback(partial(self._ended, delivery))
        return 1, len(claims)

    def _ended(self, delivery: Delivery, run: asyncio.Task[None]) -> None:
        self._runs.discard(run)
        self._pool.apart.pop(delivery, None)
        self._freed.set()
        self._pool.freed.set()
        if not run.cancelled():
            self._error = self._error or run.exception()

    # --- stop ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Claim no more. A suspect whose child is not ready yet is given back as if it had never been claimed."""
        self._stopping.set()
        self._freed.set()

    def interrupt_running(self) -> None:
        """Interrupt handlers after the grace period, and kill children that do not end them."""
        for child in self._running.values():
            child.send(Interrupt())
            child.kill_after(_END_WITHIN)

    def cancel(self, requests: Mapping[Receipt, str]) -> None:
        """Cancel suspects that run. A child that does not end is killed."""
        for delivery, child in self._running.items():
            if delivery.claim.receipt in requests and delivery.cancelled is None:
                delivery.cancelled = requests[delivery.claim.receipt]
                child.send(Interrupt())
                child.kill_after(_END_WITHIN)

    async def finish(self) -> None:
        """Wait until no suspect runs."""
        while self._runs:
            await asyncio.wait(self._runs)

    # --- run ----------------------------------------------------------------------------------------

    async def _run(self, delivery: Delivery) -> None:
        limit = self._pool.of(delivery.queue).max_crashes
        # An earlier message may have left something behind in a used child. It must not make this one FAILED.
        unused = limit is not None and delivery.claim.crashes >= limit
        try:
            child = await until_stopped(self._stopping, self._children.take(unused=unused))
        except NotStarted:
            child = None
        if child is None:
            self._settle(delivery, GiveBack(delivery.claim.receipt))
            return
        alive = False
        self._running[delivery] = child
        try:
            alive = await self._handle(delivery, child)
            if not alive:
                how = await child.how_it_ended()
                if child.started:
                    self._settle_death(delivery, how, alone=not child.used)
                else:
                    if not self._stopping.is_set():
                        self._children.pause(how)
                    self._settle_open(delivery, GiveBack(delivery.claim.receipt))
        finally:
            del self._running[delivery]
            if alive:
                self._children.keep(child)
            else:
                await self._children.drop(child)

    async def _handle(self, delivery: Delivery, child: ChildProcess) -> bool:
        """Serve a child while its handler runs; False if its process has ended before the handler."""
        if delivery.lost:  # while the child started
            return True
        try:
            child.send(Run(delivery.claim))
        except Exception as e:  # this message alone must not run
            keep = self._pool.of(delivery.queue).keep_rejected
            self._settle(delivery, Reject(delivery.claim.receipt, "undecodable", describe(e), keep, attempted=False))
            return True
        timeout = self._subscription.timeout_s
        child.kill_after(None if timeout is None else timeout + _TIMEOUT_WITHIN)
        self._pool.apart[delivery] = partial(child.send, ReceiptStale(delivery.claim.receipt))
        child.started = False
        while (message := await child.receive()) is not None:
            match message:
                case Idle():
                    child.kill_after(None)
                    self._settle_open(delivery, GiveBack(delivery.claim.receipt, delivered=True))
                    return True
                case Started():
                    child.started = True
                    self._pool.started_count += 1
                case Settle(outcome, in_transaction) if outcome.receipt == delivery.claim.receipt:
                    child.kill_after(_END_WITHIN)
                    delivery.decided_in_transaction = in_transaction
                    self._settle(delivery, outcome)
                case Write(outcome) if outcome.receipt != delivery.claim.receipt:
                    child.send(WriteAnswer(False))  # of an earlier message, which was settled without it
                case Write(outcome):
                    delivery.decided, delivery.decided_in_transaction = outcome, False
                    child.send(WriteAnswer(await self._settle_loop.write(delivery, outcome)))
                case Lost(receipt, announced) if receipt == delivery.claim.receipt:
                    self._pool.lose(delivery, announced)
                case Announce(event):
                    self._children.announce(event)
                case StopWorker():
                    self._stop_worker()
        return False

    def _settle_death(self, delivery: Delivery, how: str, *, alone: bool) -> None:
        """The child has ended. `alone`: no other message has ever run in it."""
        s, receipt, crashes = self._pool.of(delivery.queue), delivery.claim.receipt, delivery.claim.crashes + 1
        outcome: Outcome
        counts = f"crash {crashes}"
        if self._stopping.is_set() or delivery.cancelled is not None:
            outcome, counts = GiveBack(receipt, delivered=True), "this is no crash"
        elif alone and s.max_crashes is not None and crashes >= s.max_crashes:
            error = f"its process ended while it ran alone there: {how}; crash {crashes} (limit {s.max_crashes})"
            outcome = Reject(receipt, "max_crashes", error, keep=s.keep_rejected, attempted=False)
        else:
            outcome = GiveBack(receipt, crashed=True, delay=crash_delay(crashes))
        if self._settle_open(delivery, outcome):
            what = "FAILED" if isinstance(outcome, Reject) else "given back"
            text = "message %s %s: its child process ended, %s; %s"
            log.error(text, delivery.id, what, how, counts, extra=log_fields(delivery))

    def _settle_open(self, delivery: Delivery, outcome: Outcome) -> bool:
        """Settle a message on which neither its handler nor the worker has decided."""
        if delivery.concluded or delivery.decided is not None or delivery not in self._pool.held:
            return False
        # A handler may have committed a decision in its own transaction: that is found out before this one is written.
        delivery.decided_in_transaction = True
        self._settle(delivery, outcome)
        return True

    def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        if delivery in self._pool.held:
            if delivery.cancelled is not None and isinstance(outcome, GiveBack):
                keep = self._pool.of(delivery.queue).keep_rejected
                outcome = Reject(delivery.claim.receipt, self._pool.redact(delivery.cancelled), keep=keep)
            delivery.concluded = True
            self._settle_loop.add(delivery, outcome)
