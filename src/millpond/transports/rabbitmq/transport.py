"""RabbitMQ behind the seam: the six verbs.

A message is never only in memory: what goes on elsewhere (a retry, a wait, the dead letters) is published and
confirmed before the delivery it came from is acked. So each hop may double a message and none may lose it; the
copies have one id, and the counters say that there was a delivery before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import UUID

from millpond.clock import SECOND, Seconds, micros
from millpond.errors import Closed, InvalidTime, MillpondError, StoreUnavailable, not_supported
from millpond.message import Claim, Message, Published, Receipt, draft
from millpond.outcome import MAX_CRASHES, Change, Outcome, change, sorted_out
from millpond.transport import DEFAULT_LEASE, Capability
from millpond.transports.arguments import (
    check_outcomes,
    check_receipts,
    lease_to_claim,
    queue_names,
    whole_number,
)
from millpond.transports.rabbitmq.connections import Connections
from millpond.transports.rabbitmq.driver import Channel
from millpond.transports.rabbitmq.envelope import enveloped
from millpond.transports.rabbitmq.held import Held, Hold
from millpond.transports.rabbitmq.lacking import Lacking
from millpond.transports.rabbitmq.onward import is_requeued, onward, suspected, undecodable, unworked, waiting
from millpond.transports.rabbitmq.options import RabbitOptions
from millpond.transports.rabbitmq.publisher import Parcel, Publisher
from millpond.transports.rabbitmq.source import Arrival, Source
from millpond.transports.rabbitmq.topology import Topology
from millpond.transports.url import Url

log = logging.getLogger("millpond.rabbitmq")

CAPABILITIES = Capability.EXTEND | Capability.DEAD_LETTERS | Capability.SHARED | Capability.DURABLE


class RabbitTransport(Lacking):
    """One caller's handle on a broker. Receipts belong to the handle that claimed."""

    capabilities = CAPABILITIES

    def __init__(self, url: Url, options: RabbitOptions) -> None:
        self.url = url
        self.options = options
        # Apart: a broker that is short of memory stops reading from connections that publish, and acks must go on.
        self.publishing = Connections(url, options, "publisher", self._publisher_lost)
        self.subscribing = Connections(url, options, "subscriber", self._channel_lost)
        self.topology = Topology(self.publishing, options.queue_type)
        self.publisher = Publisher(self.publishing, self.topology, options.publisher_channel_pool_size)
        self._sources: dict[str, Source] = {}
        self._held = Held()
        self._arrived = asyncio.Event()
        self._turn = 0
        self._suspects_turn: dict[str, bool] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<RabbitTransport {self.url}>"

    @property
    def on_reconnect(self) -> Callable[[float], None] | None:
        return self.subscribing.on_reconnect

    @on_reconnect.setter
    def on_reconnect(self, call: Callable[[float], None]) -> None:
        self.subscribing.on_reconnect = call

    def now(self) -> int:
        now = self.options.clock.now()
        assert now is not None  # checked with the options
        return now

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the transport at {self.url} was closed; connect again")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        try:
            await self._stand_back()
        except MillpondError as e:
            log.warning("messages that nobody had claimed come back from the broker counted as delivered: %s", e)
        for errand in self._errands:
            errand.cancel()
        await self.subscribing.close()
        await self.publishing.close()

    def dead_letters(self) -> Any:
        """FAILED messages, for an operator."""
        from millpond.transports.rabbitmq.dead_letters import DeadLetters  # which holds one of us

        return DeadLetters(self)

    # --- publish ------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        """Each is confirmed by the broker. Not all or none: after an error some of them may be there."""
        self._check_open()
        if within is not None:
            raise not_supported("publish(within=…)", Capability.TRANSACTIONS)
        drafts = [draft(message, body_limit=self.options.body_limit) for message in messages]
        now = self.now()
        envelopes = [enveloped(d, now) for d in drafts]
        if envelopes:
            await self._send([Parcel(e, max(e.past.due_us - now, 0)) for e in envelopes])
        return [Published(envelope.id) for envelope in envelopes]

    async def _send(self, parcels: Sequence[Parcel]) -> None:
        try:
            await self.publisher.send(parcels)
        except MillpondError:
            self._check_open()
            raise

    # --- claim --------------------------------------------------------------------------------------

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
        """What has arrived, or what there is; in the order of the queue."""
        self._check_open()
        if ids is not None:
            raise not_supported("claim(ids=…)", Capability.CLAIM_BY_ID)
        names = queue_names(queues)
        whole_number(limit, "limit")
        lease_us = lease_to_claim(lease)
        if lease_us > micros(self.options.consumer_timeout, "consumer_timeout"):
            raise InvalidTime(
                f"a lease of {lease} s is longer than the broker lets a consumer hold a message "
                f"(consumer_timeout, {self.options.consumer_timeout} s)"
            )
        if limit == 0 or not names:
            return []
        while True:
            await self.reap()
            arrivals = await self._take(names, limit, suspects)
            now = self.now()
            claims = [self._claimed(arrival, source, now, lease_us) for arrival, source in arrivals]
            runnable, refused = sorted_out(claims, max_crashes=max_crashes, max_deliveries=max_deliveries)
            await self.settle(refused)
            if runnable or not refused:
                return runnable

    async def _take(self, names: Sequence[str], limit: int, suspects: bool) -> list[tuple[Arrival, Source]]:
        # Each queue in turn goes first and has its share; what one leaves goes to the next.
        self._turn += 1
        turn = self._turn % len(names)
        hungry = [self._source(name) for name in (*names[turn:], *names[:turn])]
        taken: list[tuple[Arrival, Source]] = []
        try:
            while hungry and len(taken) < limit:
                still_hungry = []
                for n, source in enumerate(hungry):
                    share = -(-(limit - len(taken)) // (len(hungry) - n))
                    alone = suspects and not taken
                    turn_of_suspects = alone and self._suspects_turn.get(source.queue, True)
                    if turn_of_suspects and (suspect := await self._suspect(source)):
                        return [(suspect, source)]
                    got = await source.take(share) if share else []
                    if got:
                        self._suspects_turn[source.queue] = True
                    elif alone and (suspect := await self._suspect(source)):
                        return [(suspect, source)]
                    taken += [(arrival, source) for arrival in got]
                    if share and len(got) == share:
                        still_hungry.append(source)
                hungry = still_hungry
        except BaseException:
            for arrival, source in reversed(taken):  # nobody has claimed them
                source.ready.appendleft(arrival)
            self._check_open()
            raise
        return taken

    async def _suspect(self, source: Source) -> Arrival | None:
        """One alone: nothing else is in this process's hands unclaimed, which it might take along."""
        arrival = await source.suspect()
        if arrival is not None:
            self._suspects_turn[source.queue] = False
            await self._stand_back()
        return arrival

    async def _stand_back(self) -> None:
        """Have nothing sent any more, and give back unworked what nobody has claimed."""
        unclaimed = [arrival for source in self._sources.values() for arrival in await source.unsubscribe()]
        if unclaimed:
            await self._move(unclaimed, [unworked(arrival) for arrival in unclaimed])

    def _claimed(self, arrival: Arrival, source: Source, now: int, lease: int) -> Claim:
        past = arrival.envelope.past
        return Claim(
            Message(
                queue=source.queue,
                payload=arrival.envelope.payload,
                id=arrival.envelope.id,
                key=past.key,
                priority=past.priority,
                headers=arrival.envelope.headers(),
            ),
            self._held.add(arrival, source, now, lease),
            arrival.deliveries,
            past.attempts,
            past.created_us,
            past.due_us,
            now,
            now + lease,
            past.first_attempt_us,
            past.expires_us,
        )

    def _source(self, queue: str) -> Source:
        source = self._sources.get(queue)
        if source is None:
            source = self._sources[queue] = Source(
                queue,
                self.subscribing,
                self.topology,
                queue_type=self.options.queue_type,
                pool_size=self.options.subscriber_pool_size,
                now=self.now,
                arrived=self._arrived.set,
                odd=lambda arrival, channel, message: self._odd(queue, arrival, channel, message),
            )
        return source

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        """Subscribe, and return when something arrives."""
        self._check_open()
        names = queue_names(queues)
        seconds = micros(timeout, "timeout") / SECOND
        sources = [self._source(name) for name in names]
        self._arrived.clear()
        try:
            async with asyncio.timeout(seconds):
                for source in sources:
                    await source.subscribe()
                while not self._closed and not any(source.ready for source in sources):
                    await self._arrived.wait()
                    self._arrived.clear()
        except TimeoutError:
            return
        except Closed:
            return

    # --- extend, settle, reap -----------------------------------------------------------------------

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        """Up to the broker's consumer_timeout after the claim: no lease can be kept longer."""
        self._check_open()
        check_receipts(receipts)
        lease_us = micros(lease, "lease")
        longest = micros(self.options.consumer_timeout, "consumer_timeout")
        until = self.now() + lease_us
        return [r for r in dict.fromkeys(receipts) if not self._held.extend(r, until, longest)]

    async def settle(self, outcomes: Sequence[Outcome], *, within: Any = None) -> list[Receipt]:
        self._check_open()
        if within is not None:
            raise not_supported("settle(within=…)", Capability.TRANSACTIONS)
        check_outcomes(outcomes)
        changes: dict[Receipt, Change] = {}
        for outcome in outcomes:  # all are read before the first is written; of two with one receipt the first counts
            changes.setdefault(outcome.receipt, change(outcome))
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

    async def _settle(self, holds: Sequence[Hold], changes: dict[Receipt, Change]) -> list[Receipt]:
        now = self.now()
        copies = [parcel for hold in holds if (parcel := onward(hold, changes[hold.receipt], now)) is not None]
        try:
            if copies:
                await self._send(copies)
        except BaseException:
            for hold in holds:
                self._held.put_back(hold)
            raise
        requeued = [hold for hold in holds if is_requeued(changes[hold.receipt])]
        acked = holds if not requeued else [hold for hold in holds if not is_requeued(changes[hold.receipt])]
        # Lost between: the broker gives the message to another, who sees that it was delivered before.
        lost = {*await self._ack(acked), *await self._give_back(requeued)}
        for hold in holds:
            if hold.receipt not in lost:
                self._held.remember(hold.receipt, changes[hold.receipt].state)
        return list(lost)

    async def reap(self) -> int:
        """Give back what lapsed leases of this handle hold. Those of a dead process come back by themselves."""
        self._check_open()
        holds = self._held.lapsed(self.now())
        await self._give_back(holds)
        return len(holds)

    async def _ack(self, holds: Sequence[Hold]) -> list[Receipt]:
        """The receipts of those that could not be acked, since their channel is gone."""
        lost = []
        for channel, some in _by_channel(holds).items():
            try:
                await channel.ack([hold.arrival.tag for hold in some])
            except StoreUnavailable:
                lost += [hold.receipt for hold in some]
        return lost

    async def _give_back(self, holds: Sequence[Hold]) -> list[Receipt]:
        """Back to their queue, with the delivery counted; the receipts of those that a lost channel took back."""
        if self.options.queue_type == "classic":  # which counts nothing by itself
            await self._send([Parcel(h.arrival.envelope.with_past(deliveries=h.arrival.deliveries)) for h in holds])
            return await self._ack(holds)
        lost = []
        for hold in holds:
            hold.source.suspects_known = True  # it may have become one
        for channel, some in _by_channel(holds).items():
            try:
                await channel.requeue([hold.arrival.tag for hold in some])
            except StoreUnavailable:
                lost += [hold.receipt for hold in some]
        return lost

    # --- by itself ----------------------------------------------------------------------------------

    async def _move(self, arrivals: Sequence[Arrival], parcels: Sequence[Parcel]) -> None:
        """Publish these instead of those deliveries."""
        await self._send(parcels)
        for arrival in arrivals:
            if not arrival.channel.closed:
                await arrival.channel.ack([arrival.tag])

    def _odd(self, queue: str, arrival: Arrival | None, channel: Channel, message: Any) -> None:
        """Not for claims as it is: it waits on, may be poison, or nobody can read it."""
        if arrival is None:
            log.error("a message in queue %r cannot be read; it goes to the dead letters", queue)
            tag, properties = message.delivery.delivery_tag, message.header.properties
            parcel = undecodable(queue, properties.message_id, message.body, self.now())
            self._run(self._instead(parcel, channel, tag), channel, tag)
        elif arrival.envelope.past.wait_us:
            self._run(self._move([arrival], [waiting(arrival)]), channel, arrival.tag)
        else:
            source = self._sources[queue]
            source.suspects_known = True
            task = self._run(self._move([arrival], [suspected(arrival)]), channel, arrival.tag)
            source.leaving.add(task)
            task.add_done_callback(source.leaving.discard)

    async def _instead(self, parcel: Parcel, channel: Channel, tag: int) -> None:
        await self._send([parcel])
        await channel.ack([tag])

    def _run(self, errand: Coroutine[Any, Any, None], channel: Channel, tag: int) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await errand
            except MillpondError as e:
                log.warning("a message is tried again: %s", e)
                if not channel.closed:
                    await channel.requeue([tag])

        task = asyncio.ensure_future(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    def _channel_lost(self, channel: Channel) -> None:
        self._held.lost(channel)
        for source in self._sources.values():
            source.lost(channel)
        self.topology.forget()
        self._arrived.set()

    def _publisher_lost(self, channel: Channel) -> None:
        self.topology.forget()


def _by_channel(holds: Sequence[Hold]) -> dict[Channel, list[Hold]]:
    groups: dict[Channel, list[Hold]] = {}
    for hold in holds:
        groups.setdefault(hold.arrival.channel, []).append(hold)
    return groups
