"""What happens to messages, announced once, to whoever wants to know. Without subscribers it costs a glance.

What is written within a transaction of the caller's is announced when it is written, before the commit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

log = logging.getLogger("millpond")


class Published(msgspec.Struct, frozen=True):
    queue: str
    count: int


class Claimed(msgspec.Struct, frozen=True):
    queue: str
    count: int
    redelivered: int


class Settled(msgspec.Struct, frozen=True):
    """`nack` is a retry to come; `reject` is FAILED."""

    queue: str
    outcome: Literal["ack", "nack", "reject", "give back"]
    count: int


class LeasesLost(msgspec.Struct, frozen=True):
    queue: str
    count: int


class Reaped(msgspec.Struct, frozen=True):
    count: int


class Reconnected(msgspec.Struct, frozen=True):
    after: float
    """Seconds without a connection."""


class Streamed(msgspec.Struct, frozen=True):
    """A trigger of a Spark query: a batch of a stream, or none."""

    stream: str
    count: int
    waiting: int
    """Messages that were due and not claimed, counted up to a limit."""
    seconds: float


Event = Published | Claimed | Settled | LeasesLost | Reaped | Reconnected | Streamed
Subscriber = Callable[[Event], None]


class Telemetry:
    """Subscribers and their events. A subscriber must be quick; one that raises is logged and goes on."""

    def __init__(self) -> None:
        self._subscribers: dict[type[Event], tuple[Subscriber, ...]] = {}

    def wants(self, *kinds: type[Event]) -> bool:
        """Whether anybody listens to one of these; what it takes to tell them need not be gathered otherwise."""
        return any(kind in self._subscribers for kind in kinds)

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> Callable[[], None]:
        """Hear events of these kinds, or every event, from now on; call the answer to hear no more."""
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
        for subscriber in self._subscribers.get(type(event), ()):
            try:
                subscriber(event)
            except Exception:  # whoever listens must not break the queue
                log.exception("a telemetry subscriber failed on %s", type(event).__name__)


def log_event(event: Event) -> None:
    """A line in the log, with the event's facts as fields for structured logs."""
    fields = {"event": type(event).__name__, **msgspec.structs.asdict(event)}
    match event:
        case LeasesLost(queue=queue, count=count):
            of = f" of {queue!r}" if queue else ""
            log.warning("%d leases%s were lost: other workers have those messages now", count, of, extra=fields)
        case Reaped(count=count):
            log.warning("%d messages of dead or hung workers were given back", count, extra=fields)
        case Reconnected(after=after):
            log.warning("the database is back after %.1f s", after, extra=fields)
        case _:
            log.debug("%s", event, extra=fields)


class Counters:
    """Counts events by name, for progress displays and tests.

    >>> telemetry, counters = Telemetry(), Counters()
    >>> _ = telemetry.subscribe(counters)
    >>> telemetry.announce(Settled("orders", "ack", 3))
    >>> counters["ack"]
    3
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        match event:
            case Settled(outcome=name, count=count):
                self._counts[name] += count
            case Reconnected():
                self._counts["reconnected"] += 1
            case Claimed(count=count, redelivered=redelivered):
                self._counts["claimed"] += count
                self._counts["redelivered"] += redelivered
            case Published(count=count):
                self._counts["published"] += count
            case LeasesLost(count=count):
                self._counts["lease lost"] += count
            case Reaped(count=count):
                self._counts["reaped"] += count
            case Streamed(count=count):
                self._counts["streamed"] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        return dict(self._counts)
