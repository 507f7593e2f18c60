"""A connection of the driver, aiormq: how it is opened, and which of its log records are dropped.

aio-pika, the library above aiormq, is not used. Receipts must know of every reconnect, so reconnecting is done here;
and its message objects would take a large part of the time per message.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import ssl
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import aiormq
from aiormq import exceptions as amqp

from millpond.errors import (
    AuthenticationFailed,
    EncryptionFailed,
    StoreError,
    StoreUnavailable,
    UnknownDatabase,
    Unreachable,
)
from millpond.transports.rabbitmq.frames import ContentReader, ContentStreams
from millpond.transports.rabbitmq.versions import delivery_counters, version_of

DEFAULT_FRAME_MAX = 131_072
_FRAME_OVERHEAD = 20
"""Octets of a header frame beside the properties."""
_NO_MORE_FRAMES = 1.0
"""Seconds without a frame after which no caller waits for a dead connection any more."""
_NOT_ALLOWED = 530

_is_own = contextvars.ContextVar("millpond_rabbitmq", default=False)
"""True in the driver's tasks of our connections, which inherit the context that opened them."""


def _from_others(record: logging.LogRecord) -> bool:
    """Drop the driver's records about our connections: a stack for each lost one. We log one line instead."""
    return record.levelno >= logging.CRITICAL or not _is_own.get()


for _name in ("aiormq.connection", "aiormq.connection.marshall", "aiormq.channel"):
    logging.getLogger(_name).addFilter(_from_others)


@contextlib.contextmanager
def own_tasks() -> Iterator[None]:
    """The driver's tasks that begin here are of our connections."""
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


class BrokerConnection:
    """A connection of the driver. Its messages do not pass through the driver."""

    def __init__(self, driver: Any, reader: ContentReader) -> None:
        self.driver = driver
        self.reader = reader
        self.version = version_of(driver.server_properties)
        self.delivery_counters = delivery_counters(self.version)
        self.consumer_arguments: Mapping[str, Any] = {}
        """Arguments of each consumer, as far as this version of the broker knows them."""
        self._discarding: asyncio.Task[None] | None = None
        driver.closing.add_done_callback(lambda _: self.discard_frames())

    @property
    def is_closed(self) -> bool:
        return bool(self.driver.is_closed)

    @property
    def max_channels(self) -> int:
        """Number of channels that the broker allows."""
        return self.driver.connection_tune.channel_max or 65_535

    @property
    def properties_limit(self) -> int:
        """Octets of a message's encoded properties."""
        return (self.driver.connection_tune.frame_max or DEFAULT_FRAME_MAX) - _FRAME_OVERHEAD

    async def open_channel(self) -> Any:
        """Open the free channel with the lowest number. The driver would choose numbers that the broker refuses."""
        number = next(n for n in count(1) if n not in self.driver.channels)
        return await self.driver.channel(number, publisher_confirms=True, on_return_raises=True)

    def discard_frames(self) -> None:
        """Remove frames that a dead connection never sends: callers wait for room in the driver's queue."""
        if self._discarding is None and self.driver.write_queue.full():
            self._discarding = asyncio.ensure_future(self._discard_frames())

    async def _discard_frames(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                await asyncio.wait_for(self.driver.write_queue.get(), _NO_MORE_FRAMES)

    async def close(self) -> None:
        await self.driver.close()


async def open_connection(
    url: str, name: str, timeout: float, on_blocked: Callable[[str | None], None]
) -> BrokerConnection:
    """Open a connection. `on_blocked` gets the reason when the broker stops reading from it, None when it reads again.

    The errors never contain the URL.
    """
    reader = ContentReader(on_blocked)
    try:
        with own_tasks():
            driver = _driver(url, name, reader)
            async with asyncio.timeout(timeout):
                await driver.connect()
    except (amqp.AuthenticationError, amqp.ProbableAuthenticationError) as e:
        raise AuthenticationFailed("the broker refused the user or the password") from _without_chain(e)
    except (amqp.AMQPError, OSError, TimeoutError, RuntimeError) as e:
        if reader.close_reason is not None:
            raise _refused(*reader.close_reason) from _without_chain(e)
        handshake = e.__cause__ or e  # the driver wraps it
        if isinstance(handshake, ssl.SSLError) and not isinstance(handshake, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise EncryptionFailed(
                f"no encrypted connection to the broker ({handshake.reason or handshake}): check the port, the host's "
                "name, and the authority that you trust (?cafile=…)"
            ) from _without_chain(e)
        raise Unreachable(f"the broker cannot be reached: {e or type(e).__name__}") from _without_chain(e)
    if not reader.started:
        await driver.close()
        raise _wrong_driver()
    return BrokerConnection(driver, reader)


def _driver(url: str, name: str, reader: ContentReader) -> Any:
    try:
        return aiormq.Connection(
            url, client_properties={"connection_name": name}, transport_factory=ContentStreams(reader)
        )
    except TypeError as e:
        raise _wrong_driver() from _without_chain(e)


def _wrong_driver() -> StoreError:
    return StoreError("this version of aiormq has no transport_factory; install one that pyproject.toml allows")


def _refused(code: int, text: str) -> StoreError:
    """The broker closed the connection instead of opening it."""
    if code == _NOT_ALLOWED and "limit" not in text:
        return UnknownDatabase(
            "the broker has no such virtual host, or this user may not use it: the path of the URL names it "
            f"(amqp://host/ is the one called /). The broker says: {text}"
        )
    return StoreUnavailable(f"the broker refused the connection: {text}")


def _without_chain(error: BaseException) -> BaseException:
    """Cut off the chain behind a cause: its frames show the URL."""
    error.__context__ = error.__cause__ = None
    return error
