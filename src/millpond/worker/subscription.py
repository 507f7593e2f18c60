"""A subscription: which queues go to which handler, and how. Defaults suit most; every number is explained."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from millpond.clock import SECOND, Seconds, micros
from millpond.errors import InvalidOption
from millpond.message import check_name
from millpond.outcome import MAX_CRASHES, AckPolicy
from millpond.retry import Retry


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """One handler and its options. Durations are seconds or timedeltas."""

    queues: tuple[str, ...]
    handler: Callable[..., Any]
    max_workers: int = 16
    """Handlers that run at once."""
    batch: int | None = None
    """Hand over lists of up to this many messages; the handler takes a list."""
    gather: Seconds = 0.0
    """How long a batch waits to be full after its first message."""
    fetch: int = 500
    """Messages per claim at most."""
    overfetch: float = 2.0
    """Claimed and not yet settled at most: this many times `fetch`, beside what runs."""
    prefetch_for: Seconds = 0.25
    """Claim no more than this much time's work ahead, at the present rate: what is slow is not hoarded."""
    min_poll: Seconds = 0.05
    """Least time between two polls of an empty queue, when wake-ups lead to nothing."""
    max_poll: Seconds = 1.0
    """Most time between two polls: what no wake-up told is found by then."""
    lease: Seconds = 30.0
    """How long a claim holds without a sign of life; a process that hangs loses its messages after that."""
    heartbeat: Seconds | None = None
    """How often running messages' leases are lengthened; None: a third of the lease."""
    timeout: Seconds | None = 300.0
    """A handler that runs longer has failed; its lease is lengthened no more."""
    cancel_lost: bool = True
    """Cancel a handler whose lease was lost: its result would be refused."""
    max_crashes: int | None = MAX_CRASHES
    """Deliveries that came to no result, such as a killed process, before a message is FAILED without running."""
    max_deliveries: int | None = None
    """Deliveries of any kind before a message is FAILED without running; None: no limit."""
    ack_policy: AckPolicy = AckPolicy.NACK_ON_ERROR
    """What an exception means."""
    retry: Retry = Retry()
    """When a message runs again after an error, and how often."""
    keep_acked: bool = True
    """Keep acked messages in the archive."""
    keep_rejected: bool = True
    """Keep FAILED messages in the archive."""

    def __post_init__(self) -> None:
        if not self.queues:
            raise InvalidOption("a subscriber needs at least one queue")
        for queue in self.queues:
            check_name(queue, "queue")
        if not callable(self.handler):
            raise InvalidOption(f"a handler is a function, not {type(self.handler).__name__}")
        for name in ("max_workers", "fetch"):
            whole(name, getattr(self, name), 1)
        for name in ("batch", "max_crashes", "max_deliveries"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        if isinstance(self.overfetch, bool) or not isinstance(self.overfetch, int | float) or self.overfetch < 1:
            raise InvalidOption(f"overfetch must be 1 or more, not {self.overfetch!r}")
        for name in ("gather", "prefetch_for", "min_poll", "max_poll", "lease", "heartbeat", "timeout"):
            if getattr(self, name) is not None:
                micros(getattr(self, name), name)
        for name in ("lease", "heartbeat", "timeout", "max_poll"):
            if getattr(self, name) is not None and not seconds(getattr(self, name)) > 0:
                raise InvalidOption(f"{name} must be longer than zero")
        if not self.heartbeat_s < seconds(self.lease):
            raise InvalidOption("heartbeat must be shorter than lease, or every lease ends before it is lengthened")
        if self.gather and self.batch is None:
            raise InvalidOption("gather is for batches; give batch too")
        if self.batch is not None and self.batch > self.fetch:
            raise InvalidOption(f"batch ({self.batch}) must not be larger than fetch ({self.fetch})")
        for name in ("cancel_lost", "keep_acked", "keep_rejected"):
            if getattr(self, name) not in (True, False):  # not by truth: "no" would be true
                raise InvalidOption(f"{name} must be True or False, not {getattr(self, name)!r}")
        if seconds(self.min_poll) > seconds(self.max_poll):
            raise InvalidOption("min_poll must not be longer than max_poll")
        if not isinstance(self.retry, Retry):
            raise InvalidOption(f"retry must be a Retry, not {type(self.retry).__name__}")
        if not isinstance(self.ack_policy, AckPolicy):
            raise InvalidOption(f"ack_policy must be an AckPolicy, not {self.ack_policy!r}")

    @property
    def name(self) -> str:
        return name_of(self.handler)

    @property
    def heartbeat_s(self) -> float:
        return seconds(self.heartbeat) if self.heartbeat is not None else seconds(self.lease) / 3

    @property
    def timeout_s(self) -> float | None:
        return seconds(self.timeout) if self.timeout is not None else None


def subscription(queues: Sequence[str], handler: Callable[..., Any], options: dict[str, Any]) -> Subscription:
    """Check options by name and value."""
    names = [name for name in Subscription.__struct_fields__ if name not in ("queues", "handler")]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"
            raise InvalidOption(f"unknown subscriber option {name!r}{hint}")
    return Subscription(queues=tuple(dict.fromkeys(queues)), handler=handler, **options)


def name_of(function: Any) -> str:
    """What a handler is called: functions, methods, partials and callable objects have different ways to say."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def seconds(value: Seconds) -> float:
    return micros(value, "duration") / SECOND


def whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidOption(f"{name} must be a whole number of at least {least}, not {value!r}")
