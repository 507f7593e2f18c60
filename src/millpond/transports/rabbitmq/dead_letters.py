"""FAILED messages of a broker: kept in one queue for each queue, listed and published again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from millpond.clock import moment
from millpond.errors import InvalidOption, not_supported
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


class Letter(msgspec.Struct, frozen=True, gc=False):
    tag: int
    envelope: Envelope


class DeadLetters(Lacking):
    """What an operator may ask of a broker: FAILED messages, queue by queue. A retried one leaves them."""

    capabilities = Capability.DEAD_LETTERS

    def __init__(self, transport: RabbitTransport) -> None:
        self._transport = transport
        self._queues: dict[str, None] = {}
        """Those that were asked for: a broker does not tell which there are."""

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
        channel = await self._transport.subscribing.channel()
        try:
            letters = await self._take(channel, name)
            await channel.requeue([letter.tag for letter in letters])
        finally:
            await channel.close()
        rows = [row_of(letter.envelope, State.FAILED) for letter in letters]
        first = None if since is None else moment(since, "since")
        end = None if until is None else moment(until, "until")
        rows = [
            row
            for row in rows
            if key in (None, row.key)
            and (below is None or row.position < below)
            and (first is None or _failed(row) >= first)
            and (end is None or _failed(row) < end)
        ]
        return sorted(rows, key=lambda row: row.position, reverse=True)[:limit]

    async def find(self, ids: Sequence[UUID]) -> list[Row]:
        """Among the dead letters of the queues that were listed."""
        wanted = set(unique_ids(ids))
        rows = [row for queue in list(self._queues) for row in await self.archived(queue, limit=10_000)]
        return [row for row in rows if row.id in wanted]

    async def replay(self, ids: Sequence[UUID], *, name: str, queue: str | None = None) -> list[Published]:
        """Publish dead letters again under new ids, and take them out: confirmed first, then acked."""
        if not isinstance(name, str) or not name:
            raise InvalidOption("a replay needs a name")
        wanted = set(unique_ids(ids))
        published = []
        for origin in list(self._queues):
            channel = await self._transport.subscribing.channel()
            try:
                letters = await self._take(channel, origin)
                chosen = [letter for letter in letters if letter.envelope.id in wanted]
                again = [_again(letter.envelope, name, queue or origin, self._transport.now()) for letter in chosen]
                if again:
                    await self._transport.publisher.send([Parcel(envelope) for envelope in again])
                await channel.ack([letter.tag for letter in chosen])
                await channel.requeue([letter.tag for letter in letters if letter not in chosen])
            finally:
                await channel.close()  # whatever is not settled goes back
            published += [Published(envelope.id) for envelope in again]
        return published

    async def _take(self, channel: Channel, queue: str) -> list[Letter]:
        """All of them, in our hands."""
        dead = dead_name(queue)
        await self._transport.topology.aside(dead)
        letters: list[Letter] = []

        def received(_: Channel, message: Any) -> None:
            properties = message.header.properties
            envelope = opened(properties.message_id, properties.headers, message.body, queue, self._transport.now())
            letters.append(Letter(message.delivery.delivery_tag, envelope))

        while True:
            before = len(letters)
            consumer = await channel.consume(dead, _AT_ONCE, received)
            await channel.caught_up(dead, aside_arguments())
            await channel.cancel(consumer)
            if len(letters) == before:
                return letters


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
