"""Claimed deliveries with their receipts and leases, and the last outcomes."""

from __future__ import annotations

from uuid import UUID

import msgspec

from millpond.message import Receipt, State
from millpond.transports.rabbitmq.channel import TAG_BITS, Channel
from millpond.transports.rabbitmq.consumer import Consumer, ReceivedMessage

_REMEMBERED = 100_000
_MAX_CUTS = 10


class HeldDelivery(msgspec.Struct, gc=False):
    """A claimed delivery."""

    receipt: Receipt
    received: ReceivedMessage
    consumer: Consumer
    claimed_us: int
    lease_us: int


class Receipts:
    """Held deliveries by receipt. A lease ends by this process's clock, or at once with its channel."""

    def __init__(self) -> None:
        self._held: dict[Receipt, HeldDelivery] = {}
        self._settled: dict[UUID, tuple[int, State]] = {}
        """Last outcome of each id, to recognise a repeated settle. The oldest are forgotten."""
        self._next_lapse = 0
        self._cuts: dict[UUID, int] = {}
        """By id: deliveries that ended because this process lost its connection. They are no crashes."""

    def add(self, received: ReceivedMessage, consumer: Consumer, now: int, lease: int) -> Receipt:
        receipt = Receipt(received.envelope.id, received.channel.generation << TAG_BITS | received.tag)
        self._held[receipt] = HeldDelivery(receipt, received, consumer, now, now + lease)
        self._settled.pop(receipt.id, None)
        self._next_lapse = min(self._next_lapse, now + lease) if len(self._held) > 1 else now + lease
        consumer.claimed += 1
        return receipt

    def get(self, receipt: Receipt) -> HeldDelivery | None:
        return self._held.get(receipt)

    def take(self, receipt: Receipt) -> HeldDelivery | None:
        """Remove and return a delivery, to settle it."""
        delivery = self._held.pop(receipt, None)
        if delivery is not None:
            delivery.consumer.claimed -= 1
        return delivery

    def put_back(self, delivery: HeldDelivery) -> None:
        """Hold a delivery again that could not be settled."""
        if not delivery.received.channel.closed:
            self._held[delivery.receipt] = delivery
            delivery.consumer.claimed += 1
            self._next_lapse = min(self._next_lapse, delivery.lease_us)

    def extend(self, receipt: Receipt, until: int, longest: int) -> bool:
        delivery = self._held.get(receipt)
        if delivery is None:
            return False
        delivery.lease_us = min(until, delivery.received.received_us + longest)
        self._next_lapse = min(self._next_lapse, delivery.lease_us)
        return True

    def remember(self, receipt: Receipt, state: State) -> None:
        """Record the outcome of a receipt."""
        self._settled[receipt.id] = receipt.token, state
        self._cuts.pop(receipt.id, None)
        if len(self._settled) > _REMEMBERED:
            del self._settled[next(iter(self._settled))]

    def was_settled(self, receipt: Receipt, state: State) -> bool:
        return self._settled.get(receipt.id) == (receipt.token, state)

    def take_lapsed(self, now: int) -> list[HeldDelivery]:
        """Remove and return the deliveries whose leases have ended."""
        if now < self._next_lapse:
            return []
        over = [receipt for receipt, delivery in self._held.items() if delivery.lease_us <= now]
        lapsed = [delivery for receipt in over if (delivery := self.take(receipt)) is not None]
        self._next_lapse = min((delivery.lease_us for delivery in self._held.values()), default=0)
        return lapsed

    def remove_channel(self, channel: Channel) -> None:
        for receipt in [r for r, delivery in self._held.items() if delivery.received.channel is channel]:
            self.take(receipt)
            self.count_cut(receipt.id)

    def count_cut(self, id_: UUID) -> None:
        self._cuts[id_] = self._cuts.pop(id_, 0) + 1
        if len(self._cuts) > _REMEMBERED:
            del self._cuts[next(iter(self._cuts))]

    def cuts(self, id_: UUID) -> int:
        """Number of deliveries of a message that were cut off, but not without end: its handler may be the cause."""
        return min(self._cuts.get(id_, 0), _MAX_CUTS) if self._cuts else 0
