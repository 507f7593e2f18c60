"""A transport that announces what passes through it. Every backend is observed at this one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal
from uuid import UUID

from millpond.clock import Seconds
from millpond.message import Claim, Message, Published, Receipt
from millpond.outcome import MAX_CRASHES, Ack, GiveBack, Nack, Outcome, Reject
from millpond.telemetry import Claimed, LeasesLost, Reaped, Reconnected, Settled, Telemetry
from millpond.telemetry import Published as PublishedEvent
from millpond.transport import DEFAULT_LEASE, Capability, Store, Transport

Kind = Literal["ack", "nack", "reject", "give back"]
_KINDS: dict[type[Outcome], Kind] = {Ack: "ack", Nack: "nack", Reject: "reject", GiveBack: "give back"}
_MOST = 100_000


class Observed:
    """The transport within, with announcements; whatever else it can do passes straight through."""

    def __init__(self, transport: Transport, telemetry: Telemetry) -> None:
        self._inner = transport
        self._telemetry = telemetry
        self._queues: dict[UUID, str] = {}
        """Of what is claimed and not settled, the queue: a receipt does not tell it. The oldest are forgotten
        when there are many, since those whose lease was lost may never be settled."""
        if hasattr(transport, "on_reconnect"):
            transport.on_reconnect = lambda after: telemetry.announce(Reconnected(after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"<observed {self._inner!r}>"

    @property
    def capabilities(self) -> Capability:
        return self._inner.capabilities

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        published = await self._inner.publish(messages, within=within)
        self._published(messages, published)
        return published

    def publish_sync(self, messages: Sequence[Message], *, within: Any) -> list[Published]:
        published: list[Published] = self._inner.publish_sync(messages, within=within)  # type: ignore[attr-defined]
        self._published(messages, published)
        return published

    async def claim(
        self,
        queues: Sequence[str],
        limit: int = 1,
        lease: Seconds = DEFAULT_LEASE,
        *,
        ids: Sequence[UUID] | None = None,
        max_crashes: int | None = MAX_CRASHES,
        max_deliveries: int | None = None,
        suspects: bool = True,
    ) -> list[Claim]:
        claims = await self._inner.claim(
            queues,
            limit,
            lease,
            ids=ids,
            max_crashes=max_crashes,
            max_deliveries=max_deliveries,
            suspects=suspects,
        )
        if claims and self._telemetry.wants(Claimed, Settled):
            count: Counter[str] = Counter()
            again: Counter[str] = Counter()
            for claim in claims:
                queue = claim.message.queue
                self._queues[claim.receipt.id] = queue
                count[queue] += 1
                again[queue] += claim.redelivered
            while len(self._queues) > _MOST:
                del self._queues[next(iter(self._queues))]
            for queue, n in count.items():
                self._telemetry.announce(Claimed(queue, n, again[queue]))
        return claims

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        # A refused extension is not announced: the message may just have been settled, and only whoever holds
        # it can tell.
        return await self._inner.extend(receipts, lease)

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any = None) -> list[Receipt]:
        refused = await self._inner.settle(outcomes, within=within)
        self._settled(outcomes, refused, forget=within is None)
        return refused

    def settle_sync(self, outcomes: Sequence[Outcome], *, within: Any) -> list[Receipt]:
        refused: list[Receipt] = self._inner.settle_sync(outcomes, within=within)  # type: ignore[attr-defined]
        self._settled(outcomes, refused, forget=False)
        return refused

    async def reap(self) -> int:
        count: int = await self._inner.reap()  # type: ignore[attr-defined]
        if count:
            self._telemetry.announce(Reaped(count))
        return count

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        await self._inner.wait(queues, timeout)

    async def close(self) -> None:
        await self._inner.close()

    def _published(self, messages: Sequence[Message], published: Sequence[Published]) -> None:
        if self._telemetry.wants(PublishedEvent):
            queues = Counter(m.queue for m, p in zip(messages, published, strict=True) if p.new)
            for queue, count in queues.items():
                self._telemetry.announce(PublishedEvent(queue, count))

    def _settled(self, outcomes: Sequence[Outcome], refused: Sequence[Receipt], *, forget: bool) -> None:
        """`forget`: no more is to come of these messages. A caller's transaction may yet be rolled back."""
        if self._telemetry.wants(Settled):
            stale = set(refused)
            counts: Counter[tuple[str, Kind]] = Counter()
            for outcome in outcomes:
                if not stale or outcome.receipt not in stale:
                    counts[self._queue(outcome.receipt, forget), _KINDS[type(outcome)]] += 1
            for (queue, kind), count in counts.items():
                self._telemetry.announce(Settled(queue, kind, count))
        if refused:
            for queue, count in Counter(self._queue(r, forget) for r in refused).items():
                self._telemetry.announce(LeasesLost(queue, count))

    def _queue(self, receipt: Receipt, forget: bool) -> str:
        return self._queues.pop(receipt.id, "") if forget else self._queues.get(receipt.id, "")


Store.register(Observed)  # its class does not show what it passes on
