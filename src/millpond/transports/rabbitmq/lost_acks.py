"""Acks that may have been lost with their connection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.envelope import Envelope

_REMEMBERED = 100_000


def identity(envelope: Envelope, *, by_suspects_queue: bool) -> Hashable:
    """Equal for two deliveries of one message. A copy that a result made has other counters, or is in another queue.

    Another publisher may use the same id for a message that differs anywhere else. Times are left out: without
    Millpond's header they are new with each delivery.
    """
    meta = envelope.meta
    counters = by_suspects_queue, meta.deliveries, meta.attempts
    content = meta.key, meta.priority, meta.expires_us, meta.headers, repr((envelope.native, envelope.properties))
    return envelope.id, *counters, hash(content), hash(envelope.payload)


class LostAcks:
    """Settled messages whose channel was lost before the broker answered.

    If one of them comes again, its ack was lost: it is acked again and does not run a second time.
    """

    def __init__(self) -> None:
        self._lost: Counter[Hashable] = Counter()

    def add_channel(self, channel: Channel) -> None:
        for _, message in channel.unanswered:
            self.add(message)
        channel.unanswered.clear()

    def add(self, message: Hashable) -> None:
        self._lost[message] += 1
        while len(self._lost) > _REMEMBERED:
            del self._lost[next(iter(self._lost))]

    def take(self, message: Hashable) -> bool:
        """True if the message was settled, once for each ack."""
        if self._lost[message] < 1:
            return False
        self._lost[message] -= 1
        return True
