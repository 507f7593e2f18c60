"""Takes messages out of one queue: what there is now by a claim, what comes by a subscription."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from millpond.clock import monotonic
from millpond.outcome import SUSPECT
from millpond.transports.rabbitmq.connections import Connections
from millpond.transports.rabbitmq.driver import Channel, NoSuchQueue
from millpond.transports.rabbitmq.envelope import Envelope, deliveries, opened
from millpond.transports.rabbitmq.names import amqp_name, suspects_name, work_arguments
from millpond.transports.rabbitmq.topology import Topology

_LOOK_EVERY = 1.0
"""Seconds between looks for suspects that others may have found."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A message in our hands that nobody has claimed yet."""

    channel: Channel
    tag: int
    envelope: Envelope
    deliveries: int

    @property
    def unfinished(self) -> int:
        return self.deliveries - 1 - self.envelope.past.attempts


class Source:
    """One queue. Until somebody waits for its messages, a claim takes what there is and leaves no consumer behind."""

    def __init__(
        self,
        queue: str,
        connections: Connections,
        topology: Topology,
        *,
        queue_type: str,
        pool_size: int,
        now: Callable[[], int],
        arrived: Callable[[], None],
        odd: Callable[[Arrival | None, Channel, Any], None],
        odd_ones_left: Callable[[], Awaitable[None]],
    ) -> None:
        self.queue = queue
        self._connections = connections
        self._topology = topology
        self._queue_type = queue_type
        self._pool_size = pool_size
        self._now = now
        self._arrived = arrived
        self._odd = odd
        self._odd_ones_left = odd_ones_left
        self.ready: deque[Arrival] = deque()
        self._found: deque[Arrival] = deque()
        """A suspect in our hands whose claim was cancelled."""
        self.suspects_known = False
        """There may be some at the broker."""
        self._look_at = 0.0
        self.held = 0
        """Claimed from here and not settled."""
        self._demand = 1
        """The most that were wanted at once, with those in work: what a consumer may hold."""
        self._prefetch = 0
        """Of the consumers that are there."""
        self._channels: list[Channel] = []
        self._consumers: dict[str, Channel] = {}
        self._turn = asyncio.Lock()

    async def take(self, count: int) -> list[Arrival]:
        """Up to so many that are no suspects: what has come, or what there is now."""
        self._demand = max(self._demand, self.held + count)
        taken = self._from_ready(count)
        if taken and self._consumers:
            return taken
        async with self._turn:
            taken += self._from_ready(count - len(taken))
            if not taken and self._consumers:
                await self._look()
                taken = self._from_ready(count)
            if len(taken) < count and (not self._consumers or (not taken and self._prefetch < self._demand)):
                while len(taken) < count:
                    await self._pull(count - len(taken))
                    if not self.ready:
                        break
                    taken += self._from_ready(count - len(taken))
        return taken

    def _from_ready(self, count: int) -> list[Arrival]:
        ready = self.ready
        return [ready.popleft() for _ in range(min(count, len(ready)))]

    async def _look(self) -> None:
        """Let what has been sent arrive."""
        for channel in set(self._consumers.values()):
            await channel.caught_up(amqp_name(self.queue), work_arguments(self._queue_type))

    async def _pull(self, count: int) -> None:
        """A consumer for a moment: it is sent what there is, so many at most."""
        for again in (True, False):
            name = await self._topology.work(self.queue)
            channel = await self._channel(0)
            try:
                consumer = await channel.consume(name, count, self._on_message)
                await channel.caught_up(name, work_arguments(self._queue_type))
                await channel.cancel(consumer)
                return
            except NoSuchQueue:
                self._topology.forget()
                if not again:
                    raise

    async def suspect(self) -> Arrival | None:
        """One of those that may be poison; they wait in a queue of their own."""
        await self._odd_ones_left()
        if not self.suspects_known and monotonic() < self._look_at:
            return None
        name = suspects_name(self.queue)
        async with self._turn:
            await self._topology.aside(name)
            channel = await self._channel(0)
            if not self._found:
                self.suspects_known = await channel.get(name, lambda c, m: self._found.append(self._opened(c, m)))
            self._look_at = monotonic() + _LOOK_EVERY
            return self._found.popleft() if self._found else None

    async def subscribe(self) -> None:
        """From now on the broker sends by itself, as much as there is use for."""
        async with self._turn:
            if self._consumers and self._prefetch >= self._demand:
                return
            await self._cancel()
            for again in (True, False):
                try:
                    name = await self._topology.work(self.queue)
                    self._prefetch = self._demand
                    share = -(-self._prefetch // self._pool_size)
                    for n in range(self._pool_size):
                        channel = await self._channel(n)
                        self._consumers[await channel.consume(name, share, self._on_message)] = channel
                    return
                except NoSuchQueue:
                    self._topology.forget()
                    if not again:
                        raise

    async def unsubscribe(self) -> list[Arrival]:
        """No more is sent; what nobody has claimed is handed over, to be given back."""
        async with self._turn:
            await self._cancel()
            unclaimed = [*self.ready, *self._found]
            self.ready, self._found = deque(), deque()
            return unclaimed

    async def _cancel(self) -> None:
        consumers, self._consumers = self._consumers, {}
        for tag, channel in consumers.items():
            if not channel.closed:
                await channel.cancel(tag)

    def lost(self, channel: Channel) -> None:
        """The broker gives to others what this channel had."""
        if channel in self._channels:
            self._channels.remove(channel)
            self._consumers = {tag: c for tag, c in self._consumers.items() if c is not channel}
            self.ready = deque(a for a in self.ready if a.channel is not channel)
            self._found = deque(a for a in self._found if a.channel is not channel)

    async def _channel(self, number: int) -> Channel:
        while len(self._channels) <= number:
            self._channels.append(await self._connections.channel())
        return self._channels[number]

    def _on_message(self, channel: Channel, message: Any) -> None:
        try:
            arrival = self._opened(channel, message)
        except (msgspec.MsgspecError, ValueError, TypeError):
            self._odd(None, channel, message)
            return
        uncounted = self._queue_type == "classic" and message.delivery.redelivered
        if arrival.envelope.past.wait_us or arrival.unfinished >= SUSPECT or uncounted:
            self._odd(arrival, channel, message)
        else:
            self.ready.append(arrival)
            self._arrived()

    def _opened(self, channel: Channel, message: Any) -> Arrival:
        properties, delivery = message.header.properties, message.delivery
        table = properties.headers
        envelope = opened(properties.message_id, table, message.body, self.queue, self._now())
        count = deliveries(envelope.past, table, bool(delivery.redelivered))
        return Arrival(channel, delivery.delivery_tag, envelope, count)
