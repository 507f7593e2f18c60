"""What a streaming query's driver does: the protocol that makes each message reach the sink exactly once.

A micro-batch is the stream's claim of a number, on one or more shards; Spark's offset is that number, with how many
messages each shard gave. The number follows from the one before, so that a claim made just before a crash is found
again although no log of Spark's names it. Spark asks for what follows a batch only when that batch is committed:
so it is acknowledged when the next is asked for, beside Spark's work on that one, and also before a batch is run
again, since the engine does not repeat a commit that was cut short. See docs/explanation/exactly-once.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from millpond import transports
from millpond.clock import monotonic
from millpond.errors import InvalidOption, StreamError, claim_lost, stream_behind
from millpond.spark.options import Shard
from millpond.transport import Settlement, StreamClaim

T = TypeVar("T")

Offset = dict[str, Any]
"""`{"stream": "audit", "seq": 7, "messages": {"0": 5000, "1": 4211}}`: shards by their places among the URLs."""

_COUNT_WAITING_EVERY = 5.0
_LOOK_EVERY = 0.1
"""Seconds between two looks that find nothing. The engine asks a hundred times a second."""
_STORE: dict[str, Any] = {"migrate": False, "pool_size": 2, "busy_timeout": 60, "call_timeout": 600}
"""A look must not make tables; a large batch takes longer than what a worker does at once."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a query asks for, apart from where."""

    stream: str
    queues: Sequence[str]
    min_partitions: int = 1
    unsettled: Settlement = "ack"
    fail_on_data_loss: bool = True


