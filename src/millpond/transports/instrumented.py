"""A transport that emits telemetry. Every backend is instrumented here and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from millpond.clock import Seconds, monotonic
from millpond.errors import DataRefused, StoreBusy
from millpond.message import Claim, Message, Published, Receipt
from millpond.outcome import Ack, GiveBack, Nack, Outcome, Reject
from millpond.seam.transport import DEFAULT_LEASE, Capability, Transport
from millpond.seam.workers import DEAD_AFTER, Presence, Step, StepClaim, Workers, WorkerStatus
from millpond.telemetry import (
    Event,
    LeasesLost,
    MessagesClaimed,
    MessagesPublished,
    MessagesSettled,
    Reaped,
    Telemetry,
)

if TYPE_CHECKING:
    from millpond.seam.access import Access
    from millpond.seam.bulk import Bulk
    from millpond.seam.diagnosis import Diagnosis
    from millpond.seam.exports import Exports
    from millpond.seam.operations import Operations
    from millpond.seam.periodic import PeriodicMessages
    from millpond.seam.streams import Streams
    from millpond.seam.transactions import Transactions

Kind = Literal["ack", "nack", "reject", "give back"]
_KINDS: dict[type[Outcome], Kind] = {Ack: "ack", Nack: "nack", Reject: "reject", GiveBack: "give back"}


class Instrumented:
    """The six verbs of a transport, its rooms, and an event for each result."""

    def __init__(self, transport: Transport, telemetry: Telemetry) -> None:
        self._inner = transport
        self._events = _Events(telemetry)
        transport.on_event = telemetry.announce

    def __repr__(self) -> str:
        return f"<instrumented {self._inner!r}>"

    @property
    def capabilities(self) -> Capability:
        return self._inner.capabilities

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        return self._inner.on_event

    @on_event.setter
    def on_event(self, call: Callable[[Event], None] | None) -> None:
        self._inner.on_event = call

    @property
    def missing_shards(self) -> tuple[str, ...]:
        return self._inner.missing_shards

    @property
    def operations(self) -> Operations:
        return self._inner.operations

    @property
    def periodic(self) -> PeriodicMessages:
        return self._inner.periodic

    @property
    def streams(self) -> Streams:
        return self._inner.streams

    @property
    def bulk(self) -> Bulk:
        return self._inner.bulk

    @property
    def exports(self) -> Exports:
        return self._inner.exports

    @property
    def access(self) -> Access:
        return self._inner.access

    @property
    def diagnosis(self) -> Diagnosis:
        return self._inner.diagnosis

    @cached_property
    def transactions(self) -> Transactions:
        return InstrumentedTransactions(self._inner.transactions, self._events)

    @cached_property
    def workers(self) -> Workers:
        return _InstrumentedWorkers(self._inner.workers, self._events.telemetry)

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        began = monotonic()
        published = await self._inner.publish(messages, within=within)
        self._events.published(messages, published, began)
        return published

    async def claim(
        self,
        queues: Sequence[str],
        limit: int = 1,
        lease: Seconds = DEFAULT_LEASE,
        *,
        ids: Sequence[UUID] | None = None,
        max_deliveries: int | None = None,
        suspects: bool = True,
        others: bool = True,
        ahead: bool = False,
        by_worker: bool = False,
    ) -> list[Claim]:
        began = monotonic()
        claims = await self._inner.claim(
            queues,
            limit,
            lease,
            ids=ids,
            max_deliveries=max_deliveries,
            suspects=suspects,
            others=others,
            ahead=ahead,
            by_worker=by_worker,
        )
        self._events.claimed(claims, began)
        return claims

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        # A refused extension emits nothing: the message may just have been settled, and only its holder knows.
        return await self._inner.extend(receipts, lease)

    async def settle(
        self, outcomes: Sequence[Outcome], *, within: Any = None, wait: bool = True, again: bool = False
    ) -> list[Receipt]:
        began = monotonic()
        try:
            refused = await self._inner.settle(outcomes, within=within, wait=wait, again=again)
        except (StoreBusy, DataRefused) as e:
            if e.receipts:
                left = set(e.receipts)
                written = [outcome for outcome in outcomes if outcome.receipt not in left]
                self._events.settled(written, e.refused, began, forget=within is None)
            raise
        self._events.settled(outcomes, refused, began, forget=within is None)
        return refused

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        await self._inner.wait(queues, timeout)

    async def close(self) -> None:
        await self._inner.close()


class InstrumentedTransactions:
    """The transactions room with events. A caller's transaction may still be rolled back after one."""

    def __init__(self, inner: Transactions, events: _Events) -> None:
        self._inner = inner
        self._events = events

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        began = monotonic()
        published = self._inner.publish_sync(messages, within=within)
        self._events.published(messages, published, began)
        return published

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        began = monotonic()
        refused = self._inner.settle_sync(outcomes, within=within)
        self._events.settled(outcomes, refused, began, forget=False)
        return refused

    async def once(self, id: UUID, key: str, *, within: Any) -> bool:
        return await self._inner.once(id, key, within=within)

    def once_sync(self, id: UUID, key: str, *, within: Any) -> bool:
        return self._inner.once_sync(id, key, within=within)

    def learn_from(self, other: Transactions) -> None:
        self._inner.learn_from(other._inner if isinstance(other, InstrumentedTransactions) else other)


