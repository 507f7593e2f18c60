"""How a worker keeps its claims: by its presence where the transport has one, otherwise by extending each lease.

Both run in the heartbeat's thread. Messages of handlers that hang are not kept: they come back after a lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from millpond.clock import Seconds, monotonic, seconds
from millpond.errors import MillpondError
from millpond.halves import NOT_THE_ROWS, by_halves
from millpond.message import Receipt
from millpond.seam.transport import Transport
from millpond.seam.workers import Presence, Workers
from millpond.worker.delivery import Delivery
from millpond.worker.handler_pool import HandlerPool

log = logging.getLogger("millpond.worker")

_BATCH = 1000
"""Maximum number of receipts in one call."""
_SHARD_WITHIN = 0.2
"""Seconds for which a round waits for the slower shards. Their reads go on."""

CallPool = Callable[..., None]
"""Calls a method of a pool in the worker's event loop."""


class Leases(Protocol):
    @property
    def safe(self) -> bool:
        """Whether the worker may claim: False if leases may have ended unnoticed."""

    def check_now(self) -> None:
        """The worker was silent for long: other workers may have taken its messages."""

    async def keep(self, transport: Transport, call_pool: CallPool) -> None:
        """Keep the claims of all pools, and drop those that were lost. Called about twice a second."""

    async def close(self) -> None:
        """End the calls that are under way."""


class ExtendedLeases:
    """Extends each lease, for transports without presence."""

    def __init__(self, pools: Sequence[HandlerPool], *, in_thread: bool) -> None:
        self._pools = pools
        self._in_thread = in_thread
        self._extended = {pool: monotonic() for pool in pools}
        self._ok = True

    @property
    def safe(self) -> bool:
        # Leases may have ended unnoticed, for example after a handler that blocked the loop of a heartbeat without a
        # thread. They are extended before more is claimed.
        now = monotonic()
        for pool, at in self._extended.items():
            s = pool.shortest
            if pool.held and now - at > (seconds(s.lease) if self._in_thread else 2 * s.heartbeat_s):
                return False
        return self._ok

    def check_now(self) -> None:
        """Not called: without presence no other worker judges this one."""

    async def keep(self, transport: Transport, call_pool: CallPool) -> None:
        try:
            for pool in self._pools:
                if monotonic() - self._extended[pool] >= pool.shortest.heartbeat_s:
                    await self._extend(transport, pool, call_pool)
            self._ok = True
        except Exception as e:
            if self._ok:  # log once, not twice a second
                _warn("leases cannot be extended, no claims", e)
            self._ok = False

    async def close(self) -> None:
        """No call outlives `keep`."""

    async def _extend(self, transport: Transport, pool: HandlerPool, call_pool: CallPool) -> None:
        began = monotonic()
        pool.take_abandoned()  # their leases end
        kept, _ = pool.kept_and_hung()
        by_lease: dict[Seconds, list[Delivery]] = {}
        for delivery in kept:
            by_lease.setdefault(delivery.lease, []).append(delivery)
        for lease, deliveries in by_lease.items():
            for batch in _batches(deliveries):
                if stale := await transport.extend(_receipts(batch), lease):
                    call_pool(pool.drop_refused, stale)
        self._extended[pool] = began  # not before: a failed extend is retried at once


class HeldLeases:
    """The worker's row holds all claims. Messages of handlers that hang are detached from it.

    Lost leases are found by reading: at once after a silence of the worker, and every `heartbeat` seconds. Each shard
    is read by itself, so that one that does not answer delays no other.
    """

    def __init__(self, pools: Sequence[HandlerPool], presence: Presence | None = None) -> None:
        self._pools = pools
        self._presence = presence
        self._shards: dict[str | None, _ShardLeases] = {None: _ShardLeases(pools, None)}
        self._under_way: dict[str | None, asyncio.Task[None]] = {}

    @property
    def safe(self) -> bool:
        """Shards in doubt are left out by the transport's claims."""
        return not self._shards[None].unchecked

    def check_now(self) -> None:
        for leases in list(self._shards.values()):
            leases.check_now()

    async def keep(self, transport: Transport, call_pool: CallPool) -> None:
        for pool in self._pools:
            for delivery in pool.take_abandoned():
                self._of(delivery.claim.receipt.shard).abandoned[pool].add(delivery)
            for shard in {delivery.claim.receipt.shard for delivery in list(pool.held)}:
                self._of(shard)
        doubts = {} if self._presence is None else self._presence.doubtful
        for shard in doubts:
            self._of(shard)
        if len(self._shards) == 1:
            await self._shards[None].keep(transport, call_pool)
            return
        for shard, leases in self._shards.items():
            if shard not in self._under_way:
                doubt = None if shard is None else doubts.get(shard)
                self._under_way[shard] = asyncio.create_task(self._keep(leases, doubt, transport, call_pool))
        await asyncio.wait(self._under_way.values(), timeout=_SHARD_WITHIN)
        for shard, task in list(self._under_way.items()):
            if task.done():
                del self._under_way[shard]
                task.result()

    def _of(self, shard: str | None) -> _ShardLeases:
        if shard not in self._shards:
            self._shards[shard] = _ShardLeases(self._pools, shard)
        return self._shards[shard]

    async def _keep(self, leases: _ShardLeases, doubt: int | None, transport: Transport, call_pool: CallPool) -> None:
        if doubt is not None:
            leases.check_now()
        await leases.keep(transport, call_pool)
        if doubt is not None and not leases.unchecked and self._presence is not None and leases.shard is not None:
            self._presence.trust(leases.shard, doubt)

    async def close(self) -> None:
        """End the reads that are under way."""
        for task in self._under_way.values():
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=1.0)


