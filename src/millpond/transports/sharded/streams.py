"""Spark queries over shards, as operators see them. Spark itself opens the streams room of each database."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from millpond.errors import StreamError, UnknownStream
from millpond.seam.streams import StreamClaim, Streams, StreamStatus, Waiting
from millpond.seam.transport import Capability, refused
from millpond.transports.database.store import DatabaseStore
from millpond.transports.sharded.members import Members


class ShardedStreams:
    """The streams room, without the verbs of a driver. A stream has the same name on all shards."""

    open = refused("a stream over shards, which Spark opens on each of them,", Capability.STREAMS)
    claim = refused("a claim of a stream over shards", Capability.STREAMS)
    hand_out = refused("a batch of a stream over shards", Capability.STREAMS)
    ack = refused("an acknowledgement of a stream over shards", Capability.STREAMS)
    record = refused("an outcome of a stream over shards", Capability.STREAMS)

    def __init__(self, members: Members) -> None:
        self._members = members

    async def status(self) -> list[StreamStatus]:
        """One row for each name: the messages that it holds on all shards."""
        found: dict[str, StreamStatus] = {}
        for part in await self._members.ask(lambda store: store.streams.status()):
            for one in part:
                found[one.name] = one if one.name not in found else _added(found[one.name], one)
        return [found[name] for name in sorted(found)]

    async def recorded(self, name: str, epoch: int, seq: int) -> StreamClaim | None:
        """The claims of this number, with the parts of all shards. On some shards the stream may have another epoch."""

        async def on(store: DatabaseStore) -> StreamClaim | None:
            try:
                return await store.streams.recorded(name, epoch, seq)
            except StreamError:
                return None

        claims = [claim for claim in await self._members.ask(on) if claim is not None]
        if not claims:
            return None
        slices = tuple(part for claim in claims for part in claim.slices)
        return msgspec.structs.replace(claims[0], messages=sum(claim.messages for claim in claims), slices=slices)

    async def release(self, name: str) -> int:
        """Release the stream on each shard that has it."""
        unknown: list[UnknownStream] = []

        async def on(store: DatabaseStore) -> int | None:
            try:
                return await store.streams.release(name)
            except UnknownStream as e:
                unknown.append(e)
                return None

        counts = [count for count in await self._members.tell(on) if count is not None]
        if not counts:
            raise unknown[0]
        return sum(counts)

    async def waiting(self, queues: Sequence[str], limit: int = 100_000) -> Waiting:
        parts = await self._members.ask(lambda store: store.streams.waiting(queues, limit))
        oldest = [part.oldest_us for part in parts if part.oldest_us is not None]
        messages = min(limit, sum(part.messages for part in parts))
        return Waiting(messages, max(part.at_us for part in parts), min(oldest, default=None))


def _added(one: StreamStatus, other: StreamStatus) -> StreamStatus:
    """Both as one stream. `acked_seq` is that of the shard that is behind."""
    held = [each.held_for for each in (one, other) if each.held_for is not None]
    opened = [each.opened_us for each in (one, other) if each.opened_us is not None]
    return msgspec.structs.replace(
        one,
        epoch=max(one.epoch, other.epoch),
        acked_seq=min(one.acked_seq, other.acked_seq),
        held=one.held + other.held,
        held_for=max(held, default=None),
        opened_us=max(opened, default=None),
        shard=None,
        open_claims=tuple(dict.fromkeys((*one.open_claims, *other.open_claims))),
    )


_room: Callable[[Members], Streams] = ShardedStreams
