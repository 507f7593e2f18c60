"""The one place that knows aio-pika: connections, channels, and what their errors mean.

Of aio-pika only the protocol layer is used, aiormq: reconnecting is ours, since receipts must know of it, and its
message objects would take a good part of the time that a message has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

import aiormq
from aiormq import exceptions as amqp
from pamqp.commands import Basic

from millpond.errors import (
    AuthenticationFailed,
    EncryptionFailed,
    MillpondError,
    QueueMismatch,
    StoreError,
    StoreUnavailable,
    UnknownDatabase,
    Unreachable,
    Unroutable,
)

T = TypeVar("T")

TAG_BITS = 40
"""Of a receipt's token: below, the delivery tag; above, the channel's generation."""
MOST_PREFETCH = 1000
"""A quorum queue that is asked for tens of thousands at once is busy with that for seconds."""
PERSISTENT = 2
_CANCELLED_KEPT = 100

OnMessage = Callable[["Channel", Any], None]

log = logging.getLogger("millpond.rabbitmq")

# It logs each lost connection with its stack; we say the same in a line, and go on.
logging.getLogger("aiormq").setLevel(logging.CRITICAL)


class NoAnswer(StoreUnavailable):
    """The broker did not answer in time."""


class NoSuchQueue(StoreUnavailable):
    """The queue was deleted meanwhile; it is declared again by the next try."""


async def open_connection(url: str, name: str, timeout: float) -> Any:
    """A connection, or the error that says why there is none."""
    try:
        async with asyncio.timeout(timeout):
            return await aiormq.connect(url, client_properties={"connection_name": name})
    except (amqp.AuthenticationError, amqp.ProbableAuthenticationError) as e:
        raise AuthenticationFailed("the broker refused the user or the password") from _without(e)
    except (amqp.ConnectionNotAllowed, amqp.InvalidFrameError) as e:  # the latter: closed instead of opened
        raise UnknownDatabase(
            "the broker has no such virtual host, or this user may not use it: the path of the URL names it "
            "(amqp://host/ is the one called /)"
        ) from _without(e)
    except (amqp.AMQPError, OSError, TimeoutError, RuntimeError) as e:
        handshake = e.__cause__ or e  # the driver wraps it
        if isinstance(handshake, ssl.SSLError) and not isinstance(handshake, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise EncryptionFailed(
                f"no encrypted connection to the broker ({handshake.reason or handshake}): check the port, the host's "
                "name, and the authority that you trust (?cafile=…)"
            ) from _without(e)
        raise Unreachable(f"the broker cannot be reached: {e or type(e).__name__}") from _without(e)


def _without(error: BaseException) -> BaseException:
    """The cause, without the chain behind it, whose frames show the URL."""
    error.__context__ = error.__cause__ = None
    return error


class Channel:
    """One channel. `generation` is in every receipt of what it delivers; when it closes, they are stale."""

    def __init__(self, underlay: Any, timeout: float, on_closed: Callable[[Channel], None]) -> None:
        self._underlay = underlay
        self._on_closed = on_closed
        self._broken = self.unanswered = False
        self._closing: asyncio.Task[None] | None = None
        underlay._on_deliver_frame = self._deliver
        self._timeout = timeout
        self.generation = secrets.randbits(62 - TAG_BITS)
        self.unsettled: dict[int, None] = {}
        """Delivery tags in their order."""
        self.settles = False
        """Whether acks were sent, which nobody answers."""
        self._getting = 0
        """Calls that may have been sent a message whose tag is not known yet."""
        self._receivers: dict[str, OnMessage] = {}
        """By the names of consumers. One that is cancelled is kept for a while; see `cancel`."""
        self._cancelled: deque[str] = deque()
        self._consumer_numbers = count(1)
        self.in_use = 0

    @classmethod
    async def open(cls, connection: Any, timeout: float, on_closed: Callable[[Channel], None]) -> Channel:
        underlay = await answered(connection.channel(publisher_confirms=True, on_return_raises=True), timeout)
        channel = cls(underlay, timeout, on_closed)
        underlay.closing.add_done_callback(lambda _: channel.gone())
        underlay.on_consumer_cancel_callbacks.add(lambda _: channel.deprive())
        return channel

    @property
    def closed(self) -> bool:
        return self._broken or bool(self._underlay.is_closed)

    def gone(self) -> None:
        """Of no use any more."""
        if not self._broken:
            self._broken = True
            self._on_closed(self)

    def deprive(self) -> None:
        """The broker took a consumer away, for its queue was deleted: begin anew, with a channel that has its own."""
        self.gone()
        self._closing = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await answered(self._underlay.close(), self._timeout)

    async def _answered(self, call: Coroutine[Any, Any, T], what: str = "") -> T:
        """The broker's answer. A channel that got none is given up."""
        try:
            return await answered(call, self._timeout, what)
        except NoAnswer:
            self.unanswered = True
            self.gone()
            raise

    async def close(self) -> None:
        if not self.closed:
            await self._answered(self._underlay.close())

    # --- topology -----------------------------------------------------------------------------------

    async def declare_queue(self, name: str, arguments: Mapping[str, Any]) -> int:
        """How many messages are ready in it."""
        ok = await self._answered(self._underlay.queue_declare(name, durable=True, arguments=dict(arguments)), name)
        return int(ok.message_count or 0)

    async def declare_exchange(self, name: str, kind: str) -> None:
        await self._answered(self._underlay.exchange_declare(name, exchange_type=kind, durable=True), name)

    async def bind(self, queue: str, exchange: str, arguments: Mapping[str, Any]) -> None:
        await self._answered(self._underlay.queue_bind(queue, exchange, arguments=dict(arguments)), queue)

    # --- out ----------------------------------------------------------------------------------------

    async def send(self, exchange: str, routing_key: str, id_: UUID, body: bytes, headers: dict[str, Any]) -> None:
        """Durable at its queue when this returns; one that no queue takes is an error."""
        properties = Basic.Properties(headers=headers, delivery_mode=PERSISTENT, message_id=str(id_))
        try:
            await self._underlay.basic_publish(
                body,
                exchange=exchange,
                routing_key=routing_key,
                properties=properties,
                mandatory=True,
                timeout=self._timeout,
                wait=False,
            )
        except BaseException as e:
            raise meaning(e, routing_key) from e

    # --- in -----------------------------------------------------------------------------------------

    async def consume(self, queue: str, prefetch: int, on_message: OnMessage) -> str:
        """Be sent messages, so many ahead of their acks; returns the name of the consumer."""

        consumer = str(next(self._consumer_numbers))
        self._receivers[consumer] = on_message

        async def both() -> None:
            await self._underlay.basic_qos(prefetch_count=min(prefetch, MOST_PREFETCH))
            await self._underlay.basic_consume(queue, self._deliver, consumer_tag=consumer)

        await self._answered(both(), queue)
        return consumer

    async def _deliver(self, frame: Any) -> None:
        """Hand a message over when it is complete. By itself the library makes a task for each, which takes a fifth of
        the time that a message has; and what receives here never waits."""
        message = await self._underlay._read_content(frame, await self._underlay._get_frame())
        self.unsettled[frame.delivery_tag] = None  # also if nobody receives it: no ack of later ones may be its own
        try:
            self._receivers[frame.consumer_tag](self, message)
        except Exception:
            log.exception("a message of the broker could not be received")

    async def get(self, queue: str, on_message: OnMessage) -> bool:
        """One message, if there is one."""

        async def take() -> bool:
            self._getting += 1
            try:
                message = await self._underlay.basic_get(queue)
                if isinstance(message.delivery, Basic.GetEmpty):
                    return False
                self.unsettled[message.delivery.delivery_tag] = None
                on_message(self, message)
                # Others that were sent after it may have been received before.
                self.unsettled = dict.fromkeys(sorted(self.unsettled))
                return True
            finally:
                self._getting -= 1

        return await self._answered(take(), queue)  # which receives it also for a caller that is cancelled

    async def cancel(self, consumer: str) -> None:
        """Be sent no more. What comes late all the same is received: a message must not be in nobody's hands."""
        await self._answered(self._underlay.basic_cancel(consumer))
        self._cancelled.append(consumer)
        if len(self._cancelled) > _CANCELLED_KEPT:
            del self._receivers[self._cancelled.popleft()]

    async def caught_up(self, queue: str, arguments: Mapping[str, Any]) -> None:
        """Return when all that the queue has sent so far has arrived.

        The first answer comes from the queue, behind what it has sent to the broker's side of the channel; the
        second from there, behind what that has sent to us.
        """
        await self.declare_queue(queue, arguments)
        await self._answered(self._underlay.basic_qos(prefetch_count=1))

    async def ack(self, tags: Iterable[int]) -> None:
        """A run of tags from the first unsettled one on is acked by its last."""
        left = dict.fromkeys(tag for tag in tags if tag in self.unsettled)
        last = 0
        if not self._getting:
            for tag in self.unsettled:
                if tag not in left:
                    break
                last = tag
        self.settles = True
        try:
            if last:
                await self._underlay.basic_ack(last, multiple=True, wait=False)
            for tag in left:
                if tag > last:
                    await self._underlay.basic_ack(tag, wait=False)
        except BaseException as e:
            raise meaning(e) from e
        self._settled(left)

    async def requeue(self, tags: Sequence[int]) -> None:
        """Back to the head of their queue, which counts the delivery."""
        self.settles = True
        try:
            for tag in tags:
                if tag in self.unsettled:
                    await self._underlay.basic_nack(tag, requeue=True, wait=False)
        except BaseException as e:
            raise meaning(e) from e
        self._settled(tags)

    def _settled(self, tags: Iterable[int]) -> None:
        for tag in tags:
            self.unsettled.pop(tag, None)


