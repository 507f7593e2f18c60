"""Deliveries that cannot be claimed as they are: each is moved elsewhere, by a copy and an ack or by the broker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Sequence
from itertools import islice
from typing import Any

import msgspec

from millpond.errors import InvalidMessage, MillpondError, StoreError, StoreUnavailable
from millpond.loop import Backoff
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.consumer import ReceivedMessage
from millpond.transports.rabbitmq.outgoing import OutgoingMessage

log = logging.getLogger("millpond.rabbitmq")

_AT_ONCE = 20
"""Number of messages in a batch. A claim that finds nothing else waits for a batch, not for all of them."""
MOST, MOST_BYTES = 200, 16 << 20
"""Number of messages of a queue that are being moved, and their bytes of memory, above which a claim receives no more.

Any publisher can send such messages, faster than they are moved. Those that cannot be moved now do not count as a
number: a few of them would hold up all others of their queue.
"""
_OVERHEAD = 2048
"""Bytes of memory for a message without body and headers."""

Send = Callable[[Sequence[OutgoingMessage]], Awaitable[None]]
SendEach = Callable[[Sequence[OutgoingMessage]], Awaitable[list[Exception | None]]]
"""Returns the error of each message, None if it is stored."""


class Republish(msgspec.Struct, frozen=True, gc=False):
    """A delivery and the message to publish in its place."""

    channel: Channel
    tag: int
    message: OutgoingMessage | None
    """None: the message was settled before, and is only acked."""
    size: int = 0
    """Bytes of memory that it takes."""
    by_broker: bool = False
    """True for a dead letter that the broker moves itself, unchanged: no copy, and no publish."""
    identity: Hashable | None = None
    """Given if the copy goes to another queue: the message itself is acked if it comes again."""
    broker_may_move: bool = True
    """Whether the broker may move the message instead, if its copy cannot be published."""

    def concerns(self, queues: Collection[str]) -> bool:
        return self.message is not None and self.message.envelope.meta.queue in queues

    @property
    def target(self) -> Hashable:
        """Moves with the same target fail together."""
        return self.message and (self.message.target, self.by_broker)


def replacement(received: ReceivedMessage, copy: OutgoingMessage, identity: Hashable | None = None) -> Republish:
    """The move of a message that was read."""
    may = received.broker_may_move
    return Republish(received.channel, received.tag, copy, received.size, identity=identity, broker_may_move=may)


class Lane:
    """Moves with one target. They fail and wait alone: no other target is held up by this one."""

    def __init__(self) -> None:
        self.pending: deque[Republish] = deque()
        self.is_failing = False
        self.tried = asyncio.Event()
        """Set after each batch, and then replaced."""
        self.running: asyncio.Task[None] | None = None

    def report(self, *, failed: bool = False) -> None:
        """Wake the claims that wait for a batch."""
        self.is_failing = failed
        tried, self.tried = self.tried, asyncio.Event()
        tried.set()


class Republisher:
    """Moves messages in the background, those with one target in the order of arrival.

    A failed one is tried again, after the others, as long as its channel lives. Given back to the broker, a message
    would have a delivery counted that never ran.
    """

    def __init__(
        self,
        record: Send,
        send: SendEach,
        *,
        can_reject: Callable[[str], bool],
        on_lost_ack: Callable[[Hashable], None],
        wait_until_blocked: Callable[[], Coroutine[Any, Any, None]],
        is_blocked: Callable[[], bool],
    ) -> None:
        self._record = record
        self._on_lost_ack = on_lost_ack
        self._send = send
        self._can_reject = can_reject
        self._wait_until_blocked = wait_until_blocked
        self._is_blocked = is_blocked
        self._lanes: dict[Hashable, Lane] = {}
        """By target. A lane without pending moves is removed."""

    def __len__(self) -> int:
        """Number of messages that are still to be moved."""
        return sum(len(lane.pending) for lane in self._lanes.values())

    def add(self, republish: Republish) -> None:
        target = republish.target
        lane = self._lanes.get(target)
        if lane is None:
            lane = self._lanes[target] = Lane()
            lane.running = asyncio.ensure_future(self._run(target, lane))
        lane.pending.append(republish)

    def room(self, queue: str) -> int | None:
        """Number of further messages of a queue that a claim may receive. None: no bound, because none is moved."""
        lanes = [lane for lane in self._lanes.values() if lane.pending and lane.pending[0].concerns([queue])]
        if not lanes:
            return None
        if sum([each.size + _OVERHEAD for lane in lanes for each in lane.pending]) >= MOST_BYTES:
            return 0
        stands_still = self._is_blocked()
        moving = [lane for lane in lanes if not (lane.is_failing or (stands_still and not lane.pending[0].by_broker))]
        return max(MOST - sum([len(lane.pending) for lane in moving]), 0)

    async def progress(self, queues: Collection[str], timeout: float) -> bool:
        """Wait for the next batch. Return False if nothing of these queues is moved: there is nothing, or no broker."""
        lanes = [
            lane
            for lane in self._lanes.values()
            if not lane.is_failing and lane.pending and lane.pending[0].concerns(queues)
        ]
        if not lanes:
            return False
        tried = {asyncio.ensure_future(lane.tried.wait()): lane for lane in lanes}
        blocked = asyncio.ensure_future(self._wait_until_blocked())
        try:
            done, _ = await asyncio.wait({*tried, blocked}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return any(not lane.is_failing for wait, lane in tried.items() if wait in done)
        finally:
            for wait in (*tried, blocked):
                wait.cancel()

    def cancel(self) -> None:
        for lane in self._lanes.values():
            if lane.running is not None:
                lane.running.cancel()

    async def _run(self, target: Hashable, lane: Lane) -> None:
        backoff = Backoff(0.1, 5.0)
        # A death between the publish and the acks leaves copies. Of suspects it shall be one.
        at_once = _AT_ONCE if lane.pending[0].identity is None else 1
        try:
            while lane.pending:
                batch = list(islice(lane.pending, at_once))
                retried = []
                for each, error in zip(batch, await self._move(batch), strict=True):
                    if error is None:
                        continue
                    if _may_succeed(error):
                        retried.append((each, error))
                    else:  # It stays unacked: given back it would come again at once.
                        log.error("a message cannot be moved; it waits until this connection ends", exc_info=error)
                if len(retried) < len(batch):
                    backoff.reset()
                    lane.report()
                else:
                    log.warning("republish failed, %d messages are retried: %s", len(lane.pending), retried[0][1])
                    lane.report(failed=True)
                    at_once = 1  # one of them may be the cause for all: the broker closes its channel
                    await asyncio.sleep(backoff.next())
                for _ in batch:
                    lane.pending.popleft()
                lane.pending += [each for each, _ in retried]
                if retried:
                    lane.pending = deque(each for each in lane.pending if not each.channel.closed)
        finally:
            del self._lanes[target]
            lane.report()

    async def _move(self, batch: Sequence[Republish]) -> list[Exception | None]:
        """Move messages of one lane. Return the error of each that stays, None for the others."""
        errors: list[Exception | None] = [None] * len(batch)
        messages = [each.message for each in batch if each.message is not None]
        if messages:
            try:
                await self._record(messages)
                if not batch[0].by_broker:
                    errors = await self._send(messages)
            except Exception as e:
                return [e] * len(batch)
        return [await self._settle(each, error) for each, error in zip(batch, errors, strict=True)]

    async def _settle(self, each: Republish, error: Exception | None) -> Exception | None:
        """Ack a message whose copy is stored, or let the broker move it. Return the error if it stays."""
        by_broker, may = each.by_broker, each.broker_may_move
        if may and isinstance(error, InvalidMessage) and each.message and self._can_reject(each.message.queue):
            log.error("a message cannot be published again; the broker moves it to the dead letters: %s", error)
            by_broker = True
        elif error is not None:
            return error
        try:
            if by_broker:
                await each.channel.reject([each.tag])
            else:
                await self._ack_copied(each)
        except StoreUnavailable:
            pass
        except Exception as e:
            return e
        return None

    async def _ack_copied(self, each: Republish) -> None:
        try:
            await each.channel.ack([each.tag])
        except StoreUnavailable:
            if each.identity is not None:
                self._on_lost_ack(each.identity)
        else:
            if each.identity is not None:
                each.channel.note_acked(each.identity)


async def republish_together(batch: Sequence[Republish], send: Send) -> None:
    """Publish a batch, then ack its deliveries."""
    await send([each.message for each in batch if each.message is not None])
    tags: dict[Channel, list[int]] = {}
    for each in batch:
        tags.setdefault(each.channel, []).append(each.tag)
    for channel, some in tags.items():
        with contextlib.suppress(StoreUnavailable):
            await channel.ack(some)


def _may_succeed(error: BaseException | None) -> bool:
    return isinstance(error, MillpondError) and (error.retryable or isinstance(error, StoreError))
