"""The driver of a streaming query: the protocol that makes each message reach the sink exactly once.

A micro-batch is one numbered claim of the stream, on one or more shards. Spark's offset is that number with the count
of messages on each shard. The next number follows from the last, so a claim made just before a crash is found again
although no log of Spark names it.

Spark asks for the next batch only after it has committed the last one. So the last batch is acknowledged when the next
is asked for, in parallel with Spark's work on that one. It is also acknowledged before a batch runs again, because the
engine does not repeat an interrupted commit. See docs/explanation/exactly-once.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from millpond import transports
from millpond.clock import SECOND, monotonic
from millpond.errors import InvalidOption, StreamError, StreamTaken, claim_lost, stream_behind
from millpond.loop import gather_all
from millpond.seam.streams import Settlement, StreamClaim, Streams, StreamStatus
from millpond.seam.transport import Transport
from millpond.spark.options import SparkShard
from millpond.transports.shares import Shares

T = TypeVar("T")

Offset = dict[str, Any]
"""`{"stream": "audit", "checkpoint": "5f…", "seq": 7, "messages": {"0": 5000, "1": 4211}}`: shards by their positions
among the URLs. The checkpoint's name is random: Spark tells a source neither its query nor the checkpoint's place."""

_COUNT_WAITING_EVERY = 5.0
_READ_EVERY = 0.1
"""Seconds between two claims that find nothing. The engine asks a hundred times a second."""
_STORE: dict[str, Any] = {"migrate": False, "pool_size": 2, "busy_timeout": 60, "call_timeout": 600}
"""A stream must not create tables; a large batch takes longer than a worker's calls."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a streaming query, apart from its databases."""

    stream: str
    queues: Sequence[str]
    min_partitions: int = 1
    unsettled: Settlement = "ack"
    fail_on_data_loss: bool = True
    max_bytes: int | None = None
    """Bytes of the bodies of a batch, about: each shard has its share, and at least one message."""
    min_messages: int = 0
    """Messages for which a batch waits, at most for `max_delay` seconds after the one before it."""
    max_delay: float = 0.0
    adopt: bool = False
    """Whether a new checkpoint begins with the open batch of another one."""


