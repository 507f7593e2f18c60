"""Log lines of failed messages: one line each, with the outcome.

They never contain a body or headers, which may hold secrets.
"""

from __future__ import annotations

import logging
from types import TracebackType

from millpond.clock import seconds
from millpond.failed_attempts import trace_of_handler
from millpond.outcome import (
    Ack,
    GiveBack,
    Nack,
    NackMessage,
    Outcome,
    Raised,
    Reject,
    RejectMessage,
    Result,
    SnoozeMessage,
)
from millpond.worker.delivery import Delivery

log = logging.getLogger("millpond.worker")


def log_fields(delivery: Delivery) -> dict[str, str]:
    """Fields of a message in structured logs."""
    return {
        "queue": delivery.queue,
        "message_id": str(delivery.id),
        "correlation_id": delivery.correlation_id,
    }


def log_outcome(name: str, delivery: Delivery, result: Result, outcome: Outcome, *, trace: bool) -> None:
    match outcome:
        case Nack(delay=delay):
            log_failure(name, delivery, result, f"again in {seconds(delay or 0):.3g} s", logging.WARNING, trace=trace)
        case GiveBack(delay=delay) if isinstance(result, Raised):
            log_failure(name, delivery, result, f"snoozed for {seconds(delay or 0):.3g} s", logging.INFO, trace=trace)
        case Ack() if isinstance(result, Raised):
            log_failure(name, delivery, result, "acked, as its ack policy says", logging.ERROR, trace=trace)
        case Reject(reason=reason):
            log_failure(name, delivery, result, f"FAILED: {reason}", logging.ERROR, trace=trace)


def log_failure(name: str, delivery: Delivery, result: Result, what: str, level: int, *, trace: bool) -> None:
    """Log that a handler raised, or did not decide although its ack policy is MANUAL."""
    where = f"message {delivery.id} of {delivery.queue!r}, attempt {delivery.attempt}"
    if not isinstance(result, Raised):
        if level == logging.ERROR and delivery.decided is None:
            log.error(
                "%s returned without ack, nack or reject for %s: %s", name, where, what, extra=log_fields(delivery)
            )
    elif isinstance(result.error, RejectMessage):  # the reason is its text
        log.info("%s: %s", where, what, extra=log_fields(delivery))
    elif isinstance(result.error, NackMessage | SnoozeMessage):
        log.info("%s: %s: %s", where, what, result.error, extra=log_fields(delivery))
    else:
        exc_info = exc_info_from_handler(result.error) if trace else None
        log.log(level, "%s failed on %s: %s", name, where, what, exc_info=exc_info, extra=log_fields(delivery))


def log_batch_failure(name: str, count: int, error: BaseException) -> None:
    log.error("%s failed on a batch of %d", name, count, exc_info=exc_info_from_handler(error))


def log_undecodable(delivery: Delivery) -> None:
    # The reason is stored with the message and not logged, because it may quote the body.
    log.warning(
        "message %s of %r FAILED: its body cannot be decoded; `millpond show` has the reason",
        delivery.id,
        delivery.queue,
        extra=log_fields(delivery),
    )


def exc_info_from_handler(
    error: BaseException,
) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """An error for the log, without the frames of the worker above the handler."""
    return type(error), error, trace_of_handler(error)
