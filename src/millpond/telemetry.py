"""What happens to messages, announced once, to whoever wants to know. Without subscribers it costs a glance."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Literal

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


Event = Published | Claimed | Settled | LeasesLost | Reaped | Reconnected
Subscriber = Callable[[Event], None]


class Telemetry:
    """Subscribers and their events. A subscriber must be quick; one that raises is logged and goes on."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._subscribers)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Hear every event from now on; call the answer to hear no more."""
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    def announce(self, event: Event) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:  # whoever listens must not break the queue
                log.exception("a telemetry subscriber failed on %s", type(event).__name__)


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

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        return dict(self._counts)