class StreamDriver:
    """The one driver of a stream, until another driver opens it."""

    def __init__(self, shards: Sequence[SparkShard], options: StreamOptions) -> None:
        self._shards = shards
        self._options = options
        self._stores: list[Transport] = []
        self._epoch = 0
        self._acked: list[int] = []
        self._claims: dict[int, StreamClaim] = {}
        """Shard -> the last claim that was made or found."""
        self._acking: asyncio.Task[None] | None = None
        """Acknowledges the batch before that one, in parallel with Spark's work."""
        self._until: list[int] | None = None
        self._found_nothing_at = 0.0
        self._claimed_at: float | None = None
        self._checkpoint = uuid4().hex
        """The name of a new checkpoint."""
        self._metrics = {"waiting": 0, "oldest_ms": 0}
        self._counted_at = -_COUNT_WAITING_EVERY

    # --- calls of the engine ------------------------------------------------------------------------

    async def initial(self) -> Offset:
        """The start of a new checkpoint. It has no counts of messages: earlier claims do not belong to it.

        The stream is not opened yet: this would stop another query before it is known whether this one may go on.
        """
        seq = max(status.acked_seq for status in await self._status())
        return {"stream": self._options.stream, "checkpoint": self._checkpoint, "seq": seq}

    async def latest(self, start: Offset, limit: int) -> Offset:
        """The offset of the next batch, or `start` itself if nothing is due."""
        await self._open(start)
        await self._end_acking()
        if not self._has(start):  # another driver's: check that it is unchanged before the next claim
            await self.ack(start)
        await asyncio.sleep(self._found_nothing_at + _READ_EVERY - monotonic())
        seq, checkpoint = start["seq"] + 1, self._name_of(start)
        # A claim from a new checkpoint gets its name when it is handed out. Until then no log may name the checkpoint.
        named = None if _is_initial(start) else checkpoint
        claims = {} if await self._waits_for_more() else await self._claim(seq, limit, named)
        if not claims:
            await self.ack(start)  # there may be no further call
            self._found_nothing_at = monotonic()
            return start
        self._refuse_others(seq, {claim.checkpoint for claim in claims.values()}, start)
        self._claims, self._claimed_at = claims, monotonic()
        self._acking = asyncio.create_task(self.ack(start))
        return {
            "stream": self._options.stream,
            "checkpoint": checkpoint,
            "seq": seq,
            "messages": {str(n): claim.messages for n, claim in sorted(claims.items())},
        }

    async def claims(self, start: Offset, end: Offset) -> list[tuple[SparkShard, StreamClaim]]:
        """The claims of the batch: the same messages as when its offset was made."""
        await self._open(start, end)
        await self.commit(start)
        if _is_initial(end):  # Spark runs an empty batch where nothing is due at the first start
            return []
        stream, seq = self._options.stream, end["seq"]
        if seq <= max(self._acked):  # by another checkpoint, which took over before this one had handed it out
            raise stream_behind(stream, seq - 1, max(self._acked))
        if not self._has(end):
            recorded = await self._each(lambda n: self._streams(n).recorded(stream, self._epoch, seq))
            self._claims = {n: claim for n, claim in enumerate(recorded) if claim is not None}
        expected = self._expected(end) or {}
        found = {n: claim.messages for n, claim in self._claims.items()}
        if self._options.fail_on_data_loss and found != expected:
            raise claim_lost(stream, seq, sum(expected.values()), sum(found.values()))
        await self._hand_out(start, end)
        return [(self._shards[n], claim) for n, claim in sorted(self._claims.items())]

    async def commit(self, end: Offset) -> None:
        """Spark has processed everything up to this offset: acknowledge it, unless that is in progress."""
        await self._open(end)
        if self._acking is None or self._acking.done():
            await self._end_acking()
            await self.ack(end)

    async def ack(self, end: Offset) -> None:
        """Acknowledge everything up to this offset, on every shard that has not yet."""
        await self._open(end)
        self._check(end)
        stream, seq, unsettled = self._options.stream, end["seq"], self._options.unsettled
        expected = self._expected(end) if self._options.fail_on_data_loss else None
        if seq < max(self._acked):
            raise stream_behind(stream, seq, max(self._acked))

        async def ack(n: int) -> None:
            if self._acked[n] < seq:
                messages = None if expected is None else expected.get(n, 0)
                await self._streams(n).ack(stream, self._epoch, seq, unsettled=unsettled, messages=messages)
                self._acked[n] = seq

        await self._each(ack)

    async def stop_at_now(self) -> None:
        """From now on claim only messages that were published, and due, by this time of each shard's clock."""
        await self._connect()
        found = await self._each(lambda n: self._streams(n).waiting(self._options.queues, 1))
        self._until = [waiting.at_us for waiting in found]

    async def metrics(self) -> dict[str, int]:
        """Number of due unclaimed messages, up to a limit on each shard, and milliseconds since the oldest was due.

        They are read every few seconds.
        """
        await self._connect()
        if monotonic() - self._counted_at >= _COUNT_WAITING_EVERY:
            found = await self._each(lambda n: self._streams(n).waiting(self._options.queues))
            ages = [one.at_us - one.oldest_us for one in found if one.oldest_us is not None]
            oldest = max([0, *ages]) * 1000 // SECOND
            self._metrics = {"waiting": sum(one.messages for one in found), "oldest_ms": oldest}
            self._counted_at = monotonic()
        return self._metrics

    async def close(self) -> None:
        try:
            await self._end_acking()
        finally:
            stores, self._stores, self._epoch = self._stores, [], 0
            for store in stores:
                await store.close()

    # --- inside -------------------------------------------------------------------------------------

    async def connect(self, shard: SparkShard) -> Transport:
        return await transports.connect(shard.url.raw, **shard.store_options, **_STORE)

    async def _connect(self) -> None:
        if not self._stores:
            self._stores = list(await gather_all(self.connect(shard) for shard in self._shards))

    async def _status(self) -> list[StreamStatus]:
        """The stream as each shard has it; a new one has only zeros."""
        await self._connect()
        name = self._options.stream
        new = StreamStatus(name=name, epoch=0, acked_seq=0, held=0, held_for=None, opened_us=None)
        return [
            next((status for status in found if status.name == name), new)
            for found in await self._each(lambda n: self._streams(n).status())
        ]

    async def _open(self, start: Offset, end: Offset | None = None) -> None:
        """Open the stream at the first batch, unless it holds a batch of another checkpoint.

        The first shard draws an epoch higher than that of any shard; the others take it.

        So two drivers never have the same number, and a driver that was paused in the middle of this has the lower one
        on every shard.
        """
        if self._epoch:
            return
        seen = await self._status()
        self._check_order(seen)
        acked_seq = max(status.acked_seq for status in seen)
        # A claim up to this number is committed by its checkpoint, because another shard has acknowledged it.
        held = [claim for status in seen for claim in status.open_claims if claim[0] > acked_seq]
        for seq, checkpoint in held:
            self._refuse_others(seq, {checkpoint}, start, end)
        name, above = self._options.stream, max(status.epoch for status in seen)
        epoch, acked = await self._stores[0].streams.open(name, above=above, shard=0)
        others = [
            (await store.streams.open(name, epoch=epoch, shard=n))[1]
            for n, store in enumerate(self._stores[1:], start=1)
        ]
        self._acked = [acked, *others]
        self._epoch = epoch

    def _name_of(self, offset: Offset) -> str:
        """The checkpoint of an offset. Offsets of earlier versions have no name."""
        return str(offset.get("checkpoint") or self._checkpoint)

    def _refuse_others(self, seq: int, found: set[str | None], start: Offset, end: Offset | None = None) -> None:
        """Raise if a claim is a batch of another checkpoint, whose sink may have its messages."""
        if found <= {None, self._name_of(end or start)} or (self._options.adopt and _is_initial(start)):
            return
        raise StreamTaken(
            f"stream {self._options.stream!r}: claim {seq} is the open batch of another checkpoint, and its sink may "
            "have these messages. Use a stream in one query only, always with the same checkpoint; for two sinks, "
            "write to both in foreachBatch. If that checkpoint is gone: adoptOpenBatch=true delivers the batch again "
            f"to this one, and millpond streams release {self._options.stream} gives its messages back to the queue"
        )

    async def _hand_out(self, start: Offset, end: Offset) -> None:
        """Record whose batch this is before a task can read it: from then on no other checkpoint takes it over."""
        stream, seq, checkpoint = self._options.stream, end["seq"], self._name_of(end)
        self._refuse_others(seq, {claim.checkpoint for claim in self._claims.values()}, start, end)

        async def hand_out(n: int) -> None:
            await self._streams(n).hand_out(stream, self._epoch, seq, checkpoint)

        await gather_all(hand_out(n) for n, claim in self._claims.items() if claim.checkpoint != checkpoint)

    async def _waits_for_more(self) -> bool:
        """Whether too few messages are due for a batch, and the last one is not too long ago.

        The first batch of a driver never waits: it may be one that a crash has left.
        """
        options = self._options
        if not options.min_messages or self._claimed_at is None or self._until is not None:
            return False
        if monotonic() - self._claimed_at >= options.max_delay:
            return False
        found = await self._each(lambda n: self._streams(n).waiting(options.queues, options.min_messages))
        return sum(waiting.messages for waiting in found) < options.min_messages

    def _streams(self, shard: int) -> Streams:
        return self._stores[shard].streams

    async def _end_acking(self) -> None:
        """Wait for the acknowledgement in progress; its error is raised here."""
        acking, self._acking = self._acking, None
        if acking is not None:
            await acking

    def _has(self, offset: Offset) -> bool:
        """Whether this driver itself has made or found the claim of the offset."""
        return any(claim.seq == offset["seq"] for claim in self._claims.values())

    async def _claim(self, seq: int, limit: int, checkpoint: str | None) -> dict[int, StreamClaim]:
        """Claim on all shards in parallel. A share that one shard cannot fill goes to others."""
        every = range(len(self._shards))
        wants = [limit]
        if len(every) > 1:
            counts = await self._each(lambda n: self._streams(n).waiting(self._options.queues, limit))
            wants = [waiting.messages for waiting in counts]
        shares = fair_shares(limit, wants, first=seq)
        found = await self._claim_from(seq, {n: share for n, share in enumerate(shares) if share}, checkpoint)
        if not found and not all(shares):  # counted messages are gone, or there are more shards than shares
            found = await self._claim_from(seq, {n: limit for n in every if not shares[n]}, checkpoint)
        return found

    async def _claim_from(self, seq: int, shares: dict[int, int], checkpoint: str | None) -> dict[int, StreamClaim]:
        stream, queues = self._options.stream, self._options.queues
        most, total = self._options.max_bytes, sum(shares.values())
        slices = -(-self._options.min_partitions // max(1, len(shares)))

        async def claim(n: int) -> StreamClaim | None:
            how: dict[str, Any] = {
                "slices": slices,
                "until_us": None if self._until is None else self._until[n],
                "max_bytes": None if most is None else most * shares[n] // total,
                "checkpoint": checkpoint,
            }
            return await self._streams(n).claim(stream, self._epoch, seq, queues, shares[n], **how)

        claims = await gather_all(claim(n) for n in shares)
        return {n: claim for n, claim in zip(shares, claims, strict=True) if claim is not None}

    async def _each(self, work: Callable[[int], Awaitable[T]]) -> Sequence[T]:
        return await gather_all(work(n) for n in range(len(self._shards)))

    def _check_order(self, seen: Sequence[StreamStatus]) -> None:
        for n, status in enumerate(seen):
            if status.shard is not None and status.shard != n:
                raise InvalidOption(
                    f"stream {self._options.stream!r}: the database {self._shards[n].url} was shard {status.shard}, "
                    f"and the option 'url' has it at position {n}, counted from 0; give the URLs in their former "
                    "order, and add new ones at the end"
                )

    def _check(self, offset: Offset) -> None:
        if offset["stream"] != self._options.stream:
            raise StreamError(
                f"the checkpoint is that of stream {offset['stream']!r}, and this query's is "
                f"{self._options.stream!r}; give the query its old name, or a new checkpoint"
            )
        missing = [n for n in self._expected(offset) or {} if n >= len(self._shards)]
        if missing:
            raise InvalidOption(
                f"stream {self._options.stream!r}: the checkpoint names shard {missing[0]}, and the option 'url' has "
                f"only {len(self._shards)} URLs; keep their order, and add new ones at the end"
            )

    @staticmethod
    def _expected(offset: Offset) -> dict[int, int] | None:
        """Shard -> number of messages; None for an initial offset, which has no counts."""
        return {int(n): count for n, count in offset["messages"].items()} if "messages" in offset else None


def _is_initial(offset: Offset) -> bool:
    """Whether it is the start of a new checkpoint."""
    return "messages" not in offset


def fair_shares(limit: int, wants: Sequence[int], *, first: int) -> list[int]:
    """A limit in fair shares: no shard has more than it wants while another has less.

    The rest that no shard wants is shared out too, because counts may be outdated. The remainder goes to `first` and
    those after it.

    >>> fair_shares(100, [1000, 10, 0], first=0)
    [90, 10, 0]
    >>> fair_shares(100, [5, 10, 0], first=0)
    [34, 38, 28]
    """
    count = len(wants)
    found = [0] * count
    shares = Shares(range(count), limit, first)
    for n, share in shares:
        given = min(share, wants[n] - found[n])
        found[n] += given
        shares.taken += given
    each, remainder = divmod(limit - shares.taken, count)
    for place in range(count):
        found[(first + place) % count] += each + (place < remainder)
    return found
