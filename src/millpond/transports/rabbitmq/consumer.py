"""Messages out of one queue: a claim takes those that are there, a subscription receives those that come later."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from uuid import UUID

import msgspec

from millpond.clock import monotonic
from millpond.message import SUSPECT
from millpond.transports.rabbitmq.broker_errors import NoSuchQueue
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.connections import ConnectionPool
from millpond.transports.rabbitmq.envelope import LARGEST_COUNT, Envelope, count_deliveries, open_envelope
from millpond.transports.rabbitmq.frames import Delivered
from millpond.transports.rabbitmq.lost_acks import identity
from millpond.transports.rabbitmq.names import amqp_name, suspects_name
from millpond.transports.rabbitmq.properties import decode
from millpond.transports.rabbitmq.topology import Topology

CHECK_EVERY = 1.0
"""Seconds between checks for suspects that other consumers may have found, or whose delay has ended."""


class ReceivedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message in this process that is not claimed yet."""

    channel: Channel
    tag: int
    envelope: Envelope
    deliveries: int
    crashes: int
    received_us: int
    """From now on the broker's consumer_timeout runs."""
    is_first_suspicion: bool
    """True for one delivery of a message: the one before which the broker's count has made it a suspect."""
    by_suspects_queue: bool
    """True if it came from the queue of suspects."""
    size: int = 0
    """Bytes of memory that it takes, estimated."""
    broker_may_move: bool = True
    """See `Delivered`."""


