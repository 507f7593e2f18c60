"""Options of a subscriber: its queues, its handler, limits and times, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import msgspec

from millpond.checks import integer, known_options
from millpond.clock import Seconds, micros, seconds
from millpond.errors import InvalidOption
from millpond.message import check_name
from millpond.outcome import MAX_CRASHES, AckPolicy
from millpond.retry import Retry


class SubscriberOptions(TypedDict, total=False):
    """Options of a subscriber as type checkers see them, without `batch`; `Subscription` describes each."""

    max_workers: int
    gather: Seconds
    fetch: int
    overfetch: float
    prefetch_for: Seconds
    min_poll: Seconds
    max_poll: Seconds
    lease: Seconds
    heartbeat: Seconds | None
    timeout: Seconds | None
    cancel_lost: bool
    max_crashes: int | None
    max_deliveries: int | None
    ack_policy: AckPolicy
    retry: Retry
    keep_acked: bool
    keep_rejected: bool


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """One handler and its options. Durations are seconds or timedeltas."""

    queues: tuple[str, ...]
    handler: Callable[..., Any]
    max_workers: int = 16
    """Maximum number of handlers that run at once."""
    batch: int | None = None
    """Maximum number of messages per call of a handler that takes lists; None: one message per call, no list."""
    gather: Seconds = 0.0
    """How long a batch waits for more messages after its first one."""
    fetch: int = 500
    """Maximum number of messages per claim."""
    overfetch: float = 2.0
    """Limit of messages claimed ahead of the running ones, as a multiple of `fetch`."""
    prefetch_for: Seconds = 0.25
    """Claim at most as many messages ahead as run in this time at the present rate: slow ones are not hoarded."""
    min_poll: Seconds = 0.05
    """Shortest time between two polls of an empty queue, when wake-ups bring no message."""
    max_poll: Seconds = 1.0
    """Longest time between two polls: a message without a wake-up is found by then."""
    lease: Seconds = 30.0
    """How long a claim holds without a heartbeat; a process that hangs then loses its messages."""
    heartbeat: Seconds | None = None
    """Time between two extensions of a lease; None: a third of the lease."""
    timeout: Seconds | None = 300.0
    """A handler that runs longer has failed; its lease is no longer extended."""
    cancel_lost: bool = True
    """Cancel a handler whose lease was lost: its result would be refused."""
    max_crashes: int | None = MAX_CRASHES
    """Crashes after which a message is FAILED; None: no limit."""
    max_deliveries: int | None = None
    """Deliveries of any kind after which a message is FAILED without running; None: no limit."""
    ack_policy: AckPolicy = AckPolicy.NACK_ON_ERROR
    """The effect of an exception in the handler."""
    retry: Retry = Retry()
    """When and how often a message runs again after an error."""
    keep_acked: bool = True
    """Keep acked messages in the archive."""
    keep_rejected: bool = True
    """Keep FAILED messages in the archive."""
    own: frozenset[str] = frozenset()
    """Names of the options that the subscriber gave: settings of a queue do not replace them."""

    def __post_init__(self) -> None:
        if not self.queues:
            raise InvalidOption("a subscriber needs at least one queue")
        for queue in self.queues:
            check_name(queue, "queue")
        if not callable(self.handler):
            raise InvalidOption(f"a handler is a function, not {type(self.handler).__name__}")
        for name in ("max_workers", "fetch"):
            integer(getattr(self, name), name, 1)
        for name in ("batch", "max_crashes", "max_deliveries"):
            if getattr(self, name) is not None:
                integer(getattr(self, name), name, 1)
        if isinstance(self.overfetch, bool) or not isinstance(self.overfetch, int | float) or self.overfetch < 1:
            raise InvalidOption(f"overfetch must be 1 or more, not {self.overfetch!r}")
        for name in ("gather", "prefetch_for", "min_poll", "max_poll", "lease", "heartbeat", "timeout"):
            if getattr(self, name) is not None:
                micros(getattr(self, name), name)
        for name in ("lease", "heartbeat", "timeout", "max_poll"):
            if getattr(self, name) is not None and not seconds(getattr(self, name)) > 0:
                raise InvalidOption(f"{name} must be longer than zero")
        if not self.heartbeat_s < seconds(self.lease):
            raise InvalidOption("heartbeat must be shorter than lease, or every lease ends before it is extended")
        if self.gather and self.batch is None:
            raise InvalidOption("gather is for batches; give batch too")
        if self.batch is not None and self.batch > self.fetch:
            raise InvalidOption(f"batch ({self.batch}) must not be larger than fetch ({self.fetch})")
        for name in ("cancel_lost", "keep_acked", "keep_rejected"):
            if getattr(self, name) not in (True, False):  # not by truthiness: "no" would be true
                raise InvalidOption(f"{name} must be True or False, not {getattr(self, name)!r}")
        if seconds(self.min_poll) > seconds(self.max_poll):
            raise InvalidOption("min_poll must not be longer than max_poll")
        if not isinstance(self.retry, Retry):
            raise InvalidOption(f"retry must be a Retry, not {type(self.retry).__name__}")
        if not isinstance(self.ack_policy, AckPolicy):
            raise InvalidOption(f"ack_policy must be an AckPolicy, not {self.ack_policy!r}")

    @property
    def name(self) -> str:
        return handler_name(self.handler)

    @property
    def heartbeat_s(self) -> float:
        return seconds(self.heartbeat) if self.heartbeat is not None else seconds(self.lease) / 3

    @property
    def timeout_s(self) -> float | None:
        return seconds(self.timeout) if self.timeout is not None else None


def subscription(queues: Sequence[str], handler: Callable[..., Any], options: dict[str, Any]) -> Subscription:
    """Check options by name and value."""
    names = [name for name in Subscription.__struct_fields__ if name not in ("queues", "handler", "own")]
    known_options(options, names, "unknown subscriber option")
    return Subscription(queues=tuple(dict.fromkeys(queues)), handler=handler, own=frozenset(options), **options)


def handler_name(function: Any) -> str:
    """The name of a function, method, partial or callable object."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
