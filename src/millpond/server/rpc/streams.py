"""Messages for subscribers: one claim loop for each queue, shared fairly, bounded by unsettled messages and bytes.

The server is a worker, whose beats hold the claims of all streams: a killed server's messages come back at once. It has
announced its stop from the beginning, because the death of a server is no crash of the messages that clients work on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from uuid import UUID

from millpond.clock import monotonic
from millpond.errors import MillpondError
from millpond.loop import Backoff
from millpond.message import Claim, Receipt
from millpond.outcome import GiveBack
from millpond.seam.transport import Capability, Transport
from millpond.seam.workers import Presence
from millpond.server.receipts import ClaimReceipt

log = logging.getLogger("millpond.server")

BEAT_EVERY = 0.5
_DEAD_AFTER = 5.0
_HELD = 60.0
"""Lease of claims in seconds while the server's beats hold them."""
_LONE_LEASE = 3600.0
"""Lease where no beat holds claims: the server itself watches the time of each subscriber."""
_MOST, _FIRST = 500, 50
"""Messages of one claim, and of the first one, when the size of bodies is not known."""
_MOST_BYTES = 8 * 1024 * 1024
"""Bytes of one claim, as far as the size of the last bodies tells."""
_COMPARE_EVERY = 2.0
"""Seconds after which unsettled messages are compared with the database: another server may have settled them."""
_CLAIM_WITHIN = 5.0
"""Seconds for claims to end when the server stops."""
_WAIT = 5.0
_WATCH_EVERY = 0.25
"""Seconds between two looks for messages whose time is over."""


class Sent:
    """A message that a subscriber has and that is not settled. Its body is kept only until it is sent or removed."""

    def __init__(self, claim: Claim, subscriber: StreamSubscriber) -> None:
        self.claim: Claim | None = claim
        self.facts = ClaimReceipt.of(claim)
        self.receipt = claim.receipt
        self.checked_at = monotonic()
        self.subscriber = subscriber
        self.size = len(claim.message.payload)
        self.until = monotonic() + subscriber.lease

    @property
    def was_sent(self) -> bool:
        """Whether its client may have it."""
        return self.claim is None


