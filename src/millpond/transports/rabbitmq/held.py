"""What is claimed: who owns it, until when, and what became of what was settled a moment ago."""

from __future__ import annotations

from uuid import UUID

import msgspec

from millpond.message import Receipt, State
from millpond.transports.rabbitmq.driver import TAG_BITS, Channel
from millpond.transports.rabbitmq.source import Arrival, Source

_REMEMBERED = 100_000


class Hold(msgspec.Struct, gc=False):
    receipt: Receipt
    arrival: Arrival
    source: Source
    claimed_us: int
    lease_us: int


class Held:
    """Receipts and their leases. A lease ends by this process's clock; a lost channel ends it at once."""

    def __init__(self) -> None:
        self._holds: dict[Receipt, Hold] = {}
        self._settled: dict[UUID, tuple[int, State]] = {}
        """The last outcome of each id, so that the same settle again is known; the oldest are forgotten."""
        self._next_lapse = 0

    def add(self, arrival: Arrival, source: Source, now: int, lease: int) -> Receipt:
        receipt = Receipt(arrival.envelope.id, arrival.channel.generation << TAG_BITS | arrival.tag)
        self._holds[receipt] = Hold(receipt, arrival, source, now, now + lease)
        self._settled.pop(receipt.id, None)
        self._next_lapse = min(self._next_lapse, now + lease) if len(self._holds) > 1 else now + lease
        source.held += 1
        return receipt

    def get(self, receipt: Receipt) -> Hold | None:
        return self._holds.get(receipt)

    def take(self, receipt: Receipt) -> Hold | None:
        """Out of here, to be settled."""
        hold = self._holds.pop(receipt, None)
        if hold is not None:
            hold.source.held -= 1
        return hold

    def put_back(self, hold: Hold) -> None:
        """It could not be settled now."""
        if not hold.arrival.channel.closed:
            self._holds[hold.receipt] = hold
            hold.source.held += 1
            self._next_lapse = min(self._next_lapse, hold.lease_us)

    def extend(self, receipt: Receipt, until: int, longest: int) -> bool:
        hold = self._holds.get(receipt)
        if hold is None:
            return False
        hold.lease_us = min(until, hold.claimed_us + longest)
        self._next_lapse = min(self._next_lapse, hold.lease_us)
        return True

    def remember(self, receipt: Receipt, state: State) -> None:
        self._settled[receipt.id] = receipt.token, state
        if len(self._settled) > _REMEMBERED:
            del self._settled[next(iter(self._settled))]

    def settled_before(self, receipt: Receipt, state: State) -> bool:
        return self._settled.get(receipt.id) == (receipt.token, state)

    def lapsed(self, now: int) -> list[Hold]:
        """Taken out of here: leases that are over."""
        if now < self._next_lapse:
            return []
        over = [receipt for receipt, hold in self._holds.items() if hold.lease_us <= now]
        holds = [hold for receipt in over if (hold := self.take(receipt)) is not None]
        self._next_lapse = min((hold.lease_us for hold in self._holds.values()), default=0)
        return holds

    def lost(self, channel: Channel) -> None:
        for receipt in [r for r, hold in self._holds.items() if hold.arrival.channel is channel]:
            self.take(receipt)
