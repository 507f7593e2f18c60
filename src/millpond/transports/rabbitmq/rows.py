"""A message of the broker as an operator sees it."""

from __future__ import annotations

from millpond.message import State
from millpond.transport import Row
from millpond.transports.rabbitmq.envelope import Envelope


def row_of(envelope: Envelope, state: State, *, acquired_us: int | None = None) -> Row:
    """A settled one, with what its envelope tells. When it was archived, a database decides that keeps it."""
    past = envelope.past
    return Row(
        id=envelope.id,
        queue=past.queue,
        key=past.key,
        priority=past.priority,
        state=state,
        headers=envelope.headers(),
        payload=envelope.payload,
        deliveries=past.deliveries,
        attempts=past.attempts,
        due_us=past.due_us,
        created_us=past.created_us,
        expires_us=past.expires_us,
        first_attempt_us=past.first_attempt_us,
        last_attempt_us=past.last_attempt_us,
        acquired_us=acquired_us,
        archived_us=past.failed_us or past.created_us,
        reason=past.reason,
        error=past.error,
    )