class _InstrumentedWorkers:
    def __init__(self, inner: Workers, telemetry: Telemetry) -> None:
        self._inner = inner
        self._telemetry = telemetry

    async def join(
        self, name: str | None = None, *, dead_after: Seconds = DEAD_AFTER, queues: Sequence[str] | None = None
    ) -> Presence:
        return await self._inner.join(name, dead_after=dead_after, queues=queues)

    async def status(self) -> list[WorkerStatus]:
        return await self._inner.status()

    async def stale(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        return await self._inner.stale(receipts)

    async def detach(self, receipts: Sequence[Receipt], *, abandoned: bool = False) -> list[Receipt]:
        return await self._inner.detach(receipts, abandoned=abandoned)

    async def attach(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        return await self._inner.attach(receipts)

    async def cancel(self, ids: Sequence[UUID], *, reason: str = "cancelled") -> list[UUID]:
        return await self._inner.cancel(ids, reason=reason)

    async def cancel_requests(self) -> dict[Receipt, str]:
        return await self._inner.cancel_requests()

    async def begin_step(self, receipt: Receipt, step: Step) -> StepClaim:
        return await self._inner.begin_step(receipt, step)

    async def finish_step(self, receipt: Receipt, step: Step, result: bytes) -> bool:
        return await self._inner.finish_step(receipt, step, result)

    async def reap(self) -> int:
        count = await self._inner.reap()
        if count:
            self._telemetry.announce(Reaped(count))
        return count


class _Events:
    """Collects the messages of a call by queue and emits an event for each queue."""

    most_remembered = 100_000
    """Maximum number of claimed messages whose queue is remembered."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._queues: dict[UUID, str] = {}
        """Queue of each claimed message, which its receipt does not name. The oldest are forgotten when there are
        many: messages whose lease was lost may never be settled."""

    def published(self, messages: Sequence[Message], published: Sequence[Published], began: float) -> None:
        if self.telemetry.wants(MessagesPublished):
            queues: dict[str, list[UUID]] = {}
            for message, one in zip(messages, published, strict=True):
                if one.new:
                    queues.setdefault(message.queue, []).append(one.id)
            took = monotonic() - began
            for queue, ids in queues.items():
                self.telemetry.announce(MessagesPublished(queue, len(ids), tuple(ids), took))

    def claimed(self, claims: Sequence[Claim], began: float) -> None:
        if not claims or not self.telemetry.wants(MessagesClaimed, MessagesSettled):
            return
        claimed: dict[str, list[UUID]] = {}
        again: Counter[str] = Counter()
        for claim in claims:
            queue = claim.message.queue
            self._queues[claim.receipt.id] = queue
            claimed.setdefault(queue, []).append(claim.receipt.id)
            again[queue] += claim.redelivered
        while len(self._queues) > self.most_remembered:
            del self._queues[next(iter(self._queues))]
        took = monotonic() - began
        for queue, ids in claimed.items():
            self.telemetry.announce(MessagesClaimed(queue, len(ids), again[queue], tuple(ids), took))

    def settled(self, outcomes: Sequence[Outcome], refused: Sequence[Receipt], began: float, *, forget: bool) -> None:
        """`forget`: no more outcomes follow for these messages. A caller's transaction may be rolled back."""
        if self.telemetry.wants(MessagesSettled):
            stale = set(refused)
            settled: dict[tuple[str, Kind], list[UUID]] = {}
            for outcome in outcomes:
                if not stale or outcome.receipt not in stale:
                    to = self._queue(outcome.receipt, forget), _KINDS[type(outcome)]
                    settled.setdefault(to, []).append(outcome.receipt.id)
            took = monotonic() - began
            for (queue, kind), ids in settled.items():
                self.telemetry.announce(MessagesSettled(queue, kind, len(ids), tuple(ids), took))
        if refused:
            lost: dict[str, list[UUID]] = {}
            for receipt in refused:
                lost.setdefault(self._queue(receipt, forget), []).append(receipt.id)
            for queue, ids in lost.items():
                self.telemetry.announce(LeasesLost(queue, len(ids), tuple(ids)))

    def _queue(self, receipt: Receipt, forget: bool) -> str:
        return self._queues.pop(receipt.id, "") if forget else self._queues.get(receipt.id, "")


def instrumented_transactions(room: Transactions, telemetry: Telemetry) -> Transactions:
    """A transactions room that stands alone, without a transport."""
    return InstrumentedTransactions(room, _Events(telemetry))