class StreamSubscriber:
    """One call of MessageStream: its bounds, its unsettled messages, and those that wait to be sent."""

    def __init__(self, queues: Sequence[str], *, max_messages: int, max_bytes: int, lease: float) -> None:
        self.queues = tuple(dict.fromkeys(queues))
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.lease = lease
        self.sent: dict[UUID, Sent] = {}
        self.bytes = 0
        self.received = 0
        self.is_stuck = False
        """Whether its client does not read: messages waited for their whole time and were not sent."""
        self._outbox: deque[Sent] = deque()
        self._filled = asyncio.Event()

    def room(self, size: int) -> int:
        """Number of messages of this size that it may take now."""
        if self.is_stuck:
            return 0
        if not self.sent:
            return min(self.max_messages, max(1, self.max_bytes // size))
        return max(0, min(self.max_messages - len(self.sent), (self.max_bytes - self.bytes) // size))

    def takes(self, size: int) -> bool:
        """Whether a message of this size fits. One is always sent."""
        if self.is_stuck:
            return False
        return not self.sent or (len(self.sent) < self.max_messages and self.bytes + size <= self.max_bytes)

    def put(self, claim: Claim) -> Sent:
        sent = Sent(claim, self)
        self.sent[claim.receipt.id] = sent
        self.bytes += sent.size
        self.received += 1
        self._outbox.append(sent)
        self._filled.set()
        return sent

    def remove(self, sent: Sent) -> None:
        if self.sent.get(sent.receipt.id) is sent:
            del self.sent[sent.receipt.id]
            self.bytes -= sent.size
            sent.claim = None  # it may stay in `_outbox` for as long as the client does not read

    async def next(self, most: int, most_bytes: int) -> list[Claim]:
        """Wait for messages to send. Their time begins now; those that went back meanwhile are left out."""
        found: list[Claim] = []
        while not found:
            await self._filled.wait()
            size = 0
            while self._outbox and len(found) < most and size < most_bytes:
                sent = self._outbox.popleft()
                if self.sent.get(sent.receipt.id) is sent and sent.claim is not None:
                    found.append(sent.claim)
                    size += sent.size
                    sent.until = monotonic() + self.lease
                sent.claim = None
            if not self._outbox:
                self._filled.clear()
        return found


class _Lane:
    """The claim loop of one queue and its subscribers. They take messages in turn."""

    def __init__(self, streams: OpenStreams, queue: str) -> None:
        self._streams = streams
        self.queue = queue
        self.subscribers: deque[StreamSubscriber] = deque()
        self.freed = asyncio.Event()
        self._size, self._most = 1, _FIRST
        self._claims = False
        self.task = asyncio.create_task(self._run(), name=f"stream {queue}")

    async def _run(self) -> None:
        pause = Backoff(0.1, 5.0)
        while self.subscribers:
            try:
                await self._claim_some()
                pause = Backoff(0.1, 5.0)
            except Exception as e:
                _report(f"no claims from {self.queue} for streams", e)
                await asyncio.sleep(pause.next())

    def end(self) -> None:
        """Stop. A claim that is under way ends first: it finds no subscriber, and gives its messages back."""
        self.subscribers.clear()
        self.freed.set()
        if not self._claims:
            self.task.cancel()

    async def _claim_some(self) -> None:
        self.freed.clear()
        room = sum(subscriber.room(self._size) for subscriber in self.subscribers)
        if room <= 0:
            await self.freed.wait()
            return
        self._claims = True
        try:
            claims = await self._streams.claim(self.queue, min(room, self._most))
            unplaced = [claim.receipt for claim in claims if not self._place(claim)]
            if unplaced:  # a subscriber left, another queue was quicker, or bodies are larger than the last ones
                self._streams.owe(unplaced, delivered=False)
                await self._streams.pay()
        finally:
            self._claims = False
        if claims:
            sizes = [len(claim.message.payload) for claim in claims]
            self._size = max(1, sum(sizes) // len(sizes))
            self._most = max(1, min(_MOST, _MOST_BYTES // max(1, *sizes)))
        if unplaced:
            await self.freed.wait()  # the same claim again would find no room again
        elif not claims and self.subscribers:
            await self._streams.transport.wait([self.queue], _WAIT)

    def _place(self, claim: Claim) -> bool:
        """Hand a message to the next subscriber in turn that has room."""
        size = len(claim.message.payload)
        for _ in range(len(self.subscribers)):
            subscriber = self.subscribers[0]
            self.subscribers.rotate(-1)
            if subscriber.takes(size):
                self._streams.sent[claim.receipt.id] = subscriber.put(claim)
                return True
        return False


class OpenStreams:
    """All subscribers of a server."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.sent: dict[UUID, Sent] = {}
        """Unsettled messages by id."""
        self._lanes: dict[str, _Lane] = {}
        self._presence: Presence | None = None
        self._joining = asyncio.Lock()
        self._owed: list[GiveBack] = []
        self._chores: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._by_worker = Capability.PRESENCE in transport.capabilities

    @property
    def subscribers(self) -> set[StreamSubscriber]:
        return {subscriber for lane in self._lanes.values() for subscriber in lane.subscribers}

    async def add(self, subscriber: StreamSubscriber) -> None:
        await self._start()
        for queue in subscriber.queues:
            lane = self._lanes.get(queue)
            if lane is None:
                lane = self._lanes[queue] = _Lane(self, queue)
            lane.subscribers.append(subscriber)
            lane.freed.set()
        self._record_queues()

    async def remove(self, subscriber: StreamSubscriber) -> None:
        """End a subscription: its unsettled messages go back at once."""
        for queue in subscriber.queues:
            lane = self._lanes.get(queue)
            if lane is None or subscriber not in lane.subscribers:
                continue
            lane.subscribers.remove(subscriber)
            if not lane.subscribers:
                del self._lanes[queue]
                self._ending.add(lane.task)
                lane.task.add_done_callback(self._ending.discard)
                lane.end()
        self._record_queues()
        await self._expire(list(subscriber.sent.values()))

    async def next(self, subscriber: StreamSubscriber, most: int, most_bytes: int) -> list[Claim]:
        """Wait for messages to send. The client reads, so it gets messages again if it was stuck."""
        if subscriber.is_stuck:
            subscriber.is_stuck = False
            self._wake(subscriber)
        return await subscriber.next(most, most_bytes)

    def _wake(self, subscriber: StreamSubscriber) -> None:
        """Let the lanes of a subscriber look for its room again."""
        for queue in subscriber.queues:
            if lane := self._lanes.get(queue):
                lane.freed.set()

    async def claim(self, queue: str, limit: int) -> list[Claim]:
        lease = _HELD if self._by_worker else _LONE_LEASE
        return await self.transport.claim([queue], limit, lease, by_worker=self._by_worker)

    def _record_queues(self) -> None:
        if self._presence is not None:
            self._presence.consume(sorted(self._lanes))

    def has_sent(self, receipt: Receipt) -> bool:
        """Whether a subscriber has the message by this very claim."""
        sent = self.sent.get(receipt.id)
        return sent is not None and sent.receipt == receipt

    async def extend(self, receipts: Sequence[Receipt], lease: float) -> set[Receipt]:
        """Let leases end `lease` seconds from now; returns the stale receipts."""
        # The server's beats hold what its own streams have sent: their time is the server's alone.
        others = [receipt for receipt in receipts if not self.has_sent(receipt)]
        stale = set(await self.transport.extend(others, lease)) if others else set()
        for receipt in receipts:
            if self.has_sent(receipt):
                self.sent[receipt.id].until = monotonic() + lease
        return stale

    def settled(self, receipts: Iterable[Receipt]) -> None:
        """Free the room of messages that were settled."""
        for receipt in receipts:
            if self.has_sent(receipt):
                sent = self.sent.pop(receipt.id)
                sent.subscriber.remove(sent)
                self._wake(sent.subscriber)

    def owe(self, receipts: Sequence[Receipt], *, delivered: bool) -> None:
        """Note messages to give back. The server's beats would hold them without end."""
        self._owed += [GiveBack(receipt, delivered) for receipt in receipts]

    async def pay(self) -> None:
        """Give back the noted messages. After an error they stay noted."""
        owed, self._owed = self._owed, []
        if not owed:
            return
        try:
            await self.transport.settle(owed)
        except BaseException as e:
            self._owed += owed  # giving back twice is harmless
            if not isinstance(e, Exception):
                raise
            _report(f"{len(owed)} messages of streams go back later", e)

    async def _expire(self, late: Sequence[Sent]) -> None:
        """Give back messages that their subscriber did not settle in time, or left. Only sent ones were delivered."""
        for sent in late:
            if not sent.was_sent:
                sent.subscriber.is_stuck = True
            self.owe([sent.receipt], delivered=sent.was_sent)
        self.settled([sent.receipt for sent in late])
        await self.pay()

    # --- the server as a worker ---------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._joining:
            if self._chores:
                return
            if self._by_worker:
                name = f"serve {socket.gethostname()}:{os.getpid()}"
                presence = await self.transport.workers.join(name, dead_after=_DEAD_AFTER, queues=[])
                presence.announce_stop()
                await presence.beat()
                self._presence = presence
                self._chores.append(asyncio.create_task(self._beat(presence), name="beats"))
            self._chores.append(asyncio.create_task(self._watch(), name="leases of streams"))

    async def _beat(self, presence: Presence) -> None:
        while True:
            try:
                await presence.beat()
                for shard, silence in presence.doubtful.items():
                    presence.trust(shard, silence)  # nothing runs here: acks of lost messages are refused
            except Exception as e:
                _report("the server's beat fails", e)
            await asyncio.sleep(BEAT_EVERY)

    async def _watch(self) -> None:
        reap_at = 0.0
        while True:
            await asyncio.sleep(_WATCH_EVERY)
            now = monotonic()
            await self._expire([sent for sent in self.sent.values() if sent.until < now])
            if now > reap_at:
                reap_at = now + 1.0
                try:
                    await self._free_settled_elsewhere(now)
                    await self.transport.workers.reap()
                except Exception as e:
                    _report("no messages of dead workers are given back", e)

    async def _free_settled_elsewhere(self, now: float) -> None:
        """Free the room of messages that another server settled."""
        if not self._by_worker:
            return
        old = [sent for sent in self.sent.values() if now - sent.checked_at > _COMPARE_EVERY][:_MOST]
        for sent in old:
            sent.checked_at = now
        if old:
            self.settled(await self.transport.workers.stale([sent.receipt for sent in old]))

    async def close(self) -> None:
        """Give back everything, then be no worker any more."""
        lanes = [*(lane.task for lane in self._lanes.values()), *self._ending]
        for lane in self._lanes.values():
            lane.end()
        if lanes:
            await asyncio.wait(lanes, timeout=_CLAIM_WITHIN)
        tasks = [*lanes, *self._chores]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lanes.clear()
        self._chores.clear()
        await self._expire(list(self.sent.values()))
        if self._presence is not None:
            await self._presence.leave()


def _report(text: str, error: Exception) -> None:
    """Log an error of a loop, which then goes on. An unexpected one is logged with its place."""
    if isinstance(error, MillpondError):
        log.warning("%s: %s", text, error)
    else:
        log.error("%s: unexpected %s", text, type(error).__name__, exc_info=error)
