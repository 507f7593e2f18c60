"""Events about messages, and their subscribers. Without subscribers an event costs one lookup.

A write in the caller's transaction emits its event at once, before the commit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args
from uuid import UUID

import msgspec

log = logging.getLogger("millpond")


class MessagesPublished(msgspec.Struct, frozen=True):
    queue: str
    count: int
    ids: tuple[UUID, ...] = ()
    seconds: float = 0.0
    """Duration of the call, which may have been about several queues."""


class MessagesClaimed(msgspec.Struct, frozen=True):
    queue: str
    count: int
    redelivered: int
    ids: tuple[UUID, ...] = ()
    seconds: float = 0.0


class MessagesSettled(msgspec.Struct, frozen=True):
    """`nack` means a later retry, `reject` means FAILED."""

    queue: str
    """Empty if it is not known, as in `LeasesLost`."""
    outcome: Literal["ack", "nack", "reject", "give back"]
    count: int
    ids: tuple[UUID, ...] = ()
    seconds: float = 0.0


class LeasesLost(msgspec.Struct, frozen=True):
    queue: str
    """Empty if it is not known: the messages were claimed on another handle, or many claims ago."""
    count: int
    ids: tuple[UUID, ...] = ()


class Reaped(msgspec.Struct, frozen=True):
    count: int


class Reconnected(msgspec.Struct, frozen=True):
    after: float
    """Seconds without a connection."""


class BrokerBlocked(msgspec.Struct, frozen=True):
    """RabbitMQ is short of memory or disk and stops reading published messages. Acks continue."""

    reason: str


class Streamed(msgspec.Struct, frozen=True):
    """A trigger of a Spark query, with or without a batch."""

    stream: str
    count: int
    waiting: int
    """Number of messages that are due and not claimed, counted up to a limit."""
    seconds: float


Event = (
    MessagesPublished | MessagesClaimed | MessagesSettled | LeasesLost | Reaped | Reconnected | BrokerBlocked | Streamed
)
Subscriber = Callable[[Event], None]


class Telemetry:
    """Passes events to subscribers. A subscriber must be quick; if it raises, the error is logged and it stays."""

    def __init__(self) -> None:
        self._subscribers: dict[type[Event], tuple[Subscriber, ...]] = {}
        self._forward: Subscriber | None = None

    def forward(self, to: Subscriber) -> None:
        """Pass all events to `to` alone: the subscribers get them in another process."""
        self._forward = to

    def wants(self, *kinds: type[Event]) -> bool:
        """True if one of these kinds has a subscriber. Otherwise the caller need not collect the data."""
        return self._forward is not None or not self._subscribers.keys().isdisjoint(kinds)

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> Callable[[], None]:
        """Pass events of these kinds, or all events, to the subscriber. The returned function ends that."""
        chosen = kinds or get_args(Event)
        for kind in chosen:
            self._subscribers[kind] = (*self._subscribers.get(kind, ()), subscriber)

        def unsubscribe() -> None:
            for kind in chosen:
                rest = tuple(s for s in self._subscribers.get(kind, ()) if s is not subscriber)
                if rest:
                    self._subscribers[kind] = rest
                else:
                    self._subscribers.pop(kind, None)

        return unsubscribe

    def announce(self, event: Event) -> None:
        subscribers = self._subscribers.get(type(event), ()) if self._forward is None else (self._forward,)
        for subscriber in subscribers:
            try:
                subscriber(event)
            except KeyboardInterrupt:
                raise
            except BaseException:  # a subscriber must not break the queue, nor must a panic of its library
                log.exception("a telemetry subscriber failed on %s", type(event).__name__)


def log_event(event: Event) -> None:
    """Log an event, with its fields for structured logs."""
    fields = {"event": type(event).__name__, **msgspec.structs.asdict(event)}
    match event:
        case LeasesLost(queue=queue, count=count):
            of = f" of {queue!r}" if queue else ""
            log.warning("leases lost: %d%s; other workers have those messages now", count, of, extra=fields)
        case Reaped(count=count):
            log.warning("reaped: %d messages of dead or hung workers", count, extra=fields)
        case Reconnected(after=after):
            log.warning("reconnected after %.1f s", after, extra=fields)
        case _:
            log.debug("%s", event, extra=fields)


class Counters:
    """Counts of events by name, for progress displays and tests.

    >>> telemetry, counters = Telemetry(), Counters()
    >>> _ = telemetry.subscribe(counters)
    >>> telemetry.announce(MessagesSettled("orders", "ack", 3))
    >>> counters["ack"]
    3
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        match event:
            case MessagesSettled(outcome=name, count=count):
                self._counts[name] += count
            case Reconnected():
                self._counts["reconnected"] += 1
            case MessagesClaimed(count=count, redelivered=redelivered):
                self._counts["claimed"] += count
                self._counts["redelivered"] += redelivered
            case MessagesPublished(count=count):
                self._counts["published"] += count
            case LeasesLost(count=count):
                self._counts["lease lost"] += count
            case Reaped(count=count):
                self._counts["reaped"] += count
            case BrokerBlocked():
                self._counts["blocked"] += 1
            case Streamed(count=count):
                self._counts["streamed"] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        return dict(self._counts)
