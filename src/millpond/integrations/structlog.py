"""structlog: the message's id, queue and attempt in every log line of its handler."""

from __future__ import annotations

from collections.abc import Generator

from structlog.contextvars import bind_contextvars, reset_contextvars

from millpond.pond import Millpond
from millpond.worker import Handling


def instrument(pond: Millpond) -> None:
    """Bind the facts of each message for its handler. `structlog.contextvars.merge_contextvars` adds them to lines."""

    @pond.middleware
    def bind(handling: Handling) -> Generator[None, BaseException | None, None]:
        tokens = bind_contextvars(
            message_id=str(handling.id),
            queue=handling.queue,
            attempt=handling.attempt,
            handler=handling.handler,
            correlation_id=handling.correlation_id,
        )
        yield
        reset_contextvars(**tokens)
