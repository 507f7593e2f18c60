"""Where a message goes from a delivery: the copy that is published before the delivery is acked."""

from __future__ import annotations

from typing import Any

from millpond.message import SETTLED, State, id_from, new_id
from millpond.outcome import SUSPECT, Change
from millpond.transports.rabbitmq.envelope import Envelope, Past
from millpond.transports.rabbitmq.held import Hold
from millpond.transports.rabbitmq.names import dead_name, suspects_name
from millpond.transports.rabbitmq.publisher import Parcel
from millpond.transports.rabbitmq.source import Arrival


def onward(hold: Hold, c: Change, now: int) -> Parcel | None:
    """The copy that an outcome makes; None: there is none, the delivery itself is acked."""
    if c.state is State.COMPLETED or (c.state is State.FAILED and not c.keep):
        return None
    envelope = concluded(hold, c, now)
    if c.state in SETTLED:
        return Parcel(envelope, aside=dead_name(envelope.past.queue))
    return Parcel(envelope, c.delay_us or 0)


def concluded(hold: Hold, c: Change, now: int) -> Envelope:
    """The message as an outcome leaves it."""
    arrival, past = hold.arrival, hold.arrival.envelope.past
    changes: dict[str, Any] = {
        "deliveries": arrival.deliveries + c.deliveries,
        "attempts": past.attempts + c.attempts,
        "error": past.error if c.error is None else c.error,
    }
    if c.attempts:
        changes["first_attempt_us"] = hold.claimed_us if past.first_attempt_us is None else past.first_attempt_us
        changes["last_attempt_us"] = now
    if c.state is State.FAILED:
        changes |= {"failed_us": now, "reason": c.reason}
    if c.delay_us is not None:
        changes["due_us"] = now + c.delay_us
    return arrival.envelope.with_past(**changes)


def is_requeued(c: Change) -> bool:
    """Interrupted: back to its queue, and the delivery counts."""
    return c.state is State.PENDING and c.deliveries == 0


def counted(arrival: Arrival) -> Parcel:
    """Back to a queue that counts nothing by itself."""
    return Parcel(arrival.envelope.with_past(deliveries=arrival.deliveries))


def unworked(arrival: Arrival) -> Parcel:
    """As if it had never been delivered; whatever is known of earlier deliveries is written down."""
    return Parcel(_before(arrival))


def suspected(arrival: Arrival) -> Parcel:
    """Out of our hands until it is claimed alone: a crash now would count against it.

    It was not run as a suspect yet, so that what the broker counted further were crashes beside others, while it
    was on its way here: they do not count.
    """
    past = arrival.envelope.past
    envelope = arrival.envelope.with_past(deliveries=max(past.deliveries, past.attempts + SUSPECT))
    return Parcel(envelope, aside=suspects_name(past.queue))


def waiting(arrival: Arrival) -> Parcel:
    """On to the next wait queue: what is left of a delay longer than the longest of them."""
    return Parcel(_before(arrival), arrival.envelope.past.wait_us)


def _before(arrival: Arrival) -> Envelope:
    """The message with its deliveries up to this one."""
    return arrival.envelope.with_past(deliveries=arrival.deliveries - 1)


def undecodable(queue: str, message_id: str | None, body: bytes, now: int) -> Parcel:
    """A message whose header nobody can read: dead-lettered alone, with its body."""
    past = Past(queue=queue, created_us=now, due_us=now, deliveries=1, failed_us=now, reason="undecodable")
    return Parcel(Envelope(id_from(message_id) if message_id else new_id(), body, {}, past), aside=dead_name(queue))
