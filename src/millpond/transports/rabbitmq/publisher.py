"""Confirmed publishing over a pool of channels: persistent, and an error if no queue takes a message."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from typing import Any

import msgspec

from millpond.errors import StoreError, StoreUnavailable, Unroutable
from millpond.transports.rabbitmq.broker_errors import MessageTooLarge, NoSuchQueue
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.connections import ConnectionPool
from millpond.transports.rabbitmq.envelope import Envelope
from millpond.transports.rabbitmq.names import UNDELIVERED, WAIT_EXCHANGE, WAIT_HEADER, amqp_name, bucket_for
from millpond.transports.rabbitmq.outgoing import OutgoingMessage, check_size, fit_into_frame
from millpond.transports.rabbitmq.properties import encode
from millpond.transports.rabbitmq.topology import Topology

_NO_HEADERS: Mapping[str, Any] = {}
_WAIT_HEADER_SIZE = 50
_NOTHING = "nothing"
_AT_ONCE = 1000
"""Number of unconfirmed messages per call. More would only wait in memory."""


class Publisher:
    """A pool of channels. All messages of one `send` go through one of them and arrive in their order."""

    def __init__(self, pool: ConnectionPool, topology: Topology, size: int) -> None:
        self._pool = pool
        self._topology = topology
        self._size = size
        self._channels: list[Channel] = []
        self._opening = asyncio.Lock()
        self._body_limit: int | None = None
        """The broker's max_message_size, once it has refused a message."""

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        """Publish messages and wait until all are stored. After an error some of them may be."""
        for first in range(0, len(messages), _AT_ONCE):
            errors = [e for e in await self._send(messages[first : first + _AT_ONCE], in_part=False) if e is not None]
            if errors:
                raise next((e for e in errors if isinstance(e, MessageTooLarge)), errors[0])

    async def send_each(self, messages: Sequence[OutgoingMessage]) -> list[Exception | None]:
        """Publish copies. Return None for each that is stored, and the error of each other one."""
        results: list[Exception | None] = []
        for first in range(0, len(messages), _AT_ONCE):
            results += await self._send_spread(messages[first : first + _AT_ONCE])
        return results

    async def is_read(self) -> bool:
        """False while the broker blocks publishes. It reports that only after a publish: here one for no queue."""
        if self._pool.is_blocked:
            return False
        trying = asyncio.create_task(self._publish_nothing())
        blocked = asyncio.create_task(self._pool.wait_until_blocked())
        try:
            done, _ = await asyncio.wait({trying, blocked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            blocked.cancel()
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)
        if trying not in done:
            return False
        trying.result()
        return not self._pool.is_blocked

    async def _publish_nothing(self) -> None:
        channel = await self._borrow_channel()
        try:
            with contextlib.suppress(Unroutable):
                await channel.send("", "", _NOTHING, encode(_NOTHING, {}, {}), b"")
        finally:
            channel.in_use -= 1

    async def _send_spread(self, messages: Sequence[OutgoingMessage]) -> list[Exception | None]:
        """Publish copies, those of one id over several channels: on one they would wait for each other."""
        parts = _spread(messages, self._size)
        errors: list[Exception | None] = [None] * len(messages)

        async def send(part: Sequence[int]) -> None:
            try:
                found = await self._send([messages[n] for n in part], in_part=True)
            except Exception as e:
                found = [e] * len(part)
            for n, error in zip(part, found, strict=True):
                errors[n] = error

        if len(parts) == 1:  # gather would make a task for it
            await send(parts[0])
        else:
            await asyncio.gather(*[send(part) for part in parts])
        return errors

    async def _send(self, messages: Sequence[OutgoingMessage], *, in_part: bool) -> list[Exception | None]:
        """Publish a batch and return the errors. `in_part`: one that is refused keeps back no other."""
        errors = await self._try(messages, in_part)
        if any([isinstance(error, Unroutable) for error in errors]):
            # A queue was deleted after it was declared. Declare it again; the second try decides.
            self._topology.forget()
            again = [n for n, error in enumerate(errors) if isinstance(error, Unroutable)]
        elif in_part and any([isinstance(error, MessageTooLarge) for error in errors]):
            # It closed the channel of the others. The limit is known now.
            again = [n for n, error in enumerate(errors) if isinstance(error, StoreUnavailable)]
        else:
            return errors
        try:
            second = await self._try([messages[n] for n in again], in_part)
        except Exception as e:
            second = [e] * len(again)
        for n, error in zip(again, second, strict=True):
            errors[n] = error
        return errors

    async def _try(self, messages: Sequence[OutgoingMessage], in_part: bool) -> list[Exception | None]:
        """Publish a batch and return the errors. An exception: nothing was sent."""
        channel = await self._borrow_channel()
        try:
            limit = channel.properties_limit
            errors: list[Exception | None] = []
            sends = []
            refused: dict[Hashable, StoreError] = {}
            for message in messages:
                error: Exception | None = refused.get(message.target) if refused else None
                if error is None:
                    try:
                        self._check_body(message.envelope)
                        exchange, key, properties = await self._address(message, limit)
                    except Exception as e:
                        if not in_part or _is_away(e):
                            raise
                        if isinstance(e, StoreError):
                            refused[message.target] = e
                        error = e
                    else:
                        envelope = message.envelope
                        sends.append((exchange, key, envelope.message_id, properties, envelope.payload))
                errors.append(error)
            results = iter(await _results([channel.send(*each) for each in sends]))
        finally:
            channel.in_use -= 1
        errors = [next(results) if error is None else error for error in errors]
        for error in errors:
            if isinstance(error, MessageTooLarge):
                self._body_limit = error.limit
        return errors

    def _check_body(self, envelope: Envelope) -> None:
        if self._body_limit is not None and len(envelope.payload) > self._body_limit:
            raise MessageTooLarge(len(envelope.payload), self._body_limit)

    async def _address(self, message: OutgoingMessage, limit: int) -> tuple[str, str, bytes]:
        """(exchange, routing key, encoded properties)"""
        queue = message.envelope.meta.queue
        if message.side_queue != UNDELIVERED:  # its messages are of queues that were deleted
            await self._topology.declare_work_queue(queue)
        if message.side_queue is not None:
            await self._topology.declare_side_queue(message.side_queue)
        exchange, key, further = "", message.side_queue or amqp_name(queue), _NO_HEADERS
        if message.delay_us > 0:
            bucket, left = bucket_for(message.delay_us)
            await self._topology.declare_wait_queue(bucket)
            if left or message.envelope.meta.wait_us:
                message = msgspec.structs.replace(message, envelope=message.envelope.with_meta(wait_us=left))
            exchange, further = WAIT_EXCHANGE, {WAIT_HEADER: bucket}
        properties = message.envelope.encode_properties(further)
        if message.is_new:
            check_size(message, len(properties), limit)
        elif len(properties) > limit:
            fitting = fit_into_frame(message, limit - _WAIT_HEADER_SIZE)
            if fitting.side_queue != message.side_queue:  # a dead letter now
                return await self._address(fitting, limit)
            properties = fitting.envelope.encode_properties(further)
        return exchange, key, properties

    async def _borrow_channel(self) -> Channel:
        """Return an idle channel, a new one if the pool is not full, or the least busy one."""
        channel = self._least_busy()
        if channel is None or channel.in_use:
            async with self._opening:
                channel = self._least_busy()
                if channel is None or (channel.in_use and len(self._channels) < self._size):
                    channel = await self._pool.channel()
                    self._channels.append(channel)
        channel.in_use += 1
        return channel

    def _least_busy(self) -> Channel | None:
        self._channels = [channel for channel in self._channels if not channel.closed]
        return min(self._channels, key=lambda channel: channel.in_use, default=None)


def _spread(messages: Sequence[OutgoingMessage], most: int) -> list[Sequence[int]]:
    """Positions of messages in up to `most` parts, of which each has an id as few times as possible."""
    ids = [message.envelope.message_id for message in messages]
    if len(set(ids)) == len(ids):
        return [range(len(ids))]
    seen: Counter[str] = Counter()
    parts: list[list[int]] = [[] for _ in range(min(most, max(Counter(ids).values())))]
    for n, id_ in enumerate(ids):
        parts[seen[id_] % len(parts)].append(n)
        seen[id_] += 1
    return [part for part in parts if part]


def _is_away(error: Exception) -> bool:
    """True if the broker takes nothing now. False: the error is about one message or queue."""
    return isinstance(error, StoreUnavailable) and not isinstance(error, NoSuchQueue)


async def _results(calls: Sequence[Coroutine[Any, Any, None]]) -> list[Exception | None]:
    """The error of each call."""
    if len(calls) != 1:
        results: list[Exception | None] = []
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            results.append(result)
        return results
    try:  # gather would make a task for it
        await calls[0]
    except Exception as e:
        return [e]
    return [None]
