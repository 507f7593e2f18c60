"""RabbitMQ behind the seam: the six verbs.

A message is never only in memory: what goes on elsewhere (a retry, a wait, the dead letters) is published and
confirmed before the delivery it came from is acked. So each hop may double a message and none may lose it; the
copies have one id, and the counters say that there was a delivery before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from millpond.clock import SECOND, Seconds, micros
from millpond.errors import Closed, InvalidTime, MillpondError, not_supported
from millpond.message import Claim, Message, Published, Receipt, State, draft
from millpond.outcome import MAX_CRASHES, SUSPECT, Outcome, sorted_out
from millpond.transport import DEFAULT_LEASE, Capability, Store
from millpond.transports.arguments import check_receipts, lease_to_claim, queue_names, whole_number
from millpond.transports.rabbitmq import errands
from millpond.transports.rabbitmq.connections import Connections
from millpond.transports.rabbitmq.driver import Channel
from millpond.transports.rabbitmq.envelope import enveloped
from millpond.transports.rabbitmq.errands import Errand, Errands
from millpond.transports.rabbitmq.held import Held
from millpond.transports.rabbitmq.lacking import Lacking
from millpond.transports.rabbitmq.onward import suspected, undecodable, unworked, waiting
from millpond.transports.rabbitmq.options import RabbitOptions
from millpond.transports.rabbitmq.publisher import Parcel, Publisher
from millpond.transports.rabbitmq.rows import row_of
from millpond.transports.rabbitmq.settling import Settling
from millpond.transports.rabbitmq.source import Arrival, Source
from millpond.transports.rabbitmq.topology import Topology
from millpond.transports.url import Url

log = logging.getLogger("millpond.rabbitmq")

CAPABILITIES = Capability.EXTEND | Capability.DEAD_LETTERS | Capability.SHARED | Capability.DURABLE


class RabbitTransport(Lacking):
    """One caller's handle on a broker. Receipts belong to the handle that claimed."""

    capabilities = CAPABILITIES

    def __init__(self, url: Url, options: RabbitOptions, archive: Store | None = None) -> None:
        self.url = url
        self.options = options
        self.archive = archive
        """Where settled messages are recorded."""
        # Apart: a broker that is short of memory stops reading from connections that publish, and acks must go on.
        self.publishing = Connections(url, options, "publisher", self._publisher_lost)
        self.subscribing = Connections(url, options, "subscriber", self._channel_lost)
        self.topology = Topology(self.publishing, options.queue_type)
        self.publisher = Publisher(self.publishing, self.topology, options.publisher_channel_pool_size)
        self._sources: dict[str, Source] = {}
        self._held = Held()
        self._settling = Settling(
            self._held, self._send, self.now, archive, counts_deliveries=options.queue_type == "quorum"
        )
        self._errands = Errands(self._send_odd)
        self._arrived = asyncio.Event()
        self._turn = 0
        self._suspects_turn: dict[str, bool] = {}
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
        self._errands.cancel()
        await self.subscribing.close()
        await self.publishing.close()
        if self.archive is not None:
            await self.archive.close()

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
            await self._errands.tried()  # nothing runs while a suspect is in our hands: a crash would count against it
            now = self.now()
            claims = [self._claimed(arrival, source, now, lease_us) for arrival, source in arrivals]
            runnable, refused = sorted_out(claims, max_crashes=max_crashes, max_deliveries=max_deliveries)
            if not refused:
                return runnable
            try:
                await self.settle(refused)
            except BaseException:
                self._unclaim(claims)
                raise
            if runnable:
                return runnable

    def _unclaim(self, claims: Sequence[Claim]) -> None:
        """Nobody hears of these claims. A suspect comes back when its lease ends: it must not wait among others."""
        for claim in reversed(claims):
            if claim.unfinished < SUSPECT and (hold := self._held.take(claim.receipt)) is not None:
                hold.source.ready.appendleft(hold.arrival)

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
            await errands.do([Errand(a.channel, a.tag, unworked(a)) for a in unclaimed], self._send)

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
                odd_ones_left=self._errands.tried,
            )
        return source

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        """Subscribe, and return when something arrives."""
        self._check_open()
        names = queue_names(queues)
        seconds = micros(timeout, "timeout") / SECOND
        sources = [self._source(name) for name in names]
        unsuspecting = [source for source in sources if not source.suspects_known]
        self._arrived.clear()
        try:
            async with asyncio.timeout(seconds):
                for source in sources:
                    await source.subscribe()
                while not (
                    self._closed
                    or any(source.ready for source in sources)
                    or any(source.suspects_known for source in unsuspecting)
                ):
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
        return await self._settling.settle(outcomes)

    async def reap(self) -> int:
        """Give back what lapsed leases of this handle hold. Those of a dead process come back by themselves."""
        self._check_open()
        holds = self._held.lapsed(self.now())
        await self._settling.give_back(holds)
        return len(holds)

    # --- by itself ----------------------------------------------------------------------------------

    def _odd(self, queue: str, arrival: Arrival | None, channel: Channel, message: Any) -> None:
        """Not for claims as it is: it waits on, may be poison, was not counted, or nobody can read it."""
        if arrival is None:
            log.error("a message in queue %r cannot be read; it goes to the dead letters", queue)
            parcel = undecodable(queue, message.header.properties.message_id, message.body, self.now())
        elif arrival.envelope.past.wait_us:
            parcel = waiting(arrival)
        elif arrival.unfinished >= SUSPECT:
            parcel = suspected(arrival)
        else:
            parcel = unworked(arrival)  # a classic queue tells of one delivery before, and never of two
        self._errands.add(Errand(channel, message.delivery.delivery_tag, parcel))

    async def _send_odd(self, parcels: Sequence[Parcel]) -> None:
        failed = [row_of(p.envelope, State.FAILED) for p in parcels if p.envelope.past.failed_us is not None]
        if self.archive is not None and failed:
            await self.archive.record(failed)
        await self._send(parcels)
        for queue in {p.envelope.past.queue for p in parcels if p.aside and p.envelope.past.failed_us is None}:
            self._sources[queue].suspects_known = True
            self._arrived.set()

    def _channel_lost(self, channel: Channel) -> None:
        self._held.lost(channel)
        for source in self._sources.values():
            source.lost(channel)
        self.topology.forget()
        self._arrived.set()

    def _publisher_lost(self, channel: Channel) -> None:
        self.topology.forget()
