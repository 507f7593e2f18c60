"""Errors of the driver and the broker as Millpond's."""

from __future__ import annotations

import asyncio

from aiormq import exceptions as amqp

from millpond.errors import (
    BodyTooLarge,
    MillpondError,
    QueueMismatch,
    StoreError,
    StoreUnavailable,
    Unroutable,
)


class NoAnswer(StoreUnavailable):
    """The broker did not answer in time."""


class NoSuchQueue(StoreUnavailable):
    """The queue was deleted. The next try declares it again."""


class AccessRefused(StoreError):
    """The user of the broker lacks a permission."""


class MessageTooLarge(BodyTooLarge):
    """The broker refuses a body of this size, and closes the channel."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the body has {size:,} bytes, the broker's limit is {limit:,} (max_message_size); store large data "
            "elsewhere and send a reference"
        )
        self.limit = limit


def translated(error: BaseException, what: str = "") -> BaseException:
    """A driver error as one of Millpond's. A cancellation by a closing channel is a lost connection."""
    match error:
        case MillpondError():
            return error
        case amqp.PublishError():
            return Unroutable(f"no queue took the message for {what!r}: it was deleted, or its binding was")
        case amqp.DeliveryError():
            return StoreUnavailable(f"the broker refused a message for {what!r}; publish it again")
        case amqp.ChannelPreconditionFailed() if " arg '" in str(error):  # otherwise it is about a delivery
            return QueueMismatch(
                f"the broker has {what!r} with other settings than ours: {error}. Delete it when it is empty, or "
                "give the option queue_type that fits"
            )
        case amqp.ChannelNotFoundEntity():
            return NoSuchQueue(f"the broker no longer has the queue {what!r}; it is declared again")
        case amqp.ChannelAccessRefused():
            return AccessRefused(f"this user of the broker may not do that with {what!r}: {error}")
        case asyncio.CancelledError():
            task = asyncio.current_task()
            return error if task is not None and task.cancelling() else StoreUnavailable("the channel was closed")
        case TimeoutError():
            return NoAnswer("the broker did not answer in time; the sent messages may or may not have arrived")
        case amqp.AMQPError() | amqp.ChannelInvalidStateError() | OSError() | RuntimeError():
            return StoreUnavailable(f"the connection to the broker was lost: {error or type(error).__name__}")
        case Exception() if type(error) is Exception:  # raised by calls of the driver when it is closed under them
            return StoreUnavailable("the connection was closed")
        case _:
            return error
