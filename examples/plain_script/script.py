"""A plain script: a periodic job, a unique job, a job that snoozes, and a trace through all of them."""

import asyncio
import os
from datetime import timedelta

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from millpond import Millpond, SnoozeMessage
from millpond.integrations import opentelemetry

spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))

pond = Millpond(os.environ.get("SCRIPT_URL", "sqlite:///script.db"))
opentelemetry.instrument(pond, tracer_provider=provider)
finished: list[str] = []
reported = asyncio.Event()


@pond.every(every=timedelta(seconds=1), queue="ticks")
async def tick() -> None:
    """Periodic: each second, by one of all processes. It asks for a report, of which one waits at most."""
    await report.publish({"of": "today"}, unique="today")
    finished.append("tick")


@pond.subscriber("reports")
async def report(body: dict) -> None:
    if "snooze" not in finished:
        finished.append("snooze")
        raise SnoozeMessage(0.5, "the figures are not there yet")  # again later; this is no attempt
    finished.append(f"report of {body['of']} in trace {trace.get_current_span().get_span_context().trace_id:x}")
    reported.set()


async def main() -> None:
    worker = asyncio.create_task(pond.run())
    async with asyncio.timeout(120):
        await reported.wait()
    pond.stop()
    await worker
    await pond.close()
    for text in dict.fromkeys(finished):
        print(text)
    for name in dict.fromkeys(span.name for span in spans.get_finished_spans()):
        print("span:", name)


if __name__ == "__main__":
    asyncio.run(main())