class StreamDriver:
    """The one driver of a stream, as long as nobody else opens it."""

    def __init__(self, shards: Sequence[Shard], wanted: Wanted) -> None:
        self._shards = shards
        self._wanted = wanted
        self._stores: list[Any] = []
        self._epoch: int | None = None
        self._acked: list[int] = []
        self._claims: dict[int, StreamClaim] = {}
        """By shard, of the last claim that was made or found."""
        self._acking: asyncio.Task[None] | None = None
        """The acknowledgement of the batch before that one, once begun beside Spark's work."""
        self._until: list[int] | None = None
        self._found_nothing_at = 0.0
        self._waiting = 0
        self._counted_at = -_COUNT_WAITING_EVERY

    # --- what the engine asks -----------------------------------------------------------------------

    async def initial(self) -> Offset:
        """Where a new checkpoint begins. It says nothing of messages: what was claimed before is not its business."""
        await self._open()
        return {"stream": self._wanted.stream, "seq": max(self._acked)}

    async def latest(self, start: Offset, limit: int) -> Offset:
        """The next batch, or `start` itself: nothing is due."""
        await self._open()
        await self._end_acking()
        if not self._has(start):  # of another driver: whether it is as it was is known before anything follows it
            await self.ack(start)
        await asyncio.sleep(self._found_nothing_at + _LOOK_EVERY - monotonic())
        seq = start["seq"] + 1
        claims = await self._claim(seq, limit)
        if not claims:
            await self.ack(start)  # nobody may ask again
            self._found_nothing_at = monotonic()
            return start
        self._claims = claims
        self._acking = asyncio.create_task(self.ack(start))
        return {
            "stream": self._wanted.stream,
            "seq": seq,
            "messages": {str(n): claim.messages for n, claim in sorted(claims.items())},
        }

    async def claims(self, start: Offset, end: Offset) -> list[tuple[Shard, StreamClaim]]:
        """What the batch consists of: exactly what it was when its offset was made."""
        await self.committed(start)
        if not self._has(end):
            self._claims = await self._recorded(end["seq"])
        held = self._claims
        expected = self._expected(end) or {}
        found = {n: claim.messages for n, claim in held.items()}
        if self._wanted.fail_on_data_loss and found != expected:
            raise claim_lost(self._wanted.stream, end["seq"], sum(expected.values()), sum(found.values()))
        return [(self._shards[n], claim) for n, claim in sorted(held.items())]

    async def committed(self, end: Offset) -> None:
        """Spark has everything up to this offset: acknowledge it, unless that is under way."""
        await self._open()
        if self._acking is None or self._acking.done():
            await self._end_acking()
            await self.ack(end)

    async def ack(self, end: Offset) -> None:
        """Acknowledge everything up to this offset, on every shard that has not yet."""
        await self._open()
        self._check(end)
        seq, expected = end["seq"], self._expected(end)
        if seq < max(self._acked):
            raise stream_behind(self._wanted.stream, seq, max(self._acked))

        async def ack(n: int) -> None:
            if self._acked[n] < seq:
                messages = None if expected is None else expected.get(n, 0)
                await self._stores[n].ack_stream(
                    self._wanted.stream,
                    self._epoch,
                    seq,
                    unsettled=self._wanted.unsettled,
                    messages=messages if self._wanted.fail_on_data_loss else None,
                )
                self._acked[n] = seq

        await self._each(ack)

    async def stop_at_now(self) -> None:
        """From now on claim only what was published, and due, by this moment of each shard's clock."""
        await self._open()
        looks = await self._each(lambda n: self._stores[n].waiting(self._wanted.queues, 1))
        self._until = [look.at_us for look in looks]

    async def waiting(self) -> int:
        """How many messages are due and not claimed, counted now and then, and up to a limit on each shard."""
        await self._open()
        if monotonic() - self._counted_at >= _COUNT_WAITING_EVERY:
            looks = await self._each(lambda n: self._stores[n].waiting(self._wanted.queues))
            self._waiting, self._counted_at = sum(look.messages for look in looks), monotonic()
        return self._waiting

    async def close(self) -> None:
        try:
            await self._end_acking()
        finally:
            stores, self._stores, self._epoch = self._stores, [], None
            for store in stores:
                await store.close()

    # --- inside -------------------------------------------------------------------------------------

    async def connect(self, shard: Shard) -> Any:
        return await transports.connect(shard.url.raw, **shard.options, **_STORE)

    async def _open(self) -> None:
        """Late and in the order of shards: the first draws the epoch, higher than that of any; the others take it.

        So two drivers never have one number, and one that was killed in the middle of this and wakes again has the
        lower one everywhere.
        """
        if self._epoch is not None:
            return
        if not self._stores:
            self._stores = list(await gathered(self.connect(shard) for shard in self._shards))
        name = self._wanted.stream
        seen = await self._each(lambda n: self._stores[n].streams())
        above = max((status.epoch for found in seen for status in found if status.name == name), default=0)
        epoch, acked = await self._stores[0].open_stream(name, above=above)
        others = [(await store.open_stream(name, epoch=epoch))[1] for store in self._stores[1:]]
        self._acked = [acked, *others]
        self._epoch = epoch

    async def _end_acking(self) -> None:
        """Wait for what is under way; its error is that of the call that finds it."""
        acking, self._acking = self._acking, None
        if acking is not None:
            await acking

    def _has(self, offset: Offset) -> bool:
        """Whether this driver itself has made or found what the offset names."""
        return any(claim.seq == offset["seq"] for claim in self._claims.values())

    async def _claim(self, seq: int, limit: int) -> dict[int, StreamClaim]:
        """On all shards at once; what one does not have, others may give."""
        every = range(len(self._shards))
        wants = [limit]
        if len(every) > 1:
            looks = await self._each(lambda n: self._stores[n].waiting(self._wanted.queues, limit))
            wants = [look.messages for look in looks]
        shares = shared_out(limit, wants, first=seq)
        found = await self._claim_from(seq, {n: share for n, share in enumerate(shares) if share})
        if not found and not all(shares):  # those who had been counted are gone, or there are more shards than shares
            found = await self._claim_from(seq, {n: limit for n in every if not shares[n]})
        return found

    async def _claim_from(self, seq: int, shares: dict[int, int]) -> dict[int, StreamClaim]:
        partitions = -(-self._wanted.min_partitions // max(1, len(shares)))

        async def claim(n: int) -> StreamClaim | None:
            claimed: StreamClaim | None = await self._stores[n].claim_for_stream(
                self._wanted.stream,
                self._epoch,
                seq,
                self._wanted.queues,
                shares[n],
                slices=partitions,
                until_us=None if self._until is None else self._until[n],
            )
            return claimed

        claims = await gathered(claim(n) for n in shares)
        return {n: claim for n, claim in zip(shares, claims, strict=True) if claim is not None}

    async def _recorded(self, seq: int) -> dict[int, StreamClaim]:
        claims = await self._each(lambda n: self._stores[n].stream_claim(self._wanted.stream, self._epoch, seq))
        return {n: claim for n, claim in enumerate(claims) if claim is not None}

    async def _each(self, work: Callable[[int], Awaitable[T]]) -> Sequence[T]:
        return await gathered(work(n) for n in range(len(self._shards)))

    def _check(self, offset: Offset) -> None:
        if offset["stream"] != self._wanted.stream:
            raise StreamError(
                f"the checkpoint is that of stream {offset['stream']!r}, and this query's is "
                f"{self._wanted.stream!r}; give the query its old name, or a new checkpoint"
            )
        missing = [n for n in self._expected(offset) or {} if n >= len(self._shards)]
        if missing:
            raise InvalidOption(
                f"stream {self._wanted.stream!r}: the checkpoint names shard {missing[0]}, and the option 'url' has "
                f"only {len(self._shards)} URLs; keep their order, and add new ones at the end"
            )

    @staticmethod
    def _expected(offset: Offset) -> dict[int, int] | None:
        """Messages by shard; None: the offset does not say, since it is an initial one."""
        return {int(n): count for n, count in offset["messages"].items()} if "messages" in offset else None


def shared_out(limit: int, wants: Sequence[int], *, first: int) -> list[int]:
    """A limit in fair shares: nobody has more than it wants while another has less.

    What nobody wants is shared out too, since counts may be behind. The remainder goes to the `first`, by turns.

    >>> shared_out(100, [1000, 10, 0], first=0)
    [90, 10, 0]
    >>> shared_out(100, [5, 10, 0], first=0)
    [34, 38, 28]
    """
    order = [(first + n) % len(wants) for n in range(len(wants))]
    shares = [0] * len(wants)
    while limit and (hungry := [n for n in order if shares[n] < wants[n]]):
        share = max(1, limit // len(hungry))
        for n in hungry:
            given = min(share, wants[n] - shares[n], limit)
            shares[n] += given
            limit -= given
    for place, n in enumerate(order):
        shares[n] += limit // len(order) + (place < limit % len(order))
    return shares


async def gathered(work: Iterable[Awaitable[T]]) -> Sequence[T]:
    """All at once, and all to their end: then the first error, if there was one."""
    results = await asyncio.gather(*work, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
