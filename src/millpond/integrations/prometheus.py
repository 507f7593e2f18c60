"""Prometheus: counters of messages, and durations of handlers, by queue."""

from __future__ import annotations

from collections.abc import Generator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from millpond.clock import monotonic
from millpond.outcome import DECISIONS
from millpond.pond import Millpond
from millpond.telemetry import (
    Event,
    LeasesLost,
    MessagesClaimed,
    MessagesPublished,
    MessagesSettled,
    Reaped,
    Reconnected,
)
from millpond.worker import Handling

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def instrument(pond: Millpond, registry: CollectorRegistry = REGISTRY) -> None:
    """Count and measure this pond in a registry, which your program exposes. One pond per registry."""
    published = Counter("millpond_published_messages", "Messages published.", ["queue"], registry=registry)
    claimed = Counter("millpond_claimed_messages", "Messages claimed.", ["queue"], registry=registry)
    again = Counter("millpond_redelivered_messages", "Messages claimed again.", ["queue"], registry=registry)
    settled = Counter("millpond_settled_messages", "Outcomes written.", ["queue", "outcome"], registry=registry)
    lost = Counter("millpond_lost_leases", "Leases lost to other workers.", ["queue"], registry=registry)
    reaped = Counter("millpond_reaped_messages", "Messages taken from dead workers.", registry=registry)
    reconnected = Counter("millpond_reconnections", "Connections made anew.", registry=registry)
    calls = Histogram("millpond_call_seconds", "Duration of calls.", ["queue", "call"], registry=registry)
    running = Gauge("millpond_running_messages", "Messages that run.", ["queue", "handler"], registry=registry)
    durations = Histogram(
        "millpond_handler_seconds", "Duration of handlers.", ["queue", "handler"], buckets=_BUCKETS, registry=registry
    )
    errors = Counter(
        "millpond_handler_errors", "Errors of handlers by type.", ["queue", "handler", "error"], registry=registry
    )

    def count(event: Event) -> None:
        match event:
            case MessagesPublished(queue=queue, count=number, seconds=seconds):
                published.labels(queue).inc(number)
                calls.labels(queue, "publish").observe(seconds)
            case MessagesClaimed(queue=queue, count=number, redelivered=redelivered, seconds=seconds):
                claimed.labels(queue).inc(number)
                again.labels(queue).inc(redelivered)
                calls.labels(queue, "claim").observe(seconds)
            case MessagesSettled(queue=queue, outcome=outcome, count=number, seconds=seconds):
                settled.labels(queue, outcome).inc(number)
                calls.labels(queue, "settle").observe(seconds)
            case LeasesLost(queue=queue, count=number):
                lost.labels(queue).inc(number)
            case Reaped(count=number):
                reaped.inc(number)
            case Reconnected():
                reconnected.inc()

    pond.telemetry.subscribe(count)

    @pond.middleware
    def measure(handling: Handling) -> Generator[None, BaseException | None, None]:
        labels = handling.queue, handling.handler
        began = monotonic()
        running.labels(*labels).inc()
        error = yield
        running.labels(*labels).dec()
        durations.labels(*labels).observe(monotonic() - began)
        if error is not None and not isinstance(error, DECISIONS):
            errors.labels(*labels, type(error).__name__).inc()
