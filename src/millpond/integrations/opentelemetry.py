"""OpenTelemetry: spans and metrics by its conventions for messaging. The trace continues from publisher to handler."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from millpond.clock import monotonic
from millpond.outcome import DECISIONS
from millpond.pond import Millpond
from millpond.publishing import Publication
from millpond.telemetry import Event, MessagesClaimed, MessagesPublished, MessagesSettled
from millpond.worker import Handling

SYSTEM = {"messaging.system": "millpond"}
_BOUNDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]


def instrument(
    pond: Millpond,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Trace and measure this pond. Without providers those of the program are used.

    A publish is a span `send QUEUE`, a handler run a span `process QUEUE`, whose parent is the publisher's span. The
    context is in the message's headers, by the program's propagators (`traceparent` by default).
    """
    tracer = trace.get_tracer("millpond", tracer_provider=tracer_provider)
    meter = metrics.get_meter("millpond", meter_provider=meter_provider)
    processed = meter.create_histogram(
        "messaging.process.duration", "s", "Duration of handlers", explicit_bucket_boundaries_advisory=_BOUNDS
    )
    calls = meter.create_histogram(
        "messaging.client.operation.duration",
        "s",
        "Duration of calls to the transport",
        explicit_bucket_boundaries_advisory=_BOUNDS,
    )
    sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Messages published")
    consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Messages claimed")

    @pond.publish_middleware
    def send(publication: Publication) -> Generator[dict[str, str], BaseException | None, None]:
        span = tracer.start_span(
            f"send {publication.queue}", kind=SpanKind.PRODUCER, attributes=_attributes(publication.queue, "send")
        )
        token = context.attach(trace.set_span_in_context(span))
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        error = yield carrier
        context.detach(token)
        if publication.count == 1 and publication.ids:
            span.set_attribute("messaging.message.id", str(publication.ids[0]))
        elif publication.count > 1:
            span.set_attribute("messaging.batch.message_count", publication.count)
        _end(span, error)

    @pond.middleware
    def process(handling: Handling) -> Generator[None, BaseException | None, None]:
        attributes = _attributes(handling.queue, "process")
        published = propagate.extract({k: v for k, v in handling.headers.items() if isinstance(v, str)})
        span = tracer.start_span(
            f"process {handling.queue}",
            context=published,
            kind=SpanKind.CONSUMER,
            attributes={
                **attributes,
                "messaging.message.id": str(handling.id),
                "messaging.message.conversation_id": handling.correlation_id,
                "millpond.handler": handling.handler,
                "millpond.attempt": handling.attempt,
            },
        )
        token = context.attach(trace.set_span_in_context(span, published))  # with the publisher's baggage
        began = monotonic()
        error = yield
        context.detach(token)
        if error is not None and not isinstance(error, DECISIONS):
            attributes["error.type"] = type(error).__qualname__
        processed.record(monotonic() - began, attributes)
        _end(span, error)

    def measure(event: Event) -> None:
        match event:
            case MessagesPublished(queue=queue, count=count, seconds=seconds):
                sent.add(count, _attributes(queue, "send"))
                calls.record(seconds, _attributes(queue, "send"))
            case MessagesClaimed(queue=queue, count=count, seconds=seconds):
                consumed.add(count, _attributes(queue, "receive"))
                calls.record(seconds, _attributes(queue, "receive"))
            case MessagesSettled(queue=queue, outcome=outcome, seconds=seconds):
                calls.record(seconds, {**_attributes(queue, "settle"), "millpond.outcome": outcome})

    pond.telemetry.subscribe(measure, MessagesPublished, MessagesClaimed, MessagesSettled)


def _attributes(queue: str, operation: str) -> dict[str, Any]:
    return {
        **SYSTEM,
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _end(span: trace.Span, error: BaseException | None) -> None:
    if isinstance(error, DECISIONS):
        span.set_attribute("millpond.decision", type(error).__name__)
    elif error is not None:
        span.record_exception(error)
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))
    span.end()
