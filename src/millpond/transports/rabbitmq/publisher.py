"""Sends messages so that none is lost: persistent, confirmed, and returned if no queue would take it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from millpond.errors import Unroutable
from millpond.transports.rabbitmq.connections import Connections
from millpond.transports.rabbitmq.driver import Channel
from millpond.transports.rabbitmq.envelope import Envelope
from millpond.transports.rabbitmq.names import WAIT_EXCHANGE, WAIT_HEADER, amqp_name, bucket_for
from millpond.transports.rabbitmq.topology import Topology

_AT_ONCE = 1000
"""Messages on their way at a time: more would only wait in memory."""


class Parcel(msgspec.Struct, frozen=True, gc=False):
    """Where a message goes: to its queue, at once or after a delay, or aside."""

    envelope: Envelope
    delay_us: int = 0
    aside: str | None = None
    """The queue of dead letters or suspects that it goes to instead."""


class Publisher:
    """A pool of channels. What one call sends goes through one of them, and so arrives in its order."""

    def __init__(self, connections: Connections, topology: Topology, size: int) -> None:
        self._connections = connections
        self._topology = topology
        self._size = size
        self._channels: list[Channel] = []
        self._opening = asyncio.Lock()

    async def send(self, parcels: Sequence[Parcel]) -> None:
        """All are durable when this returns; after an error some of them may be."""
        channel = await self._borrow()
        try:
            for first in range(0, len(parcels), _AT_ONCE):
                returned = await self._send(channel, parcels[first : first + _AT_ONCE])
                if returned:
                    # A queue was deleted since it was declared: declare again, and let the second try decide.
                    self._topology.forget()
                    again = await self._send(channel, [parcel for parcel, _ in returned])
                    if again:
                        raise again[0][1]
        finally:
            channel.in_use -= 1

    async def _send(self, channel: Channel, parcels: Sequence[Parcel]) -> list[tuple[Parcel, Unroutable]]:
        addressed = [await self._address(parcel) for parcel in parcels]
        sends = [
            channel.send(exchange, key, envelope.id, envelope.payload, {**envelope.table(), **headers})
            for exchange, key, envelope, headers in addressed
        ]
        if len(sends) == 1:
            results: list[BaseException | None] = [await _outcome(sends[0])]
        else:
            results = await asyncio.gather(*sends, return_exceptions=True)
        returned = []
        for parcel, result in zip(parcels, results, strict=True):
            if isinstance(result, Unroutable):
                returned.append((parcel, result))
            elif result is not None:
                raise result
        return returned

    async def _address(self, parcel: Parcel) -> tuple[str, str, Envelope, dict[str, int]]:
        queue = parcel.envelope.past.queue
        await self._topology.work(queue)
        if parcel.aside is not None:
            await self._topology.aside(parcel.aside)
            return "", parcel.aside, parcel.envelope, {}
        if parcel.delay_us > 0:
            return await self._wait(parcel.envelope, parcel.delay_us)
        return "", amqp_name(queue), parcel.envelope, {}

    async def _wait(self, envelope: Envelope, delay_us: int) -> tuple[str, str, Envelope, dict[str, int]]:
        """Aside until it is due; the broker brings it back."""
        bucket, left = bucket_for(delay_us)
        await self._topology.wait(bucket)
        if left or envelope.past.wait_us:
            envelope = envelope.with_past(wait_us=left)
        return WAIT_EXCHANGE, amqp_name(envelope.past.queue), envelope, {WAIT_HEADER: bucket}

    async def _borrow(self) -> Channel:
        """One that nobody uses, a new one while there may be more, or the one with the least to do."""
        channel = self._idlest()
        if channel is None or channel.in_use:
            async with self._opening:
                channel = self._idlest()
                if channel is None or (channel.in_use and len(self._channels) < self._size):
                    channel = await self._connections.channel()
                    self._channels.append(channel)
        channel.in_use += 1
        return channel

    def _idlest(self) -> Channel | None:
        self._channels = [channel for channel in self._channels if not channel.closed]
        return min(self._channels, key=lambda channel: channel.in_use, default=None)


async def _outcome(send: object) -> BaseException | None:
    try:
        await send  # type: ignore[misc]
    except Unroutable as e:
        return e
    return None
