"""A message to publish, and how it is made to fit into the broker's frames."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from millpond.errors import BodyTooLarge
from millpond.transports.rabbitmq.envelope import Envelope
from millpond.transports.rabbitmq.names import dead_name

RESERVE = 2048
"""Octets of properties that a new message leaves free: a copy of it has counters, times and a short error."""
TOO_LARGE = "headers too large"


class OutgoingMessage(msgspec.Struct, frozen=True, gc=False):
    """A message to publish: to its queue or a side queue, at once or after a delay."""

    envelope: Envelope
    delay_us: int = 0
    side_queue: str | None = None
    """AMQP name of the queue of dead letters or suspects."""
    is_new: bool = False
    """True for a message that its caller can still change. False for a copy, which must be published."""

    @property
    def queue(self) -> str:
        return self.envelope.meta.queue

    @property
    def target(self) -> Hashable:
        """Messages with the same target fail together: its queue is full, missing, or not for this user."""
        return self.envelope.meta.queue, self.side_queue, self.delay_us > 0


def check_size(message: OutgoingMessage, size: int, limit: int) -> None:
    """Refuse a new message whose copies would not fit."""
    if size + RESERVE > limit:
        raise BodyTooLarge(
            f"the headers for queue {message.envelope.meta.queue!r} have {size:,} bytes as AMQP headers, the limit of "
            f"this broker is {limit - RESERVE:,} (frame_max); send large data in the body"
        )


def fit_into_frame(message: OutgoingMessage, limit: int) -> OutgoingMessage:
    """A copy that fits: with a shorter error, or else as a dead letter without its headers."""
    envelope = message.envelope
    error = envelope.meta.error
    while error:
        error = error[: len(error) // 2]
        shorter = envelope.with_meta(error=error + "…" if error else None)
        if len(shorter.encode_properties()) <= limit:
            return msgspec.structs.replace(message, envelope=shorter)
    meta, size = envelope.meta, len(envelope.encode_properties())
    letter = Envelope(envelope.id, envelope.payload, {}, meta).with_meta(
        headers=None,
        wait_us=0,
        failed_us=meta.failed_us or meta.last_attempt_us or meta.created_us,
        reason=meta.reason[:200] if meta.reason else TOO_LARGE,
        error=f"the headers had {size:,} bytes and were dropped; {(meta.error or '')[:200]}",
    )
    return OutgoingMessage(letter, side_queue=dead_name(meta.queue))
