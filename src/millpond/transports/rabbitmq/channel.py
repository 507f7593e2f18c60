"""One channel of the broker: declare, publish, consume, ack. Messages come by `frames.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from aiormq import exceptions as amqp
from pamqp.commands import Basic

from millpond.errors import StoreUnavailable
from millpond.transports.rabbitmq.broker_connection import BrokerConnection, own_tasks
from millpond.transports.rabbitmq.broker_errors import MessageTooLarge, NoAnswer, translated
from millpond.transports.rabbitmq.frames import Delivered

T = TypeVar("T")

TAG_BITS = 40
"""Lower bits of a receipt's token hold the delivery tag, the upper ones the channel's generation."""
MAX_PREFETCH = 1000
"""A quorum queue that is asked for tens of thousands of messages at once is busy with that for seconds."""
_MAX_CANCELLED = 100
_TOO_LARGE = re.compile(r"larger than (?:configured )?max size (\d+)")

OnMessage = Callable[["Channel", Delivered], None]

log = logging.getLogger("millpond.rabbitmq")


class Channel:
    """One channel. Every receipt of its deliveries contains `generation`; they are stale when the channel closes."""

    def __init__(
        self, underlay: Any, connection: BrokerConnection, timeout: float, on_closed: Callable[[Channel], None]
    ) -> None:
        self._underlay = underlay
        self._reader = connection.reader
        self._reader.receivers[underlay.number] = self
        self.properties_limit = connection.properties_limit
        self.delivery_counters = connection.delivery_counters
        self._consumer_arguments = connection.consumer_arguments
        self._on_closed = on_closed
        self._dead = self.timed_out = False
        self._closing: asyncio.Task[None] | None = None
        self._timeout = timeout
        self.generation = secrets.randbits(62 - TAG_BITS)
        self.unsettled: dict[int, None] = {}
        """Delivery tags in their order."""
        self.has_acked = False
        """True after the first ack or requeue. The broker does not answer those."""
        self._pending_gets = 0
        """Number of `get` calls to which the broker may have sent a message with a tag that is not known yet."""
        self._receivers: dict[str, OnMessage] = {}
        """By consumer tag. Those of cancelled consumers stay for a while; see `cancel`."""
        self._cancelled: deque[str] = deque()
        self._consumer_numbers = count(1)
        self._got: dict[int, Delivered] = {}
        """Answers to `get`, by delivery tag."""
        self._sending: dict[str, asyncio.Future[None]] = {}
        """Publishes that are not confirmed, by message id. The driver finds a returned message by its id alone."""
        self.in_use = 0
        """Number of calls that publish on it."""
        self._noted = 0
        self.unanswered: deque[tuple[int, Hashable]] = deque(maxlen=MAX_PREFETCH)
        """Numbered messages that were acked after the last call that the broker has answered.

        An older ack than that of a full prefetch has arrived: the broker would have sent no further message.
        """

    @classmethod
    async def open(cls, connection: BrokerConnection, timeout: float, on_closed: Callable[[Channel], None]) -> Channel:
        underlay = await call_broker(connection.open_channel(), timeout)
        channel = cls(underlay, connection, timeout, on_closed)
        underlay.closing.add_done_callback(lambda _: channel.mark_dead())
        underlay.on_consumer_cancel_callbacks.add(lambda _: channel.abandon())
        return channel

    @property
    def closed(self) -> bool:
        return self._dead or bool(self._underlay.is_closed)

    def mark_dead(self) -> None:
        """Mark the channel as dead and notify its owner once."""
        if not self._dead:
            self._dead = True
            if self._reader.receivers.get(self._underlay.number) is self:
                del self._reader.receivers[self._underlay.number]
            self._on_closed(self)

    def abandon(self) -> None:
        """Close the channel in the background. The broker cancelled a consumer because its queue was deleted."""
        self.mark_dead()
        self._closing = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await call_broker(self._underlay.close(), self._timeout)

    async def _call(self, call: Coroutine[Any, Any, T], what: str = "") -> T:
        """Return the broker's answer. Frames that were written before the call have arrived then."""
        noted = self._noted
        answer = await self._in_time(call, what)
        while self.unanswered and self.unanswered[0][0] <= noted:
            self.unanswered.popleft()
        return answer

    async def _in_time(self, call: Coroutine[Any, Any, T], what: str = "") -> T:
        """Return the result of a call. If it does not end in time the channel is dead."""
        try:
            return await call_broker(call, self._timeout, what)
        except NoAnswer:
            self.timed_out = True
            self.mark_dead()
            raise

    def note_acked(self, message: Hashable) -> None:
        """Keep a message until it is known that its ack has arrived."""
        self._noted += 1
        self.unanswered.append((self._noted, message))

    async def close(self) -> None:
        if not self.closed:
            await self._call(self._underlay.close())

    # --- topology -----------------------------------------------------------------------------------

    async def declare_queue(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Declare a queue. The broker closes the channel if it has one of that name with other arguments."""
        await self._call(self._underlay.queue_declare(name, durable=True, arguments=dict(arguments)), name)

    async def find_queue(self, name: str) -> int:
        """Return the number of messages that are ready in a queue. `NoSuchQueue` closes the channel."""
        ok = await self._call(self._underlay.queue_declare(name, passive=True), name)
        return int(ok.message_count or 0)

    async def declare_exchange(self, name: str, kind: str, arguments: Mapping[str, Any] | None = None) -> None:
        call = self._underlay.exchange_declare(name, exchange_type=kind, durable=True, arguments=dict(arguments or {}))
        await self._call(call, name)

    async def bind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, Any] | None = None
    ) -> None:
        call = self._underlay.queue_bind(queue, exchange, routing_key, arguments=dict(arguments or {}))
        await self._call(call, queue)

    # --- out ----------------------------------------------------------------------------------------

    async def send(self, exchange: str, routing_key: str, message_id: str, properties: bytes, body: bytes) -> None:
        """Publish a message and wait until its queue has stored it. It is an error if no queue takes it."""
        while (other := self._sending.get(message_id)) is not None:
            await asyncio.wait([other])
        confirmed = self._sending[message_id] = asyncio.get_running_loop().create_future()
        try:
            await self._underlay.basic_publish(
                body,
                exchange=exchange,
                routing_key=routing_key,
                properties=_EncodedProperties(message_id, properties),
                mandatory=True,
                timeout=self._timeout,
                wait=False,
            )
        except BaseException as e:
            limit = _TOO_LARGE.search(str(e)) if isinstance(e, amqp.ChannelPreconditionFailed) else None
            if limit is not None and len(body) > int(limit[1]):
                raise MessageTooLarge(len(body), int(limit[1])) from e
            error = translated(e, routing_key)
            if isinstance(error, NoAnswer) and not self._reader.blocked:
                self.timed_out = True
                self.mark_dead()
            raise error from e
        finally:
            del self._sending[message_id]
            confirmed.set_result(None)

    # --- in -----------------------------------------------------------------------------------------

    def new_consumer_tag(self) -> str:
        return str(next(self._consumer_numbers))

    async def consume(self, queue: str, prefetch: int, on_message: OnMessage, consumer_tag: str | None = None) -> str:
        """Start a consumer with at most `prefetch` unsettled messages, and return its tag.

        It also starts if the caller is cancelled; one that gave the tag can still cancel it.
        """
        consumer_tag = consumer_tag or self.new_consumer_tag()
        self._receivers[consumer_tag] = on_message

        async def limit_and_consume() -> None:
            await self._underlay.basic_qos(prefetch_count=min(prefetch, MAX_PREFETCH))
            await self._underlay.basic_consume(
                queue, self._on_driver_message, consumer_tag=consumer_tag, arguments=dict(self._consumer_arguments)
            )

        await self._call(limit_and_consume(), queue)
        return consumer_tag

    async def _on_driver_message(self, message: Any) -> None:
        log.error("aiormq delivered a message itself; its channel is closed. Install a version that pyproject.toml has")
        self.abandon()  # the message returns to its queue

    def on_delivered(self, message: Delivered) -> None:
        """Pass a message to its receiver, which never waits."""
        # Recorded even if its receiver is gone: an ack of later messages must not include it.
        self.unsettled[message.tag] = None
        try:
            self._receivers[message.consumer_tag](self, message)
        except Exception:
            log.exception("a message of the broker could not be received")

    def on_got(self, message: Delivered) -> None:
        self._got[message.tag] = message

    async def get(self, queue: str, on_message: OnMessage) -> bool:
        """Receive one message. Return False if the queue is empty."""

        async def take() -> bool:
            self._pending_gets += 1
            try:
                answer = await self._underlay.basic_get(queue)
                if isinstance(answer.delivery, Basic.GetEmpty):
                    return False
                message = self._got.pop(answer.delivery.delivery_tag)
                self.unsettled[message.tag] = None
                on_message(self, message)
                # Messages that were sent after it may have been received before it.
                self.unsettled = dict.fromkeys(sorted(self.unsettled))
                return True
            finally:
                self._pending_gets -= 1

        return await self._call(take(), queue)  # also receives it if the caller is cancelled

    async def cancel(self, consumer_tag: str) -> None:
        """Stop a consumer. Its receiver stays: a message that arrives late must not be lost in this process."""
        await self._call(self._underlay.basic_cancel(consumer_tag))
        self._cancelled.append(consumer_tag)
        if len(self._cancelled) > _MAX_CANCELLED:
            del self._receivers[self._cancelled.popleft()]

    async def catch_up(self, queue: str) -> None:
        """Return when every message that the queue has sent so far has arrived.

        The first answer comes from the queue, behind its messages to the broker's side of the channel. The second
        comes from there, behind the messages to us.
        """
        await self.find_queue(queue)
        await self._call(self._underlay.basic_qos(prefetch_count=1))

    async def ack(self, tags: Iterable[int]) -> None:
        """Ack deliveries. One ack of the last tag covers a run that starts at the first unsettled one."""
        left = dict.fromkeys(tag for tag in tags if tag in self.unsettled)
        last = 0
        if not self._pending_gets:
            for tag in self.unsettled:
                if tag not in left:
                    break
                last = tag
        self.has_acked = True
        try:
            if last:
                await self._write(self._underlay.basic_ack(last, multiple=True, wait=False))
            for tag in left:
                if tag > last:
                    await self._write(self._underlay.basic_ack(tag, wait=False))
        except BaseException as e:
            raise translated(e) from e
        self._check_written()
        self._remove_tags(left)

    async def requeue(self, tags: Sequence[int], *, counted: bool) -> None:
        """Return deliveries to the head of their queue. Up to RabbitMQ 4.2 the queue counts them in any case."""
        call = self._underlay.basic_reject if counted else self._underlay.basic_nack
        await self._return(call, tags, requeue=True)

    async def reject(self, tags: Sequence[int]) -> None:
        """Let the broker move deliveries to the dead letters of their queue."""
        await self._return(self._underlay.basic_reject, tags, requeue=False)

    async def _return(self, call: Callable[..., Coroutine[Any, Any, None]], tags: Sequence[int], **how: bool) -> None:
        self.has_acked = True
        try:
            for tag in tags:
                if tag in self.unsettled:
                    await self._write(call(tag, wait=False, **how))
        except BaseException as e:
            raise translated(e) from e
        self._check_written()
        self._remove_tags(tags)

    async def _write(self, call: Coroutine[Any, Any, None]) -> None:
        """Write a frame that has no answer. The call waits only while the driver's queue of frames is full."""
        await (self._in_time(call) if self._underlay.write_queue.full() else call)

    def _check_written(self) -> None:
        if self.closed:
            raise StoreUnavailable("the channel was closed before its frames were written")

    def _remove_tags(self, tags: Iterable[int]) -> None:
        for tag in tags:
            self.unsettled.pop(tag, None)


class _EncodedProperties(Basic.Properties):
    """Properties that are bytes already."""

    def __init__(self, message_id: str, encoded: bytes) -> None:
        self.message_id = message_id
        self._encoded = encoded

    def marshal(self) -> bytes:
        return self._encoded


async def call_broker(call: Coroutine[Any, Any, T], timeout: float, what: str = "") -> T:
    """Return the broker's answer. The call continues if its caller is cancelled, because others use the channel."""
    with own_tasks():
        task = asyncio.ensure_future(call)
    task.add_done_callback(_read_exception)
    try:
        # Not asyncio.timeout: a cancelled call of the driver may itself wait for room in the queue of frames.
        await asyncio.wait([task], timeout=timeout)
    except BaseException:
        giving_up = asyncio.get_running_loop().call_later(timeout, task.cancel)
        task.add_done_callback(lambda _: giving_up.cancel())
        raise
    if not task.done():
        task.cancel()
        raise NoAnswer("the broker did not answer in time; the sent messages may or may not have arrived")
    try:
        return task.result()
    except BaseException as e:
        raise translated(e, what) from e


def _read_exception(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an exception that has no reader."""
    if not task.cancelled():
        task.exception()
