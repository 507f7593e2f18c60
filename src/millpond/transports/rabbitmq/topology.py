"""Declares queues when they are needed, and again after a connection or a queue was lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from millpond.errors import QueueMismatch
from millpond.transports.rabbitmq.broker_errors import AccessRefused, NoSuchQueue
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.connections import ConnectionPool
from millpond.transports.rabbitmq.names import (
    DUE_ARGUMENTS,
    DUE_EXCHANGE,
    UNDELIVERED,
    WAIT_EXCHANGE,
    WAIT_HEADER,
    amqp_name,
    dead_name,
    is_suspects,
    side_queue_arguments,
    suspects_name,
    wait_arguments,
    wait_name,
    work_arguments,
)
from millpond.transports.rabbitmq.options import RabbitOptions

log = logging.getLogger("millpond.rabbitmq")

_TYPE = "x-queue-type"


class Topology:
    """Declares on a separate channel, because the broker closes the channel of a refused declaration.

    A queue that exists with other arguments, or that this user may not declare, is used as it is.
    """

    def __init__(self, pool: ConnectionPool, spare: ConnectionPool, options: RabbitOptions) -> None:
        self._pool = pool
        self._spare = spare
        """Used while the broker does not read from the other one: claims need queues then too."""
        self._options = options
        self._channels: dict[ConnectionPool, Channel] = {}
        self._lock = asyncio.Lock()
        self._declared: set[str] = set()
        self.known: set[str] = set()
        """All queues that were ever declared here."""
        self.used_as_found: set[str] = set()
        """Queues with other arguments than ours."""
        self._refused: set[str] = set()
        """Queues that this user may not declare."""

    def forget(self) -> None:
        """Declare every queue again, because another client may have deleted it."""
        self._declared.clear()

    def dead_letters_safely(self, queue: str) -> bool:
        """True if the broker moves a rejected message to the dead letters, and loses none on the way."""
        return self._options.queue_type == "quorum" and self.dead_letters(queue)

    def dead_letters(self, queue: str) -> bool:
        """True if the broker moves a rejected message to the dead letters, out of a classic queue at most once."""
        names = amqp_name(queue), suspects_name(queue), dead_name(queue)
        return self._options.broker_dead_letters and self.used_as_found.isdisjoint(names)

    async def exists(self, name: str) -> bool:
        """Whether the broker has this queue. One that this user may not read exists for all we know."""
        if name in self._declared:
            return True
        async with self._lock:
            try:
                await self._on_channel(lambda channel: channel.find_queue(name))
            except NoSuchQueue:
                return False
            except AccessRefused:
                return True
        return True

    async def declare_work_queue(self, queue: str) -> str:
        """Declare a queue for messages to be handled, and its dead letters. Return its AMQP name."""
        name = amqp_name(queue)
        if name not in self._declared:
            with contextlib.suppress(NoSuchQueue):  # an account that may only publish does not need it
                await self.declare_side_queue(dead_name(queue))
            async with self._lock:
                type_ = self._options.queue_type
                further, letters = self._options.queue_arguments or {}, self._options.broker_dead_letters
                arguments = work_arguments(queue, type_, further, broker_dead_letters=letters)
                if await self._declare(name, arguments):
                    log.warning(
                        "queue %r exists with other arguments than Millpond's, or this user may not declare it. If "
                        "another client rejects its messages they may be lost; docs/how-to/rabbitmq.md, Queues that "
                        "exist",
                        name,
                    )
                await self._bind_to_due(name)
                self._add(name)
        return name

    async def declare_side_queue(self, name: str) -> None:
        """Declare a queue for dead letters or suspects."""
        if name not in self._declared:
            async with self._lock:
                await self._declare_beside(name, self._side_queue_arguments(name))
                if is_suspects(name):
                    await self._bind_to_due(name)
                self._add(name)

    async def declare_wait_queue(self, bucket: int) -> None:
        name = wait_name(bucket)
        if name not in self._declared:
            async with self._lock:
                await self._declare_due_exchange()
                await self._declare_beside(name, wait_arguments(bucket))
                await self._unless_refused(lambda channel: channel.declare_exchange(WAIT_EXCHANGE, "headers"))
                match = {"x-match": "all", WAIT_HEADER: bucket}
                await self._unless_refused(lambda channel: channel.bind(name, WAIT_EXCHANGE, arguments=match))
                self._add(name)

    async def _bind_to_due(self, name: str) -> None:
        """Let messages come to a queue after a wait. The deletion of the queue has removed this too."""
        if name not in self._refused:
            await self._declare_due_exchange()
            await self._unless_refused(lambda channel: channel.bind(name, DUE_EXCHANGE, name))

    async def _declare_due_exchange(self) -> None:
        """Declare the way out of the wait queues, once for all queues."""
        if DUE_EXCHANGE not in self._declared:
            with contextlib.suppress(NoSuchQueue):  # an account that may not declare it does not need it
                await self._declare_beside(UNDELIVERED, self._side_queue_arguments(UNDELIVERED))
            if UNDELIVERED not in self._refused:
                await self._unless_refused(lambda channel: channel.declare_exchange(UNDELIVERED, "fanout"))
                await self._unless_refused(lambda channel: channel.bind(UNDELIVERED, UNDELIVERED))
                declare = partial(Channel.declare_exchange, name=DUE_EXCHANGE, kind="direct", arguments=DUE_ARGUMENTS)
                await self._unless_refused(declare)
            self._declared.add(DUE_EXCHANGE)

    def _side_queue_arguments(self, name: str) -> dict[str, Any]:
        return side_queue_arguments(name, broker_dead_letters=self._options.broker_dead_letters)

    async def _declare_beside(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Declare a queue beside the work queues. One that this user may not declare is expected."""
        if await self._declare(name, arguments) and self._options.declare and name not in self._refused:
            log.warning(
                "queue %r exists with other arguments than Millpond's; messages in it may be lost: "
                "docs/how-to/rabbitmq.md, Queues that exist",
                name,
            )

    async def _declare(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Declare a queue, or find it. Return True when it is first found to differ."""
        if self._options.declare and name not in self.used_as_found:
            try:
                await self._on_channel(lambda channel: channel.declare_queue(name, arguments))
                return False
            except AccessRefused:
                self._refused.add(name)
            except QueueMismatch:
                await self._check_type(name, arguments[_TYPE])
        await self._on_channel(lambda channel: channel.find_queue(name))
        is_first = name not in self.used_as_found
        self.used_as_found.add(name)
        return is_first

    async def _check_type(self, name: str, queue_type: str) -> None:
        """Refuse a queue of the other type: it counts deliveries differently."""
        try:
            await self._on_channel(lambda channel: channel.declare_queue(name, {_TYPE: queue_type}))
        except QueueMismatch as e:
            if f"'{_TYPE}'" in str(e):
                raise

    async def _unless_refused(self, call: Callable[[Channel], Awaitable[None]]) -> None:
        """Declare something, unless the account lacks the right: another account may have declared it."""
        if self._options.declare:
            with contextlib.suppress(AccessRefused):
                await self._on_channel(call)

    async def _on_channel(self, call: Callable[[Channel], Awaitable[Any]]) -> None:
        pool = self._spare if self._pool.is_blocked else self._pool
        channel = self._channels.get(pool)
        if channel is None or channel.closed:
            channel = self._channels[pool] = await pool.channel()
        try:
            await call(channel)
        except (AccessRefused, QueueMismatch, NoSuchQueue):  # the broker closes the channel
            channel.mark_dead()
            raise

    def _add(self, name: str) -> None:
        self._declared.add(name)
        self.known.add(name)
