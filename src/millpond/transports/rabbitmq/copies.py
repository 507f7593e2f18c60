"""The copy of a delivery that is published before the delivery is acked, for each outcome and each detour."""

from __future__ import annotations

from typing import Any

from millpond.message import SETTLED, SUSPECT, State, new_id, short_error
from millpond.outcome import Change
from millpond.transports.rabbitmq.consumer import ReceivedMessage
from millpond.transports.rabbitmq.envelope import Envelope, Metadata
from millpond.transports.rabbitmq.names import dead_name, suspects_name
from millpond.transports.rabbitmq.outgoing import OutgoingMessage
from millpond.transports.rabbitmq.receipts import HeldDelivery

UNDECODABLE = "undecodable"


def copy_for_outcome(delivery: HeldDelivery, c: Change, now: int) -> OutgoingMessage | None:
    """The copy that an outcome needs. None: the delivery is only acked."""
    if c.state is State.COMPLETED or (c.state is State.FAILED and not c.keep):
        return None
    envelope = envelope_after(delivery, c, now)
    if c.state in SETTLED:
        return OutgoingMessage(envelope, side_queue=dead_name(envelope.meta.queue))
    return _live_copy(envelope, c.delay_us or 0)


def _live_copy(envelope: Envelope, delay_us: int = 0) -> OutgoingMessage:
    """Copy to be delivered again. A suspect stays among the suspects: a header does not make one in the work queue."""
    side_queue = suspects_name(envelope.meta.queue) if envelope.meta.crashes >= SUSPECT else None
    return OutgoingMessage(envelope, delay_us, side_queue)


def envelope_after(delivery: HeldDelivery, c: Change, now: int) -> Envelope:
    """The envelope with the effect of an outcome."""
    received, meta = delivery.received, delivery.received.envelope.meta
    changes: dict[str, Any] = {
        "deliveries": received.deliveries + c.deliveries,
        "attempts": meta.attempts + c.attempts,
        "crashes": 0 if c.attempts else received.crashes + c.crashes,
        "error": meta.error if c.error is None else c.error,
    }
    if c.attempts:
        changes["first_attempt_us"] = delivery.claimed_us if meta.first_attempt_us is None else meta.first_attempt_us
        changes["last_attempt_us"] = now
    if c.state is State.FAILED:
        changes |= {"failed_us": now, "reason": c.reason}
    if c.delay_us is not None:
        changes["due_us"] = now + c.delay_us
    return received.envelope.with_meta(**changes)


def copy_with_crash(received: ReceivedMessage) -> OutgoingMessage:
    """Copy for a queue that does not count deliveries."""
    meta = {"deliveries": received.deliveries, "crashes": received.crashes + 1}
    return _live_copy(received.envelope.with_meta(**meta))


def copy_undelivered(received: ReceivedMessage) -> OutgoingMessage:
    """Copy as if this delivery had not happened. Earlier ones are recorded in it."""
    return _live_copy(_envelope_before(received))


def copy_for_suspects(received: ReceivedMessage) -> OutgoingMessage:
    """Copy for the side queue of suspects, out of this process, where a crash would count against it.

    Further deliveries that the broker counted were crashes before the move, beside other messages. The message was
    not run as a suspect then, so they do not count.
    """
    meta = received.envelope.meta
    counts = {"deliveries": max(meta.deliveries, meta.attempts + SUSPECT), "crashes": SUSPECT}
    return _live_copy(received.envelope.with_meta(**counts))


def copy_for_next_wait(received: ReceivedMessage, rest: int) -> OutgoingMessage:
    """Copy for the next wait queue, with the rest of its delay."""
    return _live_copy(_envelope_before(received), rest)


def _envelope_before(received: ReceivedMessage) -> Envelope:
    """The envelope with the deliveries and crashes before this one."""
    return received.envelope.with_meta(deliveries=received.deliveries - 1, crashes=received.crashes)


def copy_unreadable(queue: str, body: bytes, error: str, now: int) -> OutgoingMessage:
    """Dead letter for a message whose properties cannot be read: its body, without them."""
    return OutgoingMessage(unreadable_envelope(queue, body, error, now), side_queue=dead_name(queue))


def unreadable_envelope(queue: str, body: bytes, error: str, now: int) -> Envelope:
    meta = Metadata(
        queue=queue,
        created_us=now,
        due_us=now,
        deliveries=1,
        failed_us=now,
        reason=UNDECODABLE,
        error=short_error(error),
    )
    return Envelope(new_id(), body, {}, meta)