async def answered(call: Coroutine[Any, Any, T], timeout: float, what: str = "") -> T:
    """The broker's answer. A caller that is cancelled does not break the channel, on which others depend."""
    task = asyncio.ensure_future(_within(call, timeout))
    try:
        return await asyncio.shield(task)
    except BaseException as e:
        task.add_done_callback(_ignored)
        raise meaning(e, what) from e


async def _within(call: Coroutine[Any, Any, T], timeout: float) -> T:
    async with asyncio.timeout(timeout):
        return await call


def _ignored(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def meaning(error: BaseException, what: str = "") -> BaseException:
    """The same error in our words. A cancellation that comes from a closing channel is a lost connection."""
    match error:
        case MillpondError():
            return error
        case amqp.PublishError():
            return Unroutable(f"no queue took the message for {what!r}: it was deleted, or its binding was")
        case amqp.DeliveryError():
            return StoreUnavailable(f"the broker refused a message for {what!r}; publish it again")
        case amqp.ChannelPreconditionFailed() if " arg '" in str(error):  # else it is about a delivery
            return QueueMismatch(
                f"the broker has {what!r} with other settings than ours: {error}. Delete it when it is empty, or "
                "give the option queue_type that fits"
            )
        case amqp.ChannelNotFoundEntity():
            return NoSuchQueue(f"there is no {what!r} at the broker any more; it is declared again")
        case amqp.ChannelAccessRefused():
            return StoreError(f"this user of the broker may not do that with {what!r}: {error}")
        case asyncio.CancelledError():
            task = asyncio.current_task()
            return error if task is not None and task.cancelling() else StoreUnavailable("the channel was closed")
        case TimeoutError():
            return NoAnswer("the broker did not answer in time; what was sent may or may not have arrived")
        case amqp.AMQPError() | amqp.ChannelInvalidStateError() | OSError() | RuntimeError():
            return StoreUnavailable(f"the connection to the broker was lost: {error or type(error).__name__}")
        case Exception() if type(error) is Exception:  # what the driver's calls end with when it is closed under them
            return StoreUnavailable("the connection was closed")
        case _:
            return error
