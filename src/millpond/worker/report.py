"""What the log tells of messages that fail: one line each, with what comes of it.

Never a body or headers, which may hold secrets.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

from millpond.outcome import Nack, NackMessage, Outcome, Raised, Reject, RejectMessage, Result
from millpond.worker.delivery import Delivery
from millpond.worker.subscription import seconds

log = logging.getLogger("millpond.worker")

_OURS = str(Path(__file__).parent)


def fields(delivery: Delivery) -> dict[str, str]:
    """What structured logs tell of a message."""
    return {
        "queue": delivery.queue,
        "message_id": str(delivery.id),
        "correlation_id": delivery.correlation_id,
    }


def failed_with(name: str, delivery: Delivery, result: Result, outcome: Outcome, *, trace: bool) -> None:
    match outcome:
        case Nack(delay=delay):
            failed(name, delivery, result, f"again in {seconds(delay):.3g} s", logging.WARNING, trace=trace)
        case Reject(reason=reason):
            failed(name, delivery, result, f"FAILED: {reason}", logging.ERROR, trace=trace)


def failed(name: str, delivery: Delivery, result: Result, what: str, level: int, *, trace: bool) -> None:
    """A handler raised, or did not decide though it had to."""
    where = f"message {delivery.id} of {delivery.queue!r}, attempt {delivery.attempt}"
    if not isinstance(result, Raised):
        if level == logging.ERROR and delivery.decided is None:
            log.error("%s did not decide on %s: %s", name, where, what, extra=fields(delivery))
    elif isinstance(result.error, NackMessage | RejectMessage):
        log.info("%s: %s: %s", where, what, result.error, extra=fields(delivery))
    else:
        exc_info = from_the_handler_on(result.error) if trace else None
        log.log(level, "%s failed on %s: %s", name, where, what, exc_info=exc_info, extra=fields(delivery))


def batch_failed(name: str, count: int, error: BaseException) -> None:
    log.error("%s failed on a batch of %d", name, count, exc_info=from_the_handler_on(error))


def undecodable(delivery: Delivery) -> None:
    # The reason is kept with the message; it may quote the body.
    log.warning("message %s FAILED: its body cannot be decoded", delivery.id, extra=fields(delivery))


def from_the_handler_on(
    error: BaseException,
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """An error for the log: how the worker came to call the handler says nothing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return type(error), error, trace
