"""FAILED messages at the broker: a side queue for each queue, listed and published again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import monotonic, time_us
from millpond.errors import InvalidMessage, InvalidOption, MillpondError, StoreUnavailable, not_supported
from millpond.failed_attempts import fingerprint
from millpond.message import SETTLED, Published, State
from millpond.seam.operations import Operations, QueueStats, Row
from millpond.seam.transport import Capability, refused
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.connections import ConnectionPool
from millpond.transports.rabbitmq.copies import unreadable_envelope
from millpond.transports.rabbitmq.depths import count_queues
from millpond.transports.rabbitmq.envelope import (
    Envelope,
    open_envelope,
    replay_envelope,
    settled_row,
)
from millpond.transports.rabbitmq.frames import Delivered
from millpond.transports.rabbitmq.names import UNDELIVERED, amqp_name, dead_name
from millpond.transports.rabbitmq.outgoing import OutgoingMessage
from millpond.transports.rabbitmq.properties import decode, readable
from millpond.transports.rabbitmq.publisher import Publisher
from millpond.transports.rabbitmq.topology import Topology
from millpond.transports.validation import archive_position, page_size, queue_names, states_among, unique_ids

log = logging.getLogger("millpond.rabbitmq")

MOST_LETTERS, MOST_BYTES = 10_000, 64 << 20
"""Number of letters of a queue, and bytes that they take, that are in this process at once: the oldest ones."""
_AT_ONCE = 250
_KEEP_FOR = 2.0
"""Seconds that letters stay in this process after a full page, because the next page may be read."""

_ASK_AGAIN_AFTER = 0.1

_COUNTER = "x-delivery-count"


class _Blocked(StoreUnavailable):
    """Nothing was published."""


class Letter(msgspec.Struct, frozen=True, gc=False):
    tag: int
    envelope: Envelope
    row: Row
    is_replaced: bool
    """True if a copy is put back. A delivery limit then never counts more than one return, and the id stays."""
    size: int
    """Bytes of memory, roughly."""


class LetterPage(msgspec.Struct):
    """Letters of a queue while they are in this process, newest first."""

    channel: Channel
    letters: list[Letter]
    left: int
    """Number of letters that stayed in the queue."""

    @property
    def held(self) -> int:
        """Number of letters that the broker does not count, because they are in this process."""
        return sum(letter.tag in self.channel.unsettled for letter in self.letters)

    def chosen(self, ids: Collection[UUID]) -> list[Letter]:
        return [letter for letter in self.letters if letter.row.id in ids]


class DeadLetters:
    """Operator verbs for FAILED messages, queue by queue. A retried message leaves the dead letters.

    A queue can only be read by taking its messages out: once for all pages, not for each page. Of many letters only the
    oldest are taken out.
    """

    reschedule = refused("reschedule on RabbitMQ", Capability.RESCHEDULE)
    cancel = refused("cancel on RabbitMQ", Capability.RESCHEDULE)
    done = refused("done on RabbitMQ", Capability.RESCHEDULE)
    mark_retried = refused("marks of retried messages on RabbitMQ", Capability.RESCHEDULE)
    pause = refused("pause on RabbitMQ", Capability.PAUSE)
    resume = refused("resume on RabbitMQ", Capability.PAUSE)
    rates = refused("rates on RabbitMQ", Capability.ARCHIVE)
    history = refused("history on RabbitMQ", Capability.ARCHIVE)
    failures = refused("failures in groups on RabbitMQ", Capability.ARCHIVE)
    retain = refused("retain on RabbitMQ", Capability.ARCHIVE)
    settings = refused("settings of a queue on RabbitMQ", Capability.SETTINGS)
    configure = refused("settings of a queue on RabbitMQ", Capability.SETTINGS)
    purge = refused("purge on RabbitMQ", Capability.ARCHIVE)
    record = refused("record on RabbitMQ", Capability.ARCHIVE)

    def __init__(
        self,
        pool: ConnectionPool,
        topology: Topology,
        publisher: Publisher,
        archive: Operations | None,
        now: Callable[[], int],
        call_timeout: float,
    ) -> None:
        self._pool = pool
        self._topology = topology
        self._publisher = publisher
        self._archive = archive
        self._now = now
        self._call_timeout = call_timeout
        self._queues: dict[str, None] = {}
        """Queues that were listed. A broker cannot list its queues."""
        self._pages: dict[str, LetterPage] = {}
        self._lock = asyncio.Lock()
        self._putting_back: asyncio.Task[None] | None = None

    async def count(self, queues: Sequence[str] | None = None, *, exact: bool = False) -> list[QueueStats]:
        """Messages that are ready, and dead letters. The states of others are missing."""
        if queues is None:
            raise not_supported("counting without the names of queues", Capability.BROWSE)
        names = queue_names(queues)
        async with self._lock:
            for name in names:
                await self._put_back(name)
            held = {name: page.held for name, page in self._pages.items() if not page.channel.closed}
        return await count_queues(self._pool, self._archive, names, held, exact=exact)

    async def has_queue(self, queue: str) -> bool:
        (name,) = queue_names([queue])
        return await self._topology.exists(amqp_name(name)) or await self._topology.exists(dead_name(name))

    async def browse(self, queue: str | None = None, **choice: Any) -> list[Row]:
        """Live messages cannot be read: a list of all states has FAILED messages only."""
        if queue is None:
            raise not_supported("listing without the name of a queue", Capability.BROWSE)
        return []

    async def archived(
        self,
        queue: str | None = None,
        *,
        states: Sequence[State] | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        failure: int | None = None,
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        """Dead letters, newest first. They are taken out and put back."""
        page_size(limit)
        chosen = states_among(states, SETTLED, "archived")
        below = None if after is None else archive_position(after)
        if queue is None:
            raise not_supported("listing without the name of a queue", Capability.ARCHIVE)
        (name,) = queue_names([queue])
        self._queues[name] = None
        if State.FAILED not in chosen:
            return []
        first = None if since is None else time_us(since, "since")
        end = None if until is None else time_us(until, "until")
        async with self._lock:
            if below is None:
                await self._put_back(name)
            taken_out = await self._take_out(name)
            rows = (letter.row for letter in taken_out.letters)
            page = list(
                islice(
                    (
                        row
                        for row in rows
                        if key in (None, row.key)
                        and failure in (None, fingerprint(row.reason, row.error))
                        and (below is None or row.position < below)
                        and (first is None or _failed_us(row) >= first)
                        and (end is None or _failed_us(row) < end)
                    ),
                    limit,
                )
            )
            if len(page) < limit and not taken_out.left:  # otherwise a later call would take others out
                await self._put_back(name)
        return page

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        """Find messages among the dead letters of queues that were listed."""
        wanted = set(unique_ids(ids))
        found: list[Row] = []
        async with self._lock:
            for queue in self._listed_queues("finding", Capability.BROWSE):
                async for page in self._pages_with(queue, wanted):
                    found += [letter.row for letter in page.chosen(wanted)]
        return found

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        """Publish dead letters again under new ids. When that is confirmed, ack them, which removes them."""
        if not isinstance(name, str) or not name:
            raise InvalidOption("a replay needs a name")
        wanted = set(unique_ids(ids))
        published = []
        async with self._lock:
            for origin in self._listed_queues("replaying", Capability.ARCHIVE):
                async for page in self._pages_with(origin, wanted):
                    # A message that no queue took, and that names none, needs `queue`.
                    if chosen := [
                        letter for letter in page.chosen(wanted) if (queue or letter.row.queue) != UNDELIVERED
                    ]:
                        now = self._now()
                        replays = [
                            replay_envelope(letter.envelope, name, queue or letter.row.queue, now) for letter in chosen
                        ]
                        await self._check_reads()
                        errors = await self._publisher.send_each([OutgoingMessage(envelope) for envelope in replays])
                        done = _stored([letter.tag for letter in chosen], errors)
                        await page.channel.ack(done)
                        page.letters = [letter for letter in page.letters if letter.tag not in done]
                        _raise_first(errors)
                        published += [Published(envelope.id) for envelope in replays]
        return published

    async def put_all_back(self) -> None:
        """Put back all letters that are in this process. While the broker blocks publishes, wait for `call_timeout`."""
        give_up_at = monotonic() + self._call_timeout
        async with self._lock:
            while True:
                for queue in list(self._pages):
                    await self._put_back(queue)
                if not self._pages or monotonic() > give_up_at:
                    return  # the end of their channels returns the others
                await asyncio.sleep(_ASK_AGAIN_AFTER)

    def _listed_queues(self, action: str, capability: Capability) -> list[str]:
        if not self._queues:
            raise not_supported(f"{action} a message by its id, without the name of its queue,", capability)
        return list(self._queues)

    # --- taken out ----------------------------------------------------------------------------------

    async def _pages_with(self, queue: str, wanted: Collection[UUID]) -> AsyncIterator[LetterPage]:
        """Pages until all wanted letters were found. In a long queue the letters of each page move to its end."""
        missing = set(wanted)
        page = await self._take_out(queue)
        left = page.left
        while True:
            missing.difference_update([letter.row.id for letter in page.letters])
            yield page
            if not missing or left <= 0:
                return
            await self._put_back(queue, at_the_end=True)
            page = await self._take_out(queue)
            left -= len(page.letters)

    async def _take_out(self, queue: str) -> LetterPage:
        """Take the letters of a queue out. They are put back after `_KEEP_FOR` seconds without a call."""
        page = self._pages.get(queue)
        if page is None or page.channel.closed:
            channel = await self._pool.channel()
            try:
                page = self._pages[queue] = await self._receive(channel, queue)
            except BaseException:
                await channel.close()  # its letters return to their queue
                raise
        self._put_back_soon()
        return page

    def _put_back_soon(self) -> None:
        if self._putting_back is not None:
            self._putting_back.cancel()
        self._putting_back = asyncio.create_task(self._put_back_later())

    async def _put_back_later(self) -> None:
        await asyncio.sleep(_KEEP_FOR)
        async with self._lock:
            self._putting_back = None  # must not be cancelled from here on
            for queue in list(self._pages):
                with contextlib.suppress(MillpondError):  # the connection was lost: the broker has put them back
                    await self._put_back(queue)
            if self._pages:  # the broker blocks publishes
                self._put_back_soon()

    async def _put_back(self, queue: str, *, at_the_end: bool = False) -> None:
        """Put letters back. While the broker blocks publishes, a page with letters to replace stays in this process."""
        page = self._pages.pop(queue, None)
        if page is None or page.channel.closed:
            return
        replaced = [letter for letter in page.letters if letter.is_replaced or at_the_end]
        try:
            if replaced:
                await self._check_reads()
            await self._replace(page.channel, queue, replaced)
            # All but those that were replaced.
            await page.channel.requeue([letter.tag for letter in page.letters], counted=False)
        except _Blocked:
            self._pages[queue] = page
            if at_the_end:
                raise
        except MillpondError as e:
            if at_the_end:
                raise
            log.warning("dead letters of queue %r return counted as delivered: %s", queue, e)
        finally:
            if queue not in self._pages:
                await page.channel.close()  # after an error its letters return to their queue

    async def _check_reads(self) -> None:
        """Copies that the broker does not read would wait in the socket, with all calls here behind them."""
        if not await self._publisher.is_read():
            raise _Blocked("the broker is short of memory or disk and blocks publishes; try again when it reads them")

    async def _replace(self, channel: Channel, queue: str, letters: Sequence[Letter]) -> None:
        if letters:
            copies = [OutgoingMessage(letter.envelope, side_queue=dead_name(queue)) for letter in letters]
            errors = await self._publisher.send_each(copies)
            await channel.ack(_stored([letter.tag for letter in letters], errors))
            # One that is larger than the broker allows now stays as it is.
            _raise_first([error for error in errors if not isinstance(error, InvalidMessage)])

    async def _receive(self, channel: Channel, queue: str) -> LetterPage:
        """Take the oldest letters out, within the limits. Their sizes are not known before."""
        dead = dead_name(queue)
        await self._topology.declare_side_queue(dead)
        letters: list[Letter] = []

        excess: list[int] = []
        size = 0

        def add_letter(_: Channel, message: Delivered) -> None:
            nonlocal size
            size += message.size
            if excess or (letters and size > MOST_BYTES):
                excess.append(message.tag)  # without its body
            else:
                letters.append(_letter(message, queue, self._now()))

        count, before = 1, -1
        while count and len(letters) > before:
            before = len(letters)
            consumer_tag = await channel.consume(dead, count, add_letter)
            await channel.catch_up(dead)
            await channel.cancel(consumer_tag)
            if excess:
                await channel.requeue(excess, counted=False)
                await channel.catch_up(dead)
                break
            count = _next_count(count, [letter.size for letter in letters])
        left = await channel.find_queue(dead) if len(letters) > before else 0
        if left:
            log.warning("dead letters of queue %r: the oldest %d are read, %d more wait", queue, len(letters), left)
        letters.sort(key=lambda letter: letter.row.position, reverse=True)
        return LetterPage(channel, letters, left)


def _stored(tags: Sequence[int], errors: Sequence[Exception | None]) -> set[int]:
    return {tag for tag, error in zip(tags, errors, strict=True) if error is None}


def _raise_first(errors: Sequence[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _next_count(count: int, sizes: Sequence[int]) -> int:
    """Number of letters to take next: ten times more than before, unless the largest so far would be too many."""
    room = (MOST_BYTES - sum(sizes)) // max(*sizes, 1, 1)
    return max(min(count * 10, _AT_ONCE, MOST_LETTERS - len(sizes), room), 0)


def _letter(message: Delivered, queue: str, now: int) -> Letter:
    """Any message among the dead letters. The broker moves messages there too, with its own headers."""
    try:
        properties = decode(message.properties)
        deaths = readable(properties.headers.get("x-death"))
        was_returned = message.redelivered and readable(properties.headers.get(_COUNTER)) != 0
        envelope = open_envelope(properties, message.body, queue, now, keep_queue=queue == UNDELIVERED)
        if envelope.meta.failed_us is not None:
            is_replaced = was_returned or not properties.message_id  # without it, each list would give a new id
            return Letter(message.tag, envelope, settled_row(envelope, State.FAILED), is_replaced, message.size)
        reason, at = _death(deaths)
        envelope = envelope.with_meta(failed_us=at or now, reason=reason)
    except Exception as e:
        envelope = unreadable_envelope(queue, message.body, f"{type(e).__name__}: {e}", now)
    return Letter(message.tag, envelope, settled_row(envelope, State.FAILED), True, message.size)


def _death(deaths: Any) -> tuple[str, int | None]:
    """(reason, time) of the broker's last move, from its header."""
    last = deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}
    at = last.get("time")
    time = time_us(datetime.fromisoformat(at), "x-death") if isinstance(at, str) else None
    reason = str(last.get("reason") or "moved").replace("\x00", "�")  # any publisher can write the header
    return f"{reason} by the broker"[:200], time


def _failed_us(row: Row) -> int:
    return row.archived_us or 0