class _ShardLeases:
    """The claims of one shard; without shards, of the only database."""

    def __init__(self, pools: Sequence[HandlerPool], shard: str | None) -> None:
        self.shard = shard
        self._pools = pools
        self._checked = {pool: monotonic() for pool in pools}
        self.unchecked: set[HandlerPool] = set()
        """Pools to check at once, before more is claimed."""
        self._detached: dict[HandlerPool, set[Delivery]] = {pool: set() for pool in pools}
        self._unsure: dict[HandlerPool, set[Delivery]] = {pool: set() for pool in pools}
        """Perhaps detached: the reply was lost."""
        self.abandoned: dict[HandlerPool, set[Delivery]] = {pool: set() for pool in pools}
        """Messages that no handler has any more, still to be detached."""
        self._ok = True
        self._error: Exception | None = None
        """The error of messages that the database refuses to detach or attach."""

    def check_now(self) -> None:
        self.unchecked.update(self._pools)

    async def keep(self, transport: Transport, call_pool: CallPool) -> None:
        error = self._error = None
        for pool in self._pools:
            for work in (self._check, self._detach):
                try:
                    await work(transport.workers, pool, call_pool)
                except Exception as e:
                    error = e
        error = error or self._error
        if error is not None and self._ok:  # log once, not twice a second
            _warn("claims cannot be checked", error)
        self._ok = error is None

    def _mine(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        return [delivery for delivery in deliveries if delivery.claim.receipt.shard == self.shard]

    async def _check(self, workers: Workers, pool: HandlerPool, call_pool: CallPool) -> None:
        began = monotonic()
        if pool in self.unchecked or began - self._checked[pool] >= pool.shortest.heartbeat_s:
            held = [delivery for delivery in self._mine(list(pool.held)) if not delivery.lost]
            for batch in _batches(held):
                if stale := await workers.stale(_receipts(batch)):
                    call_pool(pool.drop_refused, stale)
            self._checked[pool] = began
            self.unchecked.discard(pool)

    async def _detach(self, workers: Workers, pool: HandlerPool, call_pool: CallPool) -> None:
        """Detach messages of handlers that hang, and those that no handler has; attach those that hang no more."""
        kept, hung = map(self._mine, pool.kept_and_hung())
        detached, abandoned = self._detached[pool], self.abandoned[pool]
        unsure = self._unsure[pool]
        for own in (detached, unsure):
            own.intersection_update([*kept, *hung])  # the others are settled
        wanted = set(hung) - detached
        unsure.update(wanted)
        written, stale = await self._write(workers, workers.detach, wanted)
        unsure.difference_update(wanted)
        detached.update(written)
        written, gone = await self._write(workers, partial(workers.detach, abandoned=True), abandoned)
        abandoned.difference_update(written, gone)
        written, lost = await self._write(workers, workers.attach, (detached | unsure).difference(hung))
        for own in (detached, unsure):
            own.difference_update(written, lost)
        if stale or lost:
            call_pool(pool.drop_refused, _receipts(stale | lost))

    async def _write(
        self, workers: Workers, verb: Callable[[Sequence[Receipt]], Awaitable[list[Receipt]]], wanted: set[Delivery]
    ) -> tuple[set[Delivery], set[Delivery]]:
        """Detach or attach messages; returns those that were written, and those with a stale receipt.

        The others are locked by another transaction, or refused, and tried again later.
        """
        written: set[Delivery] = set()
        stale: set[Delivery] = set()

        async def write(batch: Sequence[Delivery]) -> None:
            missing = set(await verb(_receipts(batch)))
            gone = set(await workers.stale(list(missing))) if missing else missing
            written.update(delivery for delivery in batch if delivery.claim.receipt not in missing)
            stale.update(delivery for delivery in batch if delivery.claim.receipt in gone)

        halved = await by_halves(write, list(_batches(list(wanted))))
        if isinstance(halved.error, NOT_THE_ROWS):
            raise halved.error
        self._error = self._error or halved.error
        return written, stale


def _receipts(deliveries: Iterable[Delivery]) -> list[Receipt]:
    return [delivery.claim.receipt for delivery in deliveries]


def _batches(deliveries: Sequence[Delivery]) -> Iterator[Sequence[Delivery]]:
    return (deliveries[start : start + _BATCH] for start in range(0, len(deliveries), _BATCH))


def _warn(event: str, error: Exception) -> None:
    log.warning("%s: %s", event, error, exc_info=None if isinstance(error, MillpondError) else error)
