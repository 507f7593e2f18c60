"""Channels spread over connections: as many on each as allowed, and a further one when they are full."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from millpond.clock import SECOND, micros, monotonic
from millpond.errors import Closed, StoreUnavailable
from millpond.transports.rabbitmq import driver
from millpond.transports.rabbitmq.driver import Channel, NoAnswer
from millpond.transports.rabbitmq.options import RabbitOptions
from millpond.transports.url import Url

log = logging.getLogger("millpond.rabbitmq")

_FIRST_PAUSE, _GROWTH, _LONGEST_PAUSE = 0.1, 1.5, 5.0
_CONNECT_WITHIN = 10.0
_CLOSE_WITHIN = 2.0


class Connection:
    """One connection and its channels."""

    def __init__(self, amqp: Any) -> None:
        self.amqp = amqp
        self.channels: set[Channel] = set()
        self.opening = 0
        self._given_up: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self._given_up is not None or bool(self.amqp.is_closed)

    def give_up(self) -> None:
        """The broker does not answer on it, though others may be answered: a new one is opened instead."""
        if not self.closed:
            self._given_up = asyncio.ensure_future(self._close())
            for channel in list(self.channels):
                channel.gone()

    async def close(self) -> None:
        """In good order: the driver drops what is not written yet, and a closed channel has written its acks."""
        settling = [channel.close() for channel in list(self.channels) if channel.settles]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*settling, return_exceptions=True), _CONNECT_WITHIN)
        await self.amqp.close()

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.amqp.close(), _CLOSE_WITHIN)


class Connections:
    """Opens channels, and connections for them. A lost one is replaced when the next channel is wanted."""

    def __init__(self, url: Url, options: RabbitOptions, purpose: str, lost: Callable[[Channel], None]) -> None:
        self._url = url
        self._options = options
        self._name = f"millpond {purpose}"
        self._lost = lost
        self._connections: list[Connection] = []
        self._opening = asyncio.Lock()
        self._closed = False
        self._down_since: float | None = None
        self.on_reconnect: Callable[[float], None] | None = None

    async def first(self) -> None:
        """Connect for the first time: so many tries, then the error."""
        pause = _FIRST_PAUSE
        for left in reversed(range(self._options.connect_max_retries + 1)):
            try:
                await self._with_room()
                return
            except StoreUnavailable as e:
                if not left:
                    raise type(e)(
                        f"{e}; tried {self._options.connect_max_retries + 1} times at {self._url} (connect_max_retries)"
                    ) from None
                log.warning("cannot connect to %s, %d more tries: %s", self._url, left, e)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    async def channel(self) -> Channel:
        """A new channel, waiting for the broker as long as a call may."""
        give_up_at = monotonic() + micros(self._options.reconnect_timeout, "reconnect_timeout") / SECOND
        timeout = micros(self._options.call_timeout, "call_timeout") / SECOND
        pause = _FIRST_PAUSE
        while True:
            try:
                connection = await self._with_room()
                connection.opening += 1
                try:
                    channel = await Channel.open(connection.amqp, timeout, partial(self._gone, connection))
                except NoAnswer:
                    connection.give_up()
                    raise
                finally:
                    connection.opening -= 1
            except StoreUnavailable:
                if self._closed:
                    raise self._is_closed() from None
                if monotonic() + pause > give_up_at:
                    raise
            else:
                if self._closed:
                    raise self._is_closed()
                connection.channels.add(channel)
                return channel
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    async def _with_room(self) -> Connection:
        async with self._opening:
            if self._closed:
                raise self._is_closed()
            self._connections = [c for c in self._connections if not c.closed]
            for connection in self._connections:
                if len(connection.channels) + connection.opening < self._options.max_connection_channels:
                    return connection
            amqp = await driver.open_connection(self._url.raw, self._name, _CONNECT_WITHIN)
            self._connections.append(Connection(amqp))
            if self._down_since is not None:
                after, self._down_since = monotonic() - self._down_since, None
                log.warning("connected to %s again after %.1f s", self._url, after)
                if self.on_reconnect is not None:
                    self.on_reconnect(after)
            return self._connections[-1]

    def _gone(self, connection: Connection, channel: Channel) -> None:
        connection.channels.discard(channel)
        if channel.unanswered:
            connection.give_up()
        if not self._closed:
            if connection.closed and self._down_since is None:
                self._down_since = monotonic()
                log.warning("the connection to %s was lost", self._url)
            self._lost(channel)

    @property
    def count(self) -> int:
        return sum(not c.closed for c in self._connections)

    async def close(self) -> None:
        self._closed = True
        async with self._opening:
            connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()

    def _is_closed(self) -> Closed:
        return Closed(f"the transport at {self._url} was closed; connect again")
