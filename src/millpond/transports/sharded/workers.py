"""Workers over shards: a worker has a row on each shard that it claims from, and one beat writes them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from uuid import UUID

from millpond.clock import Seconds
from millpond.errors import MillpondError, ShardUnavailable, StoreUnavailable
from millpond.message import Receipt
from millpond.seam.workers import DEAD_AFTER, Presence, Step, StepClaim, Workers, WorkerStatus
from millpond.transports.database.store import DatabaseStore
from millpond.transports.sharded import members as members_
from millpond.transports.sharded.attended_shards import Attention
from millpond.transports.sharded.claims import ShardedClaims
from millpond.transports.sharded.members import Members, first_error
from millpond.transports.sharded.presence import ShardedPresence
from millpond.transports.sharded.shard import Shard
from millpond.transports.validation import check_receipts

T = TypeVar("T")
log = logging.getLogger("millpond")

_JOIN_WITHIN = 5.0
"""Seconds for which a worker waits for a shard before it starts without it. The shard is joined when it is back."""
_CHORE_GRACE = 1.0
"""Seconds for which a chore on all shards waits for one of them. It goes on there by itself."""


class ShardedWorkers:
    """The workers room."""

    def __init__(self, members: Members, claims: ShardedClaims) -> None:
        self._members = members
        self._claims = claims
        self.attention: Attention | None = None
        """Set for a worker of many shards."""
        self._name: str | None = None
        self._queues: Sequence[str] | None = None
        self._presence: ShardedPresence | None = None
        self._joining: dict[str, asyncio.Lock] = {}
        self._reaping: dict[str, asyncio.Task[int]] = {}
        self._reading: dict[str, asyncio.Task[dict[Receipt, str]]] = {}

    async def join(
        self, name: str | None = None, *, dead_after: Seconds = DEAD_AFTER, queues: Sequence[str] | None = None
    ) -> Presence:
        if self._presence is None or self._presence.left:
            self._name, self._queues, self._presence = name, queues, ShardedPresence(dead_after)
            if len(self._members.chosen) > members_.AT_ONCE:
                await self._stop_attention()
                self.attention = Attention(self._members, self._claims, self._presence)
            for shard in self._members.claimed:
                shard.attended = True
            results = await asyncio.gather(
                *(self._join(shard) for shard in self._members.claimed), return_exceptions=True
            )
            errors = [result for result in results if isinstance(result, BaseException)]
            if not self._presence.joined or any(not isinstance(error, StoreUnavailable) for error in errors):
                await self._presence.leave()
                raise first_error(errors)
        return self._presence

    async def _join(self, shard: Shard) -> None:
        presence = self._presence
        assert presence is not None
        # One at a time: the second row of a worker would replace the first, whose claims then lose their beats.
        async with self._joining.setdefault(shard.name, asyncio.Lock()):
            if shard.name in presence.joined or presence.left:
                return
            joined = await shard.call(
                lambda store: store.workers.join(self._name, dead_after=presence.dead_after, queues=self._queues),
                within=_JOIN_WITHIN,
            )
            presence.add(shard.name, joined)

    async def hold(self, shard: Shard) -> None:
        """Let the worker join a shard that was away when the worker started."""
        if self._presence is None or self._presence.left:
            raise MillpondError("claim(by_worker=True) needs a worker: call workers.join() first")
        if shard.name not in self._presence.joined:
            await self._join(shard)

    def may_claim(self, shard: Shard, lease: float) -> bool:
        """Whether the worker's beats hold new claims of this shard. `lease`: in seconds."""
        return self._presence is None or self._presence.left or self._presence.may_claim(shard.name, lease)

    async def status(self) -> list[WorkerStatus]:
        """Each row of a worker: it has one on every shard that it has joined, with the messages that it holds there."""
        parts = await self._members.ask(lambda store: store.workers.status())
        return sorted((one for part in parts for one in part), key=lambda one: one.name)

    async def reap(self) -> int:
        """Reap on each shard. One that takes long goes on by itself, and no other waits for it."""
        counts = await self._each(self._members.attended, self._reaping, lambda store: store.workers.reap())
        return sum(counts.values())

    async def _each(
        self,
        shards: Sequence[Shard],
        under_way: dict[str, asyncio.Task[T]],
        work: Callable[[DatabaseStore], Awaitable[T]],
    ) -> dict[str, T]:
        """The answers of the shards that answer soon. A shard is not called again before it has answered."""
        for shard in shards:
            if shard.name not in under_way and shard.available:
                under_way[shard.name] = asyncio.create_task(shard.call(work))
        if not under_way:
            raise shards[0].unavailable()
        done, _ = await asyncio.wait(under_way.values(), return_when=asyncio.FIRST_COMPLETED, timeout=_CHORE_GRACE)
        if len(done) < len(under_way):
            await asyncio.wait(under_way.values(), timeout=_CHORE_GRACE)
        answers: dict[str, T] = {}
        errors: list[BaseException] = []
        for name, task in list(under_way.items()):
            if task.done():
                del under_way[name]
                if task.cancelled():
                    continue
                if (error := task.exception()) is None:
                    answers[name] = task.result()
                else:
                    errors.append(error)
        if errors and not answers:
            raise first_error(errors)
        for error in errors:
            if not isinstance(error, ShardUnavailable):
                log.warning("a chore failed on one shard, tried again later: %s", error)
        return answers

    async def close(self) -> None:
        """End the chores that are under way."""
        try:
            await self._stop_attention()
        finally:  # also if the caller is cancelled
            tasks = [*self._reaping.values(), *self._reading.values()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CHORE_GRACE)

    async def _stop_attention(self) -> None:
        if self.attention is not None:
            await self.attention.close()
            self.attention = None

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        parts = await self._members.tell(lambda store: store.workers.cancel(ids, reason=reason))
        return [id_ for part in parts for id_ in part]

    async def cancel_requests(self) -> dict[Receipt, str]:
        parts = await self._each(self._members.claimed, self._reading, lambda store: store.workers.cancel_requests())
        return {Receipt(one.id, one.token, name): why for name, found in parts.items() for one, why in found.items()}

    async def begin_step(self, receipt: Receipt, step: Step) -> StepClaim:
        """Owners of a scope are known per shard: messages with the same key are on the same one."""
        return await self._shard(receipt).call(lambda store: store.workers.begin_step(receipt, step))

    async def finish_step(self, receipt: Receipt, step: Step, result: bytes) -> bool:
        return await self._shard(receipt).call(lambda store: store.workers.finish_step(receipt, step, result))

    def _shard(self, receipt: Receipt) -> Shard:
        """The receipt's shard. A receipt of no shard is stale, as every shard finds."""
        name = receipt.shard
        return self._members[name] if name is not None and name in self._members else self._members.shards[0]

    async def stale(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        return await self._by_shard(receipts, lambda store, part: store.workers.stale(part))

    async def detach(self, receipts: Sequence[Receipt], *, abandoned: bool = False) -> list[Receipt]:
        return await self._by_shard(receipts, lambda store, part: store.workers.detach(part, abandoned=abandoned))

    async def attach(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        return await self._by_shard(receipts, lambda store, part: store.workers.attach(part))

    async def _by_shard(
        self, receipts: Sequence[Receipt], work: Callable[[DatabaseStore, list[Receipt]], Awaitable[list[Receipt]]]
    ) -> list[Receipt]:
        check_receipts(receipts)
        refused, errors, _ = await self._members.by_receipt(receipts, lambda receipt: receipt, work)
        if errors:
            raise first_error(errors.values())
        return refused


_room: Callable[[Members, ShardedClaims], Workers] = ShardedWorkers
