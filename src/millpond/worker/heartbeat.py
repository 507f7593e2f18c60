"""The heartbeat: the worker's presence beats, claims are kept, messages that no slot takes go back.

All this happens in a thread with its own connections. Otherwise a handler that blocks the event loop would lose its
lease before its timeout. For a transport that only this event loop can use, a task does it instead; then overdue leases
are extended before anything is claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

from millpond.clock import monotonic, seconds
from millpond.errors import DataRefused, MillpondError, StoreBusy, WorkerStuck
from millpond.halves import by_halves
from millpond.loop import Backoff, until_stopped
from millpond.message import Receipt
from millpond.outcome import GiveBack
from millpond.seam.transport import Transport
from millpond.seam.workers import Presence
from millpond.worker.delivery import Delivery
from millpond.worker.handler_pool import HandlerPool
from millpond.worker.leases import CallPool, ExtendedLeases, HeldLeases, Leases

log = logging.getLogger("millpond.worker")

BEAT_EVERY = 0.5
_BEAT_RETRY = 0.1
"""Seconds until the next try after a failed beat. It is short: after an outage a slower worker would seem dead."""
_FINISH_WITHIN = 1.0
_END_WITHIN = 6.0
"""Seconds to end after a cancel: a presence takes up to five to leave a database that does not answer."""

Connect = Callable[[], Awaitable[Transport]]


class Heartbeat:
    """Beats and keeps claims until stopped. `connect` opens a transport for the thread; None: use a task here.

    `cancel_cut_off`: interrupt async handlers when no beat has succeeded for `dead_after`.
    """

    def __init__(
        self,
        transport: Transport,
        connect: Connect | None,
        presence: Presence | None,
        pools: Sequence[HandlerPool],
        *,
        cancel_cut_off: bool = False,
    ) -> None:
        self._transport = transport
        self._connect = connect
        self._presence = presence
        self._pools = pools
        self._loop = asyncio.get_running_loop()
        self._cancel_cut_off = cancel_cut_off
        self._beat_ok = True
        self._beat_at = monotonic()
        """Start of the last beat that succeeded."""
        self._leases: Leases
        if presence is None:
            self._leases = ExtendedLeases(pools, in_thread=connect is not None)
        else:
            self._leases = HeldLeases(pools, presence)
        self._running = False
        self._beat_loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stopping = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._keep_now = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def _least_lease(self) -> float:
        """Seconds; an operator may change the leases of queues."""
        return max(2 * BEAT_EVERY, min(seconds(pool.shortest.lease) for pool in self._pools))

    @property
    def alive(self) -> bool:
        """Whether beats succeed and claims are kept. While this fails, the worker claims no messages."""
        if self._presence is not None and monotonic() - self._beat_at > self._least_lease:
            return False  # other workers could take a new claim at once
        return self._beat_ok and self._leases.safe and not self._ended.is_set()

    def start(self) -> None:
        if self._connect is None:
            self._task = asyncio.create_task(self._run_as_task())
        else:
            threading.Thread(target=self._thread_main, name="millpond-heartbeat", daemon=True).start()

    def announce_stop(self) -> None:
        """Record at once that the worker stops: if it is killed from now on, that is no crash of its messages."""
        if self._presence is not None:
            self._presence.announce_stop()
            self._call_in_beat_loop(self._beat_now.set)

    async def stop(self) -> None:
        """End within a few seconds."""
        for event in (self._stopping, self._beat_now, self._keep_now):
            self._call_in_beat_loop(event.set)
        if not await self._wait_for_end(_FINISH_WITHIN) and self._task is not None:
            self._call_in_beat_loop(self._task.cancel)  # it waits for a database that does not answer
            await self._wait_for_end(_END_WITHIN)
        if self._presence is not None and not self._running:
            await self._presence.leave()  # its session was never used in the thread

    async def raise_when_ended(self) -> None:
        """Wait until the heartbeat ends, and raise: until `stop` it must not."""
        await self._ended.wait()
        reason = "it was cancelled" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        raise WorkerStuck(
            f"the heartbeat of the worker ended ({reason}): no lease is kept; start a new process"
        ) from self._error

    async def _wait_for_end(self, within: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._ended.wait()
        return self._ended.is_set()

    async def _run_as_task(self) -> None:
        self._beat_loop = self._loop
        try:
            await self._run(self._transport, lambda call, *args: call(*args))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            self._error = e
        finally:
            self._ended.set()

    def _thread_main(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(self._connect_and_run())
        except BaseException as e:  # a panic of a library included; the worker raises it
            self._error = e
        finally:
            _call_in(self._loop, self._ended.set)

    async def _connect_and_run(self) -> None:
        assert self._connect is not None
        self._task, self._beat_loop = asyncio.current_task(), asyncio.get_running_loop()
        while not self._stopping.is_set():
            try:
                transport = await self._connect()
            except Exception as e:
                self._beat_ok = False
                log.warning("heartbeat cannot connect, no claims: %s", e)
                await self._sleep(BEAT_EVERY)
                continue
            try:
                await self._run(transport, partial(_call_in, self._loop))
            finally:
                with contextlib.suppress(Exception):  # it may be lost already
                    await transport.close()

    def _call_in_beat_loop(self, call: Callable[..., Any]) -> None:
        """Call in the loop of the heartbeat. A thread that has not begun waits for no event yet."""
        if self._beat_loop is None:
            call()
        else:
            _call_in(self._beat_loop, call)

    async def _sleep(self, delay: float) -> None:
        await until_stopped(self._stopping, asyncio.sleep(delay))

    async def _run(self, transport: Transport, call_pool: CallPool) -> None:
        self._running = True
        try:
            # Concurrently: the others may wait for a database that is away. The beat must not wait with them, because
            # it proves to other workers that this one is alive when the database is back.
            await asyncio.gather(
                self._beat_until_stopped(),
                self._interrupt_cut_off(call_pool),
                self._keep_until_stopped(transport, call_pool),
                *(self._give_back_until_stopped(transport, pool, call_pool) for pool in self._pools),
            )
        finally:
            await self._leases.close()
            if self._presence is not None:
                await self._presence.leave()  # in this loop, which owns its session

    async def _beat_until_stopped(self) -> None:
        while self._presence is not None:
            try:
                self._beat_ok = await self._beat(self._presence)
            except Exception as e:
                if self._beat_ok:  # log once, not twice a second
                    trace = None if isinstance(e, MillpondError) else e
                    log.warning("heartbeat failed, no claims: %s", e, exc_info=trace)
                self._beat_ok = False
            if self._stopping.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_EVERY if self._beat_ok else _BEAT_RETRY):
                    await self._beat_now.wait()
            self._beat_now.clear()

    async def _beat(self, presence: Presence) -> bool:
        began = monotonic()
        if not await presence.beat():
            return False
        # After a long silence other workers may have taken messages: that is found out before more is claimed.
        if monotonic() - self._beat_at > min(presence.dead_after, self._least_lease):
            self._leases.check_now()
            self._keep_now.set()
        self._beat_at = began
        return True

    async def _interrupt_cut_off(self, call_pool: CallPool) -> None:
        """Interrupt handlers when other workers may take their messages, if the worker has this option."""
        while self._presence is not None and self._cancel_cut_off and not self._stopping.is_set():
            left = self._presence.dead_after - (monotonic() - self._beat_at)
            shards = self._presence.cut_off
            if left <= 0 or shards:
                for pool in self._pools:
                    call_pool(pool.interrupt_cut_off, None if left <= 0 else shards)
            await self._sleep(min(left, BEAT_EVERY) if left > 0 else BEAT_EVERY)

    async def _keep_until_stopped(self, transport: Transport, call_pool: CallPool) -> None:
        while not self._stopping.is_set():
            await self._leases.keep(transport, call_pool)
            pause = min([BEAT_EVERY, *(pool.shortest.heartbeat_s / 2 for pool in self._pools)])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._keep_now.wait()
            self._keep_now.clear()

    async def _give_back_until_stopped(self, transport: Transport, pool: HandlerPool, call_pool: CallPool) -> None:
        """Give back messages that no slot takes, as if they had never been claimed."""
        stalled: dict[str | None, list[Delivery]] = {}
        under_way: dict[str | None, asyncio.Task[bool]] = {}
        pauses: dict[str | None, Backoff] = {}
        next_try: dict[str | None, float] = {}
        try:
            while not self._stopping.is_set():
                for delivery in pool.take_stalled():
                    stalled.setdefault(delivery.claim.receipt.shard, []).append(delivery)
                for shard in list(stalled):
                    if shard not in under_way and monotonic() >= next_try.get(shard, 0.0):
                        work = self._give_back(transport, pool, call_pool, stalled.pop(shard), stalled)
                        under_way[shard] = asyncio.create_task(work)
                await self._sleep(BEAT_EVERY)
                for shard, task in list(under_way.items()):
                    if task.done():
                        del under_way[shard]
                        if task.result():
                            pauses.pop(shard, None)
                        else:
                            pause = pauses.setdefault(shard, Backoff(BEAT_EVERY, 30.0))
                            next_try[shard] = monotonic() + pause.next()
        finally:
            for task in under_way.values():
                task.cancel()
            if under_way:
                await asyncio.wait(under_way.values(), timeout=_FINISH_WITHIN)

    async def _give_back(
        self,
        transport: Transport,
        pool: HandlerPool,
        call_pool: CallPool,
        deliveries: list[Delivery],
        stalled: dict[str | None, list[Delivery]],
    ) -> bool:
        """Give back messages of one shard, by halves after an error.

        The settle loop takes over those that cannot be written alone, or are locked. If nothing can be written, all are
        stalled again.
        """
        by_receipt = {delivery.claim.receipt: delivery for delivery in deliveries}

        async def settle(part: Sequence[Receipt]) -> None:
            left: Collection[Receipt] = ()
            try:
                await transport.settle([GiveBack(receipt) for receipt in part], wait=False)
            except (StoreBusy, DataRefused) as e:
                if not e.receipts:
                    raise
                left = set(e.receipts)  # all others were written
            call_pool(pool.drop_given_back, [by_receipt[receipt] for receipt in part if receipt not in left])
            call_pool(pool.give_back, [by_receipt[receipt] for receipt in left])

        halved = await by_halves(settle, [list(by_receipt)])
        if halved.error is None:
            return True
        log.warning("messages cannot go back now: %d (%s)", len(halved.alone) + len(halved.left), halved.error)
        again = [by_receipt[receipt] for receipt in halved.left]
        alone = [by_receipt[receipt] for receipt in halved.alone]
        if halved.done:
            call_pool(pool.give_back, alone)
        else:
            again += alone  # perhaps nothing can be written
        if again:
            stalled.setdefault(deliveries[0].claim.receipt.shard, []).extend(again)
        return bool(halved.done)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(call, *args)
