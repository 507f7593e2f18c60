"""A message as it travels: AMQP properties, native headers, and one header with what Millpond knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import msgspec

from millpond.message import DEFAULT_PRIORITY, Draft, decode_headers, id_from, new_id

HEADER = "millpond"
_BROKERS = ("x-death", "x-first-death-", "x-delivery-count", "x-last-death-", "x-acquired-count", "millpond-wait")
_NAME_LIMIT = 100
_TEXT_LIMIT = 4096
_INT_LIMIT = 2**31


class Past(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """What is known of a message beside its AMQP properties; travels as JSON text in one header."""

    queue: str = ""
    key: str | None = None
    priority: int = DEFAULT_PRIORITY
    created_us: int = 0
    due_us: int = 0
    expires_us: int | None = None
    deliveries: int = 0
    """Before this stay in a queue; the broker counts those during it."""
    attempts: int = 0
    first_attempt_us: int | None = None
    last_attempt_us: int | None = None
    wait_us: int = 0
    """Still to wait when it comes from a wait queue: delays longer than the longest of them."""
    headers: str | None = None
    """Those of the publisher's headers that AMQP cannot hold as they are, as JSON."""
    failed_us: int | None = None
    reason: str | None = None
    error: str | None = None


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """What is sent, and what arrived."""

    id: UUID
    payload: bytes
    native: Mapping[str, Any]
    past: Past

    def headers(self) -> Mapping[str, Any]:
        return {**self.native, **decode_headers(self.past.headers)}

    def table(self) -> dict[str, Any]:
        """The AMQP headers."""
        return {**self.native, HEADER: msgspec.json.encode(self.past).decode()}

    def with_past(self, **changes: Any) -> Envelope:
        return Envelope(self.id, self.payload, self.native, msgspec.structs.replace(self.past, **changes))


def enveloped(draft: Draft, now: int) -> Envelope:
    """A message at the beginning of its way."""
    native: dict[str, Any] = {}
    rest: str | None = None
    if draft.headers is not None:
        native, others = _split(decode_headers(draft.headers))
        rest = msgspec.json.encode(others).decode() if others else None
    past = Past(
        queue=draft.queue,
        key=draft.key,
        priority=draft.priority,
        created_us=now,
        due_us=now + draft.delay_us if draft.due_us is None else draft.due_us,
        expires_us=draft.expires_us if draft.expires_after_us is None else now + draft.expires_after_us,
        headers=rest,
    )
    return Envelope(draft.id, draft.payload, native, past)


def opened(message_id: str | None, table: Mapping[str, Any] | None, payload: bytes, queue: str, now: int) -> Envelope:
    """A message that arrived, also from a publisher that knows nothing of Millpond."""
    table = table or {}
    text = table.get(HEADER)
    alone = text is not None and len(table) == 1  # as most are
    native = {} if alone else {k: v for k, v in table.items() if k != HEADER and not k.startswith(_BROKERS)}
    if text is None:
        return Envelope(_id(message_id), payload, native, Past(queue=queue, created_us=now, due_us=now))
    past = _PAST.decode(text)
    if past.queue != queue:  # somebody has moved it, by a shovel or by hand
        past = msgspec.structs.replace(past, queue=queue)
    return Envelope(_id(message_id), payload, native, past)


def deliveries(past: Past, table: Mapping[str, Any] | None, redelivered: bool) -> int:
    """This one included. A classic queue only tells that there was one before."""
    counted = table.get("x-delivery-count", 0) if table else 0
    return past.deliveries + 1 + max(int(counted), int(redelivered))


_PAST = msgspec.json.Decoder(Past)


def _id(message_id: str | None) -> UUID:
    if not message_id:
        return new_id()
    try:
        return UUID(message_id)
    except ValueError:
        return id_from(message_id)


def _split(headers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what AMQP holds exactly as it is, what it does not)"""
    native = {name: value for name, value in headers.items() if _fits(name, value)}
    return native, {name: value for name, value in headers.items() if name not in native}


def _fits(name: str, value: Any) -> bool:
    if len(name) > _NAME_LIMIT or not name.isascii() or not name or name == HEADER or name.startswith("x-"):
        return False
    if isinstance(value, str):
        return len(value) <= _TEXT_LIMIT and "\x00" not in value
    return isinstance(value, bool) or (isinstance(value, int) and -_INT_LIMIT < value < _INT_LIMIT)
