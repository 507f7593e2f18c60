"""Writes outcomes: recorded in the archive if there is one, published where they go on, and only then acked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millpond.errors import StoreUnavailable
from millpond.message import SETTLED, Receipt
from millpond.outcome import Change, Outcome, change
from millpond.transport import Store
from millpond.transports.arguments import check_outcomes
from millpond.transports.rabbitmq.driver import Channel
from millpond.transports.rabbitmq.errands import Send
from millpond.transports.rabbitmq.held import Held, Hold
from millpond.transports.rabbitmq.onward import concluded, counted, is_requeued, onward
from millpond.transports.rabbitmq.publisher import Parcel
from millpond.transports.rabbitmq.rows import row_of


class Settling:
    """Of what is held. Lost before the ack, a message is given to another, who sees that it was delivered before."""

    def __init__(
        self, held: Held, send: Send, now: Callable[[], int], archive: Store | None, *, counts_deliveries: bool
    ) -> None:
        self._held = held
        self._send = send
        self._now = now
        self._archive = archive
        self._counts_deliveries = counts_deliveries
        """Whether queues count by themselves what was requeued."""

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Receipt]:
        """The stale receipts."""
        check_outcomes(outcomes)
        changes: dict[Receipt, Change] = {}
        for outcome in outcomes:  # all are read before the first is written; of two with one receipt the first counts
            changes.setdefault(outcome.receipt, change(outcome))
        if self._archive is not None:
            await self._record(self._archive, changes)
        holds: list[Hold] = []
        refused = []
        for receipt, c in changes.items():
            hold = self._held.take(receipt)
            if hold is not None:
                holds.append(hold)
            elif not self._held.settled_before(receipt, c.state):
                refused.append(receipt)
        if holds:
            refused += await self._settle(holds, changes)
        return refused

    async def give_back(self, holds: Sequence[Hold]) -> None:
        """Back to their queue, with the delivery counted."""
        if not self._counts_deliveries:
            await self._publish(holds, [counted(hold.arrival) for hold in holds])
            await self._ack(holds)
        else:
            await self._requeue(holds)

    async def _record(self, archive: Store, changes: dict[Receipt, Change]) -> None:
        """While they are still held, so that a heartbeat keeps their leases for as long as this takes."""
        now = self._now()
        rows = []
        for receipt, c in changes.items():
            hold = self._held.get(receipt) if c.keep and c.state in SETTLED else None
            if hold is not None:
                rows.append(row_of(concluded(hold, c, now), c.state, acquired_us=hold.claimed_us))
        if rows:
            await archive.record(rows)

    async def _settle(self, holds: Sequence[Hold], changes: dict[Receipt, Change]) -> list[Receipt]:
        now = self._now()
        copies, acked, requeued = [], [], []
        for hold in holds:
            c = changes[hold.receipt]
            if is_requeued(c) and self._counts_deliveries:
                requeued.append(hold)
                continue
            acked.append(hold)
            copy = counted(hold.arrival) if is_requeued(c) else onward(hold, c, now)
            if copy is not None:
                copies.append(copy)
        await self._publish(holds, copies)
        lost = {*await self._ack(acked), *await self._requeue(requeued)}
        for hold in holds:
            if hold.receipt not in lost:
                self._held.remember(hold.receipt, changes[hold.receipt].state)
        return list(lost)

    async def _publish(self, holds: Sequence[Hold], copies: Sequence[Parcel]) -> None:
        """What cannot be published now stays in our hands."""
        try:
            if copies:
                await self._send(copies)
        except BaseException:
            for hold in holds:
                self._held.put_back(hold)
            raise

    async def _ack(self, holds: Sequence[Hold]) -> list[Receipt]:
        """The receipts of those that could not be acked, since their channel is gone."""
        lost = []
        for channel, some in _by_channel(holds).items():
            try:
                await channel.ack([hold.arrival.tag for hold in some])
            except StoreUnavailable:
                lost += [hold.receipt for hold in some]
        return lost

    async def _requeue(self, holds: Sequence[Hold]) -> list[Receipt]:
        """The receipts of those that a lost channel took back."""
        lost = []
        for hold in holds:
            hold.source.suspects_known = True  # it may have become one
        for channel, some in _by_channel(holds).items():
            try:
                await channel.requeue([hold.arrival.tag for hold in some])
            except StoreUnavailable:
                lost += [hold.receipt for hold in some]
        return lost


def _by_channel(holds: Sequence[Hold]) -> dict[Channel, list[Hold]]:
    groups: dict[Channel, list[Hold]] = {}
    for hold in holds:
        groups.setdefault(hold.arrival.channel, []).append(hold)
    return groups
