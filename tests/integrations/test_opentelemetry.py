"""Spans and metrics reach the SDK of OpenTelemetry; a trace continues from the publisher into the handler."""

from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from millpond import Millpond, RejectMessage
from millpond.integrations.opentelemetry import instrument


class Traced:
    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.pond = Millpond("memory://")
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        instrument(self.pond, tracer_provider=self.provider, meter_provider=meters)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def metrics(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        assert data is not None
        found = [metric for r in data.resource_metrics for scope in r.scope_metrics for metric in scope.metrics]
        return {metric.name: list(metric.data.data_points) for metric in found}


@pytest.fixture
def traced() -> Traced:
    return Traced()


async def test_a_trace_continues_from_the_request_to_the_handler_and_the_next_message(traced: Traced) -> None:
    pond, seen = traced.pond, []

    @pond.subscriber("orders")
    async def ship(order: dict) -> None:
        await pond.publish("invoices", order)

    @pond.subscriber("invoices")
    def invoice(order: dict) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)

    async with pond.testing() as test:
        with traced.provider.get_tracer("web").start_as_current_span("request") as request:
            id_ = pond.publish_sync("orders", {"sku": 7})
        await test.run()
    names = ["send orders", "process orders", "send invoices", "process invoices"]
    (send,), (process,), (send_next,), (process_next,) = (traced.spans(name) for name in names)
    chain = [send, process, send_next, process_next]
    assert {span.context.trace_id for span in chain} == {request.get_span_context().trace_id} == set(seen)
    parents = [request.get_span_context().span_id, *(span.context.span_id for span in chain[:3])]
    assert [span.parent and span.parent.span_id for span in chain] == parents
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert send.attributes is not None and process.attributes is not None
    assert send.attributes["messaging.message.id"] == process.attributes["messaging.message.id"] == str(id_)
    assert process.attributes["messaging.destination.name"] == "orders"
    assert process.attributes["messaging.operation.type"] == "process"


async def test_the_publishers_baggage_reaches_every_handler_of_the_trace(traced: Traced) -> None:
    pond, seen = traced.pond, []

    @pond.subscriber("orders")
    async def ship(order: int) -> None:
        seen.append(baggage.get_baggage("tenant"))
        await pond.publish("invoices", order)

    @pond.subscriber("invoices")
    def invoice(order: int) -> None:
        seen.append(baggage.get_baggage("tenant"))

    async with pond.testing() as test:
        token = context.attach(baggage.set_baggage("tenant", "t-1"))
        await pond.publish("orders", 7)
        context.detach(token)
        await pond.publish("orders", 8)
        await test.run()
    assert sorted(seen, key=str) == [None, None, "t-1", "t-1"]


async def test_errors_mark_the_span_and_decisions_do_not(traced: Traced) -> None:
    pond = traced.pond

    @pond.subscriber("q")
    async def handle(body: str) -> None:
        raise ValueError("broken") if body == "error" else RejectMessage("no")

    async with pond.testing(raise_errors=False) as test:
        await pond.publish_many("q", ["error", "reject"])
        await test.run()
    failed, decided = traced.spans("process q")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None and failed.attributes["error.type"] == "ValueError"
    assert failed.events[0].name == "exception"
    assert decided.status.status_code is StatusCode.UNSET
    (sent,) = traced.spans("send q")
    assert sent.attributes is not None and sent.attributes["messaging.batch.message_count"] == 2
    assert {s.parent.span_id for s in (failed, decided) if s.parent} == {sent.context.span_id}


async def test_metrics_have_the_names_of_the_conventions(traced: Traced) -> None:
    pond = traced.pond

    @pond.subscriber("q", batch=10)
    async def handle(bodies: list[int]) -> None: ...

    async with pond.testing() as test:
        await pond.publish_many("q", [1, 2, 3])
        await test.run()
    metrics = traced.metrics()
    assert [point.value for point in metrics["messaging.client.sent.messages"]] == [3]
    assert [point.value for point in metrics["messaging.client.consumed.messages"]] == [3]
    (processed,) = metrics["messaging.process.duration"]
    assert processed.count == 3 and processed.attributes["messaging.destination.name"] == "q"
    operations = {
        point.attributes["messaging.operation.name"] for point in metrics["messaging.client.operation.duration"]
    }
    assert operations == {"send", "receive", "settle"}
    assert len(traced.spans("process q")) == 3
