"""FAILED messages of a broker: kept in one queue for each queue, listed and published again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import moment
from millpond.errors import InvalidOption, MillpondError, not_supported
from millpond.message import SETTLED, Published, State, replayed_id
from millpond.transport import Capability, Row
from millpond.transports.arguments import archive_position, page_size, queue_names, states_among, unique_ids
from millpond.transports.rabbitmq.driver import Channel
from millpond.transports.rabbitmq.envelope import Envelope, opened
from millpond.transports.rabbitmq.lacking import Lacking
from millpond.transports.rabbitmq.names import aside_arguments, dead_name
from millpond.transports.rabbitmq.publisher import Parcel
from millpond.transports.rabbitmq.rows import row_of
from millpond.transports.rabbitmq.transport import RabbitTransport

_AT_ONCE = 1000
_KEPT = 2.0
"""Seconds that letters stay in our hands after a full page of them, since the next page may be asked for."""


class Letter(msgspec.Struct, frozen=True, gc=False):
    tag: int
    envelope: Envelope
    row: Row


class Hand(msgspec.Struct):
    """All letters of a queue while they are with us, newest first."""

    channel: Channel
    letters: list[Letter]


class DeadLetters(Lacking):
    """What an operator may ask of a broker: FAILED messages, queue by queue. A retried one leaves them.

    A queue can only be looked at by taking its messages out. Whoever goes through many of them page by page has them
    taken out once, not for each page.
    """

    capabilities = Capability.DEAD_LETTERS

    def __init__(self, transport: RabbitTransport) -> None:
        self._transport = transport
        self._queues: dict[str, None] = {}
        """Those that were asked for: a broker does not tell which there are."""
        self._hands: dict[str, Hand] = {}
        self._turn = asyncio.Lock()
        self._putting_back: asyncio.Task[None] | None = None

    async def browse(self, queue: str | None = None, **choice: Any) -> list[Row]:
        """Live messages cannot be looked at; asked for all states, only FAILED ones are listed."""
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
        limit: int = 100,
        after: Sequence[Any] | None = None,
    ) -> list[Row]:
        """Dead letters, newest first. They are taken out for a moment, and put back."""
        page_size(limit)
        chosen = states_among(states, SETTLED, "archived")
        below = None if after is None else archive_position(after)
        if queue is None:
            raise not_supported("listing without the name of a queue", Capability.BROWSE)
        (name,) = queue_names([queue])
        self._queues[name] = None
        if State.FAILED not in chosen:
            return []
        first = None if since is None else moment(since, "since")
        end = None if until is None else moment(until, "until")
        async with self._turn:
            if below is None:
                await self._put_back(name)
            rows = (letter.row for letter in (await self._in_hand(name)).letters)
            page = list(
                islice(
                    (
                        row
                        for row in rows
                        if key in (None, row.key)
                        and (below is None or row.position < below)
                        and (first is None or _failed(row) >= first)
                        and (end is None or _failed(row) < end)
                    ),
                    limit,
                )
            )
            if len(page) < limit:
                await self._put_back(name)
        return page

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        """Among the dead letters of the queues that were listed."""
        wanted = set(unique_ids(ids))
        async with self._turn:
            hands = [await self._in_hand(queue) for queue in self._listed()]
            return [letter.row for hand in hands for letter in hand.letters if letter.row.id in wanted]

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        """Publish dead letters again under new ids, and take them out: confirmed first, then acked."""
        if not isinstance(name, str) or not name:
            raise InvalidOption("a replay needs a name")
        wanted = set(unique_ids(ids))
        published = []
        async with self._turn:
            for origin in self._listed():
                hand = await self._in_hand(origin)
                chosen = [letter for letter in hand.letters if letter.row.id in wanted]
                again = [_again(letter.envelope, name, queue or origin, self._transport.now()) for letter in chosen]
                if again:
                    await self._transport.publisher.send([Parcel(envelope) for envelope in again])
                    await hand.channel.ack([letter.tag for letter in chosen])
                    hand.letters = [letter for letter in hand.letters if letter.row.id not in wanted]
                published += [Published(envelope.id) for envelope in again]
        return published

    def _listed(self) -> list[str]:
        if not self._queues:
            raise not_supported("finding a message by its id, without the name of its queue,", Capability.BROWSE)
        return list(self._queues)

    # --- in our hands -------------------------------------------------------------------------------

    async def _in_hand(self, queue: str) -> Hand:
        """All letters of a queue, until they are put back, or nobody has asked for any for a while."""
        hand = self._hands.get(queue)
        if hand is None or hand.channel.closed:
            channel = await self._transport.subscribing.channel()
            try:
                letters = await self._take(channel, queue)
            except BaseException:
                await channel.close()  # what it has goes back
                raise
            hand = self._hands[queue] = Hand(channel, letters)
        if self._putting_back is not None:
            self._putting_back.cancel()
        self._putting_back = asyncio.create_task(self._put_all_back())
        return hand

    async def _put_all_back(self) -> None:
        await asyncio.sleep(_KEPT)
        async with self._turn:
            self._putting_back = None  # not to be cancelled any more
            for queue in list(self._hands):
                with contextlib.suppress(MillpondError):  # a lost channel has put them back already
                    await self._put_back(queue)

    async def _put_back(self, queue: str) -> None:
        hand = self._hands.pop(queue, None)
        if hand is not None and not hand.channel.closed:
            await hand.channel.requeue([letter.tag for letter in hand.letters])
            await hand.channel.close()

    async def _take(self, channel: Channel, queue: str) -> list[Letter]:
        dead = dead_name(queue)
        await self._transport.topology.aside(dead)
        letters: list[Letter] = []

        def received(_: Channel, message: Any) -> None:
            properties = message.header.properties
            envelope = opened(properties.message_id, properties.headers, message.body, queue, self._transport.now())
            letters.append(Letter(message.delivery.delivery_tag, envelope, row_of(envelope, State.FAILED)))

        while True:
            before = len(letters)
            consumer = await channel.consume(dead, _AT_ONCE, received)
            await channel.caught_up(dead, aside_arguments())
            await channel.cancel(consumer)
            if len(letters) == before:
                return sorted(letters, key=lambda letter: letter.row.position, reverse=True)


def _again(envelope: Envelope, name: str, queue: str, now: int) -> Envelope:
    headers = {**envelope.native, "replay-of": str(envelope.id)}
    past = msgspec.structs.replace(
        envelope.past,
        queue=queue,
        created_us=now,
        due_us=now,
        deliveries=0,
        attempts=0,
        first_attempt_us=None,
        last_attempt_us=None,
        expires_us=None,
        failed_us=None,
        reason=None,
        error=None,
    )
    return Envelope(replayed_id(envelope.id, name), envelope.payload, headers, past)


def _failed(row: Row) -> int:
    return row.archived_us or 0
