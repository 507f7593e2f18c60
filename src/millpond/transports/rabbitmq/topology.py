"""Declares what is needed when it is needed, and again after the connection or a queue was lost."""

from __future__ import annotations

import asyncio

from millpond.transports.rabbitmq.connections import Connections
from millpond.transports.rabbitmq.driver import Channel
from millpond.transports.rabbitmq.names import (
    WAIT_EXCHANGE,
    WAIT_HEADER,
    amqp_name,
    aside_arguments,
    wait_arguments,
    wait_name,
    work_arguments,
)


class Topology:
    """On a channel of its own: a declaration that the broker refuses closes its channel."""

    def __init__(self, connections: Connections, queue_type: str) -> None:
        self._connections = connections
        self._queue_type = queue_type
        self._channel: Channel | None = None
        self._turn = asyncio.Lock()
        self._declared: set[str] = set()
        self.known: set[str] = set()
        """All queues that were ever declared here."""

    def forget(self) -> None:
        """Somebody else may have changed what is there."""
        self._declared.clear()

    async def work(self, queue: str) -> str:
        name = amqp_name(queue)
        if name not in self._declared:
            async with self._turn:
                await (await self._open()).declare_queue(name, work_arguments(self._queue_type))
                self._note(name)
        return name

    async def aside(self, name: str) -> None:
        """A queue of dead letters or suspects."""
        if name not in self._declared:
            async with self._turn:
                await (await self._open()).declare_queue(name, aside_arguments())
                self._note(name)

    async def wait(self, bucket: int) -> None:
        name = wait_name(bucket)
        if name not in self._declared:
            async with self._turn:
                channel = await self._open()
                await channel.declare_exchange(WAIT_EXCHANGE, "headers")
                await channel.declare_queue(name, wait_arguments(bucket))
                await channel.bind(name, WAIT_EXCHANGE, {"x-match": "all", WAIT_HEADER: bucket})
                self._note(name)

    def _note(self, name: str) -> None:
        self._declared.add(name)
        self.known.add(name)

    async def _open(self) -> Channel:
        if self._channel is None or self._channel.closed:
            self._channel = await self._connections.channel()
        return self._channel
