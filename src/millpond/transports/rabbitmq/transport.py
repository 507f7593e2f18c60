"""RabbitMQ behind the seam: the six verbs.

A message is never only in memory. A copy (for a retry, a wait, the dead letters) is published and confirmed before its
delivery is acked. So each hop may duplicate a message and none can lose it. The copies have the same id, and their
counters show the earlier delivery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any
from uuid import UUID

from millpond.checks import integer
from millpond.clock import SECOND, Seconds, micros, monotonic
from millpond.errors import Closed, InvalidTime, MillpondError, not_supported
from millpond.message import SUSPECT, Claim, Message, Published, Receipt, State, draft
from millpond.outcome import Outcome, describe, split_runnable
from millpond.seam.operations import Operations
from millpond.seam.transactions import Transactions
from millpond.seam.transport import DEFAULT_LEASE, Capability, Transport, missing, refused
from millpond.seam.workers import Workers
from millpond.telemetry import BrokerBlocked, Event, Reconnected
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.connections import ConnectionPool
from millpond.transports.rabbitmq.consumer import CHECK_EVERY, Consumer, ReceivedMessage
from millpond.transports.rabbitmq.copies import copy_for_next_wait, copy_for_suspects, copy_undelivered, copy_unreadable
from millpond.transports.rabbitmq.dead_letters import DeadLetters
from millpond.transports.rabbitmq.envelope import make_claim, new_envelope, settled_row
from millpond.transports.rabbitmq.frames import Delivered
from millpond.transports.rabbitmq.lost_acks import LostAcks, identity
from millpond.transports.rabbitmq.names import BUCKETS, suspects_name
from millpond.transports.rabbitmq.options import RabbitOptions
from millpond.transports.rabbitmq.outcome_writer import OutcomeWriter, record
from millpond.transports.rabbitmq.outgoing import OutgoingMessage
from millpond.transports.rabbitmq.publisher import Publisher
from millpond.transports.rabbitmq.receipts import Receipts
from millpond.transports.rabbitmq.republish import Republish, Republisher, replacement, republish_together
from millpond.transports.rabbitmq.topology import Topology
from millpond.transports.rabbitmq.transactions import ArchiveTransactions
from millpond.transports.rabbitmq.unreadable_log import UnreadableLog
from millpond.transports.shares import Shares
from millpond.transports.url import Url
from millpond.transports.validation import check_receipts, lease_to_claim, queue_names

log = logging.getLogger("millpond.rabbitmq")

_NEGLIGIBLE = SECOND
"""Microseconds. The broker checks its timeouts every minute only."""
_GIVE_UP_AFTER = 5.0
"""Seconds after which a claim ends although messages that cannot be claimed still come, and none that can."""

CAPABILITIES = (
    Capability.EXTEND | Capability.DEAD_LETTERS | Capability.SHARED | Capability.ONE_ORDER | Capability.DURABLE
)


class RabbitWorkers:
    """The workers room. The broker itself returns the messages of a dead process."""

    join = refused("join on RabbitMQ", Capability.PRESENCE)
    stale = refused("stale on RabbitMQ", Capability.PRESENCE)
    detach = refused("detach on RabbitMQ", Capability.PRESENCE)
    attach = refused("attach on RabbitMQ", Capability.PRESENCE)
    status = refused("the status of workers on RabbitMQ", Capability.PRESENCE)
    cancel = refused("cancelling a running message on RabbitMQ", Capability.PRESENCE)
    cancel_requests = refused("cancelling a running message on RabbitMQ", Capability.PRESENCE)
    begin_step = refused("delivery.step on RabbitMQ", Capability.PRESENCE)
    finish_step = refused("delivery.step on RabbitMQ", Capability.PRESENCE)

    def __init__(self, reap: Callable[[], Awaitable[int]]) -> None:
        self._reap = reap

    async def reap(self) -> int:
        return await self._reap()


class RabbitTransport:
    """A handle on a broker. Only the handle that claimed a message can settle it."""

    capabilities = CAPABILITIES
    missing_shards = ()
    periodic = missing("a periodic message on RabbitMQ", Capability.PERIODIC)
    streams = missing("a stream on RabbitMQ", Capability.STREAMS | Capability.STREAM_STATUS)
    bulk = missing("bulk publishing on RabbitMQ", Capability.BULK)
    exports = missing("an export on RabbitMQ", Capability.EXPORTS)
    diagnosis = missing("a diagnosis on RabbitMQ", Capability.BROWSE)
    access = missing("tokens on RabbitMQ", Capability.ACCESS)

    def __init__(self, url: Url, options: RabbitOptions, archive: Transport | None = None) -> None:
        self.url = url
        self.options = options
        self.archive = archive
        """Database that records settled messages."""
        # Two pools: a broker short of memory stops reading from connections that publish, and acks must continue.
        self.publisher_pool = ConnectionPool(url, options, "publisher", self._publisher_lost)
        self.consumer_pool = ConnectionPool(url, options, "subscriber", self._channel_lost)
        self.on_event: Callable[[Event], None] | None = None
        self.consumer_pool.on_reconnect = lambda after: self._emit(Reconnected(after))
        self.publisher_pool.on_blocked = lambda reason: self._emit(BrokerBlocked(reason))
        self.topology = Topology(self.publisher_pool, self.consumer_pool, options)
        self.publisher = Publisher(self.publisher_pool, self.topology, options.publisher_channel_pool_size)
        self._consumers: dict[str, Consumer] = {}
        self._receipts = Receipts()
        self._lost_acks = LostAcks()
        self._archive = None if archive is None else archive.operations
        self._republisher = Republisher(
            self._record_republished,
            self._send_republished,
            can_reject=self.topology.dead_letters,
            on_lost_ack=self._lost_acks.add,
            wait_until_blocked=self.publisher_pool.wait_until_blocked,
            is_blocked=lambda: self.publisher_pool.is_blocked,
        )
        self._unreadable_log = UnreadableLog()
        self._outcome_writer = OutcomeWriter(
            self._receipts,
            self._send_each,
            self.now,
            self._archive,
            counts_deliveries=options.queue_type == "quorum",
            wait_until_blocked=self.publisher_pool.wait_until_blocked,
            republish=self._republisher.add,
            can_reject=self.topology.dead_letters,
        )
        self._dead_letters = DeadLetters(
            self.consumer_pool,
            self.topology,
            self.publisher,
            self._archive,
            self.now,
            micros(options.call_timeout, "call_timeout") / SECOND,
        )
        self._activity = asyncio.Event()
        """Set when a call of `wait` should check again."""
        self._turn = 0
        self._longest = micros(options.consumer_timeout, "consumer_timeout")
        """Microseconds that the broker lets a consumer hold a message."""
        self._suspects_first: dict[str, bool] = {}
        """By queue: whether its next claim tries a suspect before other messages."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<RabbitTransport {self.url}>"

    def _emit(self, event: Event) -> None:
        if self.on_event is not None:
            self.on_event(event)

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
        self._activity.set()
        try:
            await self._release_unclaimed()
            await self._dead_letters.put_all_back()
        except MillpondError as e:
            log.warning("unclaimed messages return to the broker counted as delivered: %s", e)
        self._outcome_writer.cancel()
        self._republisher.cancel()
        await self.consumer_pool.close()
        await self.publisher_pool.close()
        if self.archive is not None:
            await self.archive.close()

    @property
    def operations(self) -> Operations:
        """FAILED messages only."""
        return self._dead_letters

    @cached_property
    def transactions(self) -> Transactions:
        """`once` only, in the archive's database."""
        if self.archive is None:
            raise not_supported("your own transaction on RabbitMQ without archive=", Capability.TRANSACTIONS)
        return ArchiveTransactions(self.archive.transactions)

    @cached_property
    def workers(self) -> Workers:
        return RabbitWorkers(self._reap)

    async def declare(self, queues: Sequence[str]) -> list[str]:
        """Declare these queues with their side queues, and all wait queues, for accounts that may declare none.

        Return the names at the broker that exist with other arguments than Millpond's.
        """
        self._check_open()
        for queue in queue_names(queues):
            await self.topology.declare_work_queue(queue)
            await self.topology.declare_side_queue(suspects_name(queue))
        for bucket in BUCKETS:
            await self.topology.declare_wait_queue(bucket)
        return sorted(self.topology.used_as_found)

    # --- publish ------------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Message], *, within: Any = None) -> list[Published]:
        """Publish with the broker's confirms. Not all or none: after an error some of the messages may be stored."""
        self._check_open()
        if within is not None:
            raise not_supported("publish(within=…)", Capability.TRANSACTIONS)
        drafts = [draft(message, body_limit=self.options.body_limit) for message in messages]
        if any(one.unique is not None for one in drafts):
            raise not_supported("publish(unique=…)", Capability.UNIQUE)
        now = self.now()
        envelopes = [new_envelope(d, now) for d in drafts]
        if envelopes:
            await self._send([OutgoingMessage(e, max(e.meta.due_us - now, 0), is_new=True) for e in envelopes])
        return [Published(envelope.id) for envelope in envelopes]

    async def _send(self, messages: Sequence[OutgoingMessage]) -> None:
        try:
            await self.publisher.send(messages)
        except MillpondError:
            self._check_open()
            raise

    async def _send_each(self, messages: Sequence[OutgoingMessage]) -> list[Exception | None]:
        errors = await self.publisher.send_each(messages)
        if any(errors):
            self._check_open()
        return errors

    # --- claim --------------------------------------------------------------------------------------

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
        """Claim received messages, or those in the queues now, in the order of each queue.

        `ahead` changes nothing: the broker counts a crash of every message that a dead process had.
        """
        self._check_open()
        if ids is not None:
            raise not_supported("claim(ids=…)", Capability.CLAIM_BY_ID)
        if by_worker:
            raise not_supported("claim(by_worker=True)", Capability.PRESENCE)
        names = queue_names(queues)
        integer(limit, "limit")
        lease_us = lease_to_claim(lease)
        if lease_us > self._longest:
            raise InvalidTime(
                f"a lease of {lease} s is longer than the broker lets a consumer hold a message "
                f"(consumer_timeout, {self.options.consumer_timeout} s)"
            )
        if limit == 0 or not names:
            return []
        # Any number of messages may be in front that cannot be claimed, and further ones come.
        give_up_at = monotonic() + min(_GIVE_UP_AFTER, lease_us / SECOND / 2)
        while True:
            await self._reap()
            taken = await self._take(names, limit, suspects, others)
            while not taken and (left := give_up_at - monotonic()) > 0:
                if not await self._republisher.progress(names, left):
                    break
                taken = await self._take(names, limit, suspects, others)  # a moved suspect may be claimable now
            now = self.now()
            taken = self._without_old(taken, now + lease_us)
            claims = self._make_claims(taken, now, lease_us)
            runnable, refused = split_runnable(claims, max_deliveries=max_deliveries)
            if not refused:
                return runnable
            try:  # a dead letter that is refused now, because its queue is full, delays no other message
                await self._outcome_writer.settle(refused, later=True)
            except BaseException:
                self._unclaim(claims)
                raise
            if runnable or monotonic() >= give_up_at:
                return runnable

    def _without_old(
        self, taken: list[tuple[ReceivedMessage, Consumer]], lease_end: int
    ) -> list[tuple[ReceivedMessage, Consumer]]:
        """Send back messages that were received too long ago: the broker would take them back during their lease."""
        oldest = lease_end - self._longest - _NEGLIGIBLE
        if all([received.received_us >= oldest for received, _ in taken]):
            return taken
        for received, _ in taken:
            if received.received_us < oldest:
                self._republisher.add(replacement(received, copy_undelivered(received)))
        return [(received, consumer) for received, consumer in taken if received.received_us >= oldest]

    def _unclaim(self, claims: Sequence[Claim]) -> None:
        """Undo claims that are not returned."""
        for claim in reversed(claims):
            if (delivery := self._receipts.take(claim.receipt)) is not None:
                delivery.consumer.put_back(delivery.received)

    async def _take(
        self, names: Sequence[str], limit: int, suspects: bool, others: bool
    ) -> list[tuple[ReceivedMessage, Consumer]]:
        self._turn += 1
        shares = Shares([self._consumer(name) for name in names], limit, self._turn)
        taken: list[tuple[ReceivedMessage, Consumer]] = []
        try:
            for consumer, share in shares:
                alone = suspects and not taken
                suspect_first = alone and self._suspects_first.get(consumer.queue, True)
                if suspect_first and (suspect := await self._take_suspect(consumer)):
                    return [(suspect, consumer)]
                got = await consumer.take(share) if others else []
                if got:
                    self._suspects_first[consumer.queue] = True
                elif alone and (suspect := await self._take_suspect(consumer)):
                    return [(suspect, consumer)]
                taken += [(received, consumer) for received in got]
                shares.taken += len(got)
        except BaseException:
            for received, consumer in self._of_open_channels(taken[::-1]):  # not claimed yet
                consumer.put_back(received)
            self._check_open()
            raise
        return self._of_open_channels(taken)

    def _of_open_channels(
        self, taken: Sequence[tuple[ReceivedMessage, Consumer]]
    ) -> list[tuple[ReceivedMessage, Consumer]]:
        """Leave out messages whose channel was lost meanwhile: the broker delivers them again."""
        for received, _ in taken:
            if received.channel.closed:
                self._receipts.count_cut(received.envelope.id)
        return [(received, consumer) for received, consumer in taken if not received.channel.closed]

    async def _take_suspect(self, consumer: Consumer) -> ReceivedMessage | None:
        received = await consumer.take_suspect()
        if received is not None:
            self._suspects_first[consumer.queue] = False
        return received

    async def _release_unclaimed(self) -> None:
        """Cancel all subscriptions and give back unclaimed messages as undelivered."""
        unclaimed = [received for consumer in self._consumers.values() for received in await consumer.unsubscribe()]
        if unclaimed:
            await republish_together([replacement(r, copy_undelivered(r)) for r in unclaimed], self._send)

    def _make_claims(self, taken: Sequence[tuple[ReceivedMessage, Consumer]], now: int, lease_us: int) -> list[Claim]:
        claims: list[Claim] = []
        for n, (received, consumer) in enumerate(taken):
            try:
                claims.append(self._make_claim(received, consumer, now, lease_us))
            except RecursionError:  # the caller has no stack left: the message is not the cause
                for later, its in reversed(taken[n:]):
                    its.put_back(later)
                self._unclaim(claims)
                raise
            except Exception as e:  # this message alone must not run
                self._unreadable_log.add(consumer.queue, e)
                copy = copy_unreadable(consumer.queue, received.envelope.payload, describe(e), now)
                self._republisher.add(replacement(received, copy))
        return claims

    def _make_claim(self, received: ReceivedMessage, consumer: Consumer, now: int, lease: int) -> Claim:
        receipt = self._receipts.add(received, consumer, now, lease)
        counts = received.deliveries, received.crashes
        try:
            return make_claim(received.envelope, receipt, consumer.queue, *counts, now, lease)
        except BaseException:
            self._receipts.take(receipt)
            raise

    def _consumer(self, queue: str) -> Consumer:
        consumer = self._consumers.get(queue)
        if consumer is None:
            consumer = self._consumers[queue] = Consumer(
                queue,
                self.consumer_pool,
                self.topology,
                queue_type=self.options.queue_type,
                channels=(self.options.subscriber_pool_sizes or {}).get(queue, self.options.subscriber_pool_size),
                now=self.now,
                on_ready=self._activity.set,
                on_not_claimable=self._republish,
                on_unreadable=lambda channel, message, error: self._bury(queue, channel, message, error),
                on_settled=lambda channel, tag: self._republisher.add(Republish(channel, tag, None)),
                was_settled=self._lost_acks.take,
                cuts=self._receipts.cuts,
                room=lambda: self._republisher.room(queue),
            )
        return consumer

    async def wait(self, queues: Sequence[str], timeout: Seconds) -> None:
        """Subscribe, and return when a message arrives."""
        self._check_open()
        names = queue_names(queues)
        seconds = micros(timeout, "timeout") / SECOND
        consumers = [self._consumer(name) for name in names]
        without_suspects = [consumer for consumer in consumers if not consumer.suspects_known]
        if any(consumer.had_suspects for consumer in consumers):
            seconds = min(seconds, CHECK_EVERY)  # another one may come back from a wait, and no consumer receives it
        self._activity.clear()
        try:
            async with asyncio.timeout(seconds):
                for consumer in consumers:
                    await consumer.subscribe()
                while not (
                    self._closed
                    or any(consumer.ready for consumer in consumers)
                    or any(consumer.suspects_known for consumer in without_suspects)
                ):
                    await self._activity.wait()
                    self._activity.clear()
        except (TimeoutError, Closed):
            return

    # --- extend, settle, reap -----------------------------------------------------------------------

    async def extend(self, receipts: Sequence[Receipt], lease: Seconds = DEFAULT_LEASE) -> list[Receipt]:
        """Extend leases, up to the broker's consumer_timeout after the message was received."""
        self._check_open()
        check_receipts(receipts)
        lease_us = micros(lease, "lease")
        until = self.now() + lease_us
        return [r for r in dict.fromkeys(receipts) if not self._receipts.extend(r, until, self._longest)]

    async def settle(
        self, outcomes: Sequence[Outcome], *, within: Any = None, wait: bool = True, again: bool = False
    ) -> list[Receipt]:
        # A broker has no locks, and receipts remember their outcomes: `wait` and `again` change nothing.
        self._check_open()
        if within is not None:
            raise not_supported("settle(within=…)", Capability.TRANSACTIONS)
        return await self._outcome_writer.settle(outcomes)

    async def _reap(self) -> int:
        """Give back messages of this handle whose lease has ended. The broker returns those of a dead process."""
        self._check_open()
        lapsed = self._receipts.take_lapsed(self.now())
        await self._outcome_writer.give_back(lapsed)
        return len(lapsed)

    # --- in the background --------------------------------------------------------------------------

    def _republish(self, received: ReceivedMessage) -> None:
        """Move a message that cannot be claimed: it must wait on, is a suspect, or was not counted."""
        rest, known = received.envelope.rest_of_delay(self.now()), None
        if rest:
            copy = copy_for_next_wait(received, rest)
        elif received.crashes >= SUSPECT:
            copy = copy_for_suspects(received)
            known = identity(received.envelope, by_suspects_queue=False)
        else:
            copy = copy_undelivered(received)  # a classic queue reports one earlier delivery, never two
        self._republisher.add(replacement(received, copy, identity=known))

    def _bury(self, queue: str, channel: Channel, message: Delivered, error: Exception) -> None:
        """Move an unreadable message to the dead letters."""
        self._unreadable_log.add(queue, error)
        copy = copy_unreadable(queue, message.body, f"{type(error).__name__}: {error}", self.now())
        may = message.broker_may_move
        by_broker = may and self.topology.dead_letters_safely(queue)
        self._republisher.add(Republish(channel, message.tag, copy, message.size, by_broker, broker_may_move=may))

    async def _record_republished(self, messages: Sequence[OutgoingMessage]) -> None:
        failed = [settled_row(m.envelope, State.FAILED) for m in messages if m.envelope.meta.failed_us is not None]
        if self._archive is not None and failed:
            await record(self._archive, failed)

    async def _send_republished(self, messages: Sequence[OutgoingMessage]) -> list[Exception | None]:
        errors = await self._send_each(messages)
        for m, error in zip(messages, errors, strict=True):
            if error is None and m.side_queue and m.envelope.meta.failed_us is None:
                self._consumers[m.envelope.meta.queue].suspects_known = True
                self._activity.set()
        return errors

    def _channel_lost(self, channel: Channel) -> None:
        self._receipts.remove_channel(channel)
        self._lost_acks.add_channel(channel)
        for consumer in self._consumers.values():
            for id_ in consumer.remove_channel(channel):
                self._receipts.count_cut(id_)
        self.topology.forget()
        self._activity.set()

    def _publisher_lost(self, channel: Channel) -> None:
        self.topology.forget()