class Consumer:
    """One queue. Before the first `subscribe`, a claim takes the messages there are and leaves no consumer behind."""

    def __init__(
        self,
        queue: str,
        pool: ConnectionPool,
        topology: Topology,
        *,
        queue_type: str,
        channels: int,
        now: Callable[[], int],
        on_ready: Callable[[], None],
        on_not_claimable: Callable[[ReceivedMessage], None],
        on_unreadable: Callable[[Channel, Delivered, Exception], None],
        on_settled: Callable[[Channel, int], None],
        was_settled: Callable[[Hashable], bool],
        cuts: Callable[[UUID], int],
        room: Callable[[], int | None],
    ) -> None:
        self.queue = queue
        self._pool = pool
        self._topology = topology
        self._queue_type = queue_type
        self._channel_count = channels
        self._now = now
        self._on_ready = on_ready
        self._on_not_claimable = on_not_claimable
        self._on_unreadable = on_unreadable
        self._on_settled = on_settled
        self._was_settled = was_settled
        self._cuts = cuts
        self._room = room
        self.ready: deque[ReceivedMessage] = deque()
        self._suspects: deque[ReceivedMessage] = deque()
        """Received suspects whose claim was cancelled."""
        self._suspects_known = False
        self.had_suspects = False
        self._next_check = 0.0
        self.claimed = 0
        """Number of messages that were claimed from here and are not settled."""
        self._demand = 1
        """Highest number of messages wanted at once, with the claimed ones: the prefetch of a new subscription."""
        self._prefetch = 0
        """Prefetch of the present subscription."""
        self._channels: list[Channel] = []
        self._subscriptions: dict[str, Channel] = {}
        """By consumer tag."""
        self._lock = asyncio.Lock()

    @property
    def suspects_known(self) -> bool:
        """True while the broker may have suspects of this queue."""
        return self._suspects_known

    @suspects_known.setter
    def suspects_known(self, known: bool) -> None:
        self._suspects_known = known
        self.had_suspects = self.had_suspects or known

    async def take(self, count: int) -> list[ReceivedMessage]:
        """Take up to `count` messages that are no suspects: received ones, or those in the queue now."""
        self._demand = max(self._demand, self.claimed + count)
        taken = self._take_ready(count)
        if taken and self._subscriptions:
            return taken
        async with self._lock:
            taken += self._take_ready(count - len(taken))
            if not taken and self._subscriptions:
                await self._catch_up()
                taken = self._take_ready(count)
            more = self._prefetch < self._demand or self._in_the_way
            if len(taken) < count and (not self._subscriptions or (not taken and more)):
                while len(taken) < count:
                    # Messages that are moved elsewhere are in this process meanwhile, however many are sent.
                    wanted, room = count - len(taken), self._room()
                    if room == 0:
                        break
                    await self._pull(wanted if room is None else min(wanted, room))
                    if not self.ready:
                        break
                    taken += self._take_ready(count - len(taken))
        return taken

    @property
    def _in_the_way(self) -> int:
        """Number of messages that this process has and cannot settle yet: the broker sends the fewer others."""
        received = sum(len(channel.unsettled) for channel in self._channels)
        return received - self.claimed - len(self.ready)

    def put_back(self, received: ReceivedMessage) -> None:
        """Take back a message whose claim failed."""
        (self._suspects if received.crashes >= SUSPECT else self.ready).appendleft(received)

    def _take_ready(self, count: int) -> list[ReceivedMessage]:
        ready = self.ready
        return [ready.popleft() for _ in range(min(count, len(ready)))]

    async def _catch_up(self) -> None:
        """Wait for the messages that the broker has sent."""
        for channel in set(self._subscriptions.values()):
            await channel.catch_up(amqp_name(self.queue))

    async def _pull(self, count: int) -> None:
        """Receive up to `count` messages that the queue has now, by a short subscription."""
        for again in (True, False):
            name = await self._topology.declare_work_queue(self.queue)
            channel = await self._channel(0)
            try:
                consumer_tag = await channel.consume(name, count, self._on_message)
                await channel.catch_up(name)
                await channel.cancel(consumer_tag)
                return
            except NoSuchQueue:
                self._topology.forget()
                if not again:
                    raise

    async def take_suspect(self) -> ReceivedMessage | None:
        """Take one suspect out of their side queue."""
        if not self.suspects_known and monotonic() < self._next_check:
            return None
        name = suspects_name(self.queue)
        async with self._lock:
            await self._topology.declare_side_queue(name)
            channel = await self._channel(0)
            if not self._suspects:
                self.suspects_known = await channel.get(name, self._on_suspect)
            self._next_check = monotonic() + CHECK_EVERY
            return self._suspects.popleft() if self._suspects else None

    async def subscribe(self) -> None:
        """Let the broker send messages as they come, up to the demand."""
        async with self._lock:
            if self._subscriptions and self._prefetch >= self._demand:
                return
            await self._cancel()
            for again in (True, False):
                try:
                    name = await self._topology.declare_work_queue(self.queue)
                    self._prefetch, wanted = (
                        0,
                        self._demand,
                    )  # if it is cancelled half-way, the next call subscribes anew
                    # No more in all than are wanted: the rest is for other consumers.
                    count = min(self._channel_count, wanted)
                    share, more = divmod(wanted, count)
                    for n in range(count):
                        channel = await self._channel(n)
                        tag = channel.new_consumer_tag()
                        self._subscriptions[tag] = channel
                        try:
                            await channel.consume(name, share + (n < more), self._on_message, tag)
                        except Exception:
                            self._subscriptions.pop(tag, None)
                            raise
                    self._prefetch = wanted
                    return
                except NoSuchQueue:
                    self._topology.forget()
                    if not again:
                        raise

    async def unsubscribe(self) -> list[ReceivedMessage]:
        """Stop receiving. Return the messages that are not claimed; the caller gives them back."""
        async with self._lock:
            await self._cancel()
            unclaimed = [*self.ready, *self._suspects]
            self.ready, self._suspects = deque(), deque()
            return unclaimed

    async def _cancel(self) -> None:
        subscriptions, self._subscriptions = self._subscriptions, {}
        for consumer_tag, channel in subscriptions.items():
            if not channel.closed:
                await channel.cancel(consumer_tag)

    def remove_channel(self, channel: Channel) -> list[UUID]:
        """Forget a lost channel. Return the ids of its messages, which the broker delivers again."""
        lost = [received.envelope.id for received in (*self.ready, *self._suspects) if received.channel is channel]
        if channel in self._channels:
            self._channels.remove(channel)
            self._subscriptions = {tag: c for tag, c in self._subscriptions.items() if c is not channel}
            self.ready = deque(received for received in self.ready if received.channel is not channel)
            self._suspects = deque(received for received in self._suspects if received.channel is not channel)
        return lost

    async def _channel(self, number: int) -> Channel:
        while len(self._channels) <= number:
            self._channels.append(await self._pool.channel())
        return self._channels[number]

    def _on_message(self, channel: Channel, message: Delivered) -> None:
        received = self._read(channel, message)
        if received is None:
            return
        uncounted = self._queue_type == "classic" and message.redelivered
        if received.envelope.rest_of_delay(self._now()) or received.is_first_suspicion or uncounted:
            self._on_not_claimable(received)
        elif received.crashes >= SUSPECT:
            # An earlier process has tried to move it, and may have left a copy. Each further try could leave another.
            self._suspects.append(msgspec.structs.replace(received, crashes=SUSPECT))
            self.suspects_known = True
            self._on_ready()
        else:
            self.ready.append(received)
            self._on_ready()

    def _on_suspect(self, channel: Channel, message: Delivered) -> None:
        received = self._read(channel, message, suspect=True)
        if received is None:
            return
        if received.envelope.rest_of_delay(self._now()):
            self._on_not_claimable(received)
        else:
            self._suspects.append(received)

    def _read(self, channel: Channel, message: Delivered, *, suspect: bool = False) -> ReceivedMessage | None:
        """Decode a message. None: it cannot be decoded and goes to the dead letters, or this process has settled it."""
        now = self._now()
        try:
            properties = decode(message.properties)
            envelope = open_envelope(properties, message.body, self.queue, now)
            if envelope.meta.failed_us is not None or envelope.meta.reason is not None:
                # A publisher wrote that, or someone has moved a dead letter here. It has not failed.
                envelope = envelope.with_meta(failed_us=None, reason=None)
            # A classic queue has no counter; a publisher may have sent one.
            table = properties.headers if suspect or self._queue_type == "quorum" else {}
            deliveries = count_deliveries(message, table, envelope.meta, channel.delivery_counters)
            earlier, cuts = envelope.meta.deliveries, self._cuts(envelope.id)
            returns = deliveries - 1 - earlier
            # Any publisher can write the header. In the work queue it alone makes no suspect.
            crashes = max(envelope.meta.crashes, SUSPECT) if suspect else min(envelope.meta.crashes, SUSPECT - 1)
            is_first_suspicion = not suspect and crashes + returns == SUSPECT and not cuts
            crashes = min(crashes + max(returns - cuts, 0), LARGEST_COUNT)
            if message.redelivered:  # it stays marked as such
                deliveries = max(deliveries - cuts, earlier + 2)
        except Exception as e:
            self._on_unreadable(channel, message, e)
            return None
        if message.redelivered and self._was_settled(identity(envelope, by_suspects_queue=suspect)):
            self._on_settled(channel, message.tag)
            return None
        return ReceivedMessage(
            channel,
            message.tag,
            envelope,
            deliveries,
            crashes,
            now,
            is_first_suspicion,
            by_suspects_queue=suspect,
            size=message.size,
            broker_may_move=message.broker_may_move,
        )
