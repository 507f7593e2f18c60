"""Sentry: errors of handlers with their message, and a trace from publisher to handler."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from typing import Any

import sentry_sdk
from sentry_sdk.scope import add_global_event_processor

from millpond.outcome import DECISIONS
from millpond.pond import Millpond
from millpond.publishing import Publication
from millpond.worker import Handling

TRACE, BAGGAGE = "sentry-trace", "baggage"
_REPORTED = "_millpond_reported"
"""Marks an error of a handler that was reported."""


def instrument(pond: Millpond, *, local_variables: bool = False) -> None:
    """Report errors of this pond's handlers, each once, in a scope of its message. Initialise the SDK before the run.

    Bodies are not sent: the event has the id, by which `millpond show` finds the message. Sentry would send them as
    local variables of the handler, so those are left out. `local_variables=True` sends them.
    """
    _drop_log_lines_of_reported_errors()

    @pond.publish_middleware
    def publish(publication: Publication) -> Generator[dict[str, str], BaseException | None, None]:
        with sentry_sdk.start_span(op="queue.publish", name=publication.queue) as span:
            span.set_data("messaging.system", "millpond")
            span.set_data("messaging.destination.name", publication.queue)
            headers = {TRACE: sentry_sdk.get_traceparent(), BAGGAGE: sentry_sdk.get_baggage()}
            error = yield {name: value for name, value in headers.items() if value}
            if error is not None:
                span.set_status("internal_error")

    @pond.middleware
    def process(handling: Handling) -> Generator[None, BaseException | None, None]:
        with sentry_sdk.isolation_scope() as scope:
            if not local_variables:
                scope.add_event_processor(_without_variables)
            scope.set_tag("millpond.queue", handling.queue)
            scope.set_tag("millpond.handler", handling.handler)
            facts = {"id": str(handling.id), "attempt": handling.attempt, "correlation_id": handling.correlation_id}
            scope.set_context("millpond", facts)
            incoming = {name: str(handling.headers[name]) for name in (TRACE, BAGGAGE) if name in handling.headers}
            transaction = sentry_sdk.continue_trace(
                incoming, op="queue.process", name=handling.handler, source="task", origin="auto.queue.millpond"
            )
            with sentry_sdk.start_transaction(transaction) as span:
                span.set_data("messaging.destination.name", handling.queue)
                span.set_data("messaging.message.id", str(handling.id))
                error = yield
                failed = error is not None and not isinstance(error, DECISIONS)
                span.set_status("internal_error" if failed else "ok")
                if error is not None and failed:
                    sentry_sdk.capture_exception(error)
                    vars(error)[_REPORTED] = True


@cache
def _drop_log_lines_of_reported_errors() -> None:
    """Once a process. Sentry makes an event of each error that is logged, also of the worker's line about a failure."""

    @add_global_event_processor
    def drop(event: Any, hint: Any) -> Any:
        record, exc_info = (hint or {}).get("log_record"), (hint or {}).get("exc_info")
        ours = record is not None and record.name.startswith("millpond")
        return None if ours and exc_info and hasattr(exc_info[1], _REPORTED) else event


def _without_variables(event: Any, hint: Any) -> Any:
    for part in ("exception", "threads"):
        for value in (event.get(part) or {}).get("values", ()):
            for frame in (value.get("stacktrace") or {}).get("frames", ()):
                frame.pop("vars", None)
    return event
