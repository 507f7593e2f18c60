"""Channels spread over connections. A further connection is opened when the others have all the channels allowed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from functools import partial

from millpond.clock import SECOND, micros, monotonic
from millpond.errors import Closed, EncryptionFailed, StoreError, StoreUnavailable
from millpond.transports.rabbitmq.broker_connection import BrokerConnection, open_connection
from millpond.transports.rabbitmq.broker_errors import NoAnswer
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.options import RabbitOptions
from millpond.transports.rabbitmq.versions import check_version, consumer_arguments
from millpond.transports.url import Url

log = logging.getLogger("millpond.rabbitmq")

_FIRST_PAUSE, _GROWTH, _LONGEST_PAUSE = 0.1, 1.5, 5.0
_CONNECT_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 2.0


class Connection:
    """One connection and its channels."""

    def __init__(self, amqp: BrokerConnection) -> None:
        self.amqp = amqp
        self.channels: set[Channel] = set()
        self.opening = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closing is not None or bool(self.amqp.is_closed)

    def give_up(self) -> None:
        """Close it in the background, because the broker does not answer. A new connection may be answered."""
        if not self.closed:
            self._closing = asyncio.ensure_future(self._close())
            for channel in list(self.channels):
                channel.mark_dead()
            self.amqp.discard_frames()

    async def close(self) -> None:
        """Close channels with acks first: closing the connection drops unwritten frames, closing a channel does not."""
        closing = [channel.close() for channel in list(self.channels) if channel.has_acked]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), _CONNECT_TIMEOUT)
        await self.amqp.close()

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.amqp.close(), _CLOSE_TIMEOUT)


class ConnectionPool:
    """Opens channels, and connections for them. The next call for a channel replaces a lost connection."""

    def __init__(
        self, url: Url, options: RabbitOptions, purpose: str, on_channel_lost: Callable[[Channel], None]
    ) -> None:
        self._url = url
        self._options = options
        self._name = f"millpond {purpose}"
        self._on_channel_lost = on_channel_lost
        self._connections: list[Connection] = []
        self._opening = asyncio.Lock()
        self._closed = False
        self._blocked = asyncio.Event()
        """Set when the broker has blocked or unblocked a connection."""
        self._down_since: float | None = None
        self.on_reconnect: Callable[[float], None] | None = None
        self.on_blocked: Callable[[str], None] | None = None

    async def connect(self) -> None:
        """Open the first connection, with `connect_max_retries` tries after the first."""
        pause = _FIRST_PAUSE
        for left in reversed(range(self._options.connect_max_retries + 1)):
            try:
                await self._connection_with_room()
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
        """Open a channel. Wait up to `reconnect_timeout` for the broker."""
        give_up_at = monotonic() + micros(self._options.reconnect_timeout, "reconnect_timeout") / SECOND
        timeout = micros(self._options.call_timeout, "call_timeout") / SECOND
        pause = _FIRST_PAUSE
        while True:
            try:
                connection = await self._connection_with_room()
                connection.opening += 1
                try:
                    channel = await Channel.open(connection.amqp, timeout, partial(self._channel_lost, connection))
                except NoAnswer:
                    connection.give_up()
                    raise
                finally:
                    connection.opening -= 1
            except StoreUnavailable:
                if self._closed:
                    raise self._closed_error() from None
                if monotonic() + pause > give_up_at:
                    raise
            else:
                if self._closed:
                    raise self._closed_error()
                connection.channels.add(channel)
                return channel
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    async def _connection_with_room(self) -> Connection:
        async with self._opening:
            if self._closed:
                raise self._closed_error()
            self._connections = [c for c in self._connections if not c.closed]
            for connection in self._connections:
                allowed = min(self._options.max_connection_channels, connection.amqp.max_channels)
                if len(connection.channels) + connection.opening < allowed:
                    return connection
            self._connections.append(Connection(await self._open_checked()))
            if self._down_since is not None:
                after, self._down_since = monotonic() - self._down_since, None
                log.warning("reconnected to %s after %.1f s", self._url, after)
                if self.on_reconnect is not None:
                    self.on_reconnect(after)
            return self._connections[-1]

    async def _open_checked(self) -> BrokerConnection:
        connection = await self._open()
        try:
            check_version(connection.version, broker_dead_letters=self._options.broker_dead_letters)
        except StoreError:
            await connection.close()
            raise
        connection.consumer_arguments = consumer_arguments(connection.version, self._options)
        return connection

    async def _open(self) -> BrokerConnection:
        """Connect to one of the hosts, in random order. If none answers, raise the error of the last one."""
        hosts = random.sample(self._url.each_host, len(self._url.each_host))
        for url in hosts[:-1]:
            try:
                return await open_connection(url, self._name, _CONNECT_TIMEOUT, self._report_blocked)
            except (StoreUnavailable, EncryptionFailed) as e:
                log.info("a host of %s is left out: %s", self._url, e)
        return await open_connection(hosts[-1], self._name, _CONNECT_TIMEOUT, self._report_blocked)

    def _channel_lost(self, connection: Connection, channel: Channel) -> None:
        connection.channels.discard(channel)
        if channel.timed_out:
            connection.give_up()
        if not self._closed:
            if connection.closed and self._down_since is None:
                self._down_since = monotonic()
                log.warning("the connection to %s was lost", self._url)
            self._on_channel_lost(channel)

    @property
    def is_blocked(self) -> bool:
        """True while the broker does not read from a connection."""
        return any(c.amqp.reader.blocked and not c.closed for c in self._connections)

    async def wait_until_blocked(self) -> None:
        while not self.is_blocked:
            self._blocked.clear()
            await self._blocked.wait()

    def _report_blocked(self, reason: str | None) -> None:
        self._blocked.set()
        if reason is None:
            log.warning("%s reads publishes again", self._url)
            return
        log.warning("%s blocks publishes: %s", self._url, reason)
        if self.on_blocked is not None:
            self.on_blocked(reason)

    @property
    def count(self) -> int:
        return sum(not c.closed for c in self._connections)

    async def close(self) -> None:
        self._closed = True
        async with self._opening:
            connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()

    def _closed_error(self) -> Closed:
        return Closed(f"the transport at {self._url} was closed; connect again")
