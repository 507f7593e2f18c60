"""A message on its way through the broker: AMQP properties, native headers, and one header with Millpond's metadata.

A new metadata field has to be added to `Metadata` and to the functions below that name all fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

import msgspec

from millpond.clock import SECOND
from millpond.ids import id_from
from millpond.message import (
    DEFAULT_PRIORITY,
    ERROR_LIMIT,
    LOWEST_PRIORITY,
    Claim,
    Draft,
    Message,
    Receipt,
    State,
    check_name,
    check_text,
    decode_headers,
    decode_untrusted_headers,
    new_id,
    replayed_id,
)
from millpond.seam.operations import Row
from millpond.transports.rabbitmq.frames import Delivered
from millpond.transports.rabbitmq.properties import Properties, Undecodable, encode, readable

HEADER = "millpond"
_BROKERS = ("x-death", "x-first-death-", "x-delivery-count", "x-last-death-", "x-acquired-count", "millpond-wait")
_ROUTING = ("CC", "BCC")
"""The broker sends a message to the queues that these headers name, with the rights of its publisher."""
_UNSENT = ("expiration", "user_id", "cluster_id")
"""Properties that the broker acts on or checks. A copy carries them as headers."""
_DIRECT_REPLY = "amq.rabbitmq.reply-to"
_NAME_LIMIT = 100
_TEXT_LIMIT = 4096
_INT_LIMIT = 2**31
_NEGLIGIBLE = SECOND // 50
_NONE: Mapping[str, Any] = {}


LARGEST_COUNT = 2**30 - 1
"""Sums of two counters fit into the integers of every database."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
Micros = Annotated[int, msgspec.Meta(ge=0, lt=253_402_300_800 * SECOND)]
"""Microseconds since 1970, before the end of the year 9999, the last year of a datetime."""
Text = Annotated[str, msgspec.Meta(max_length=ERROR_LIMIT)]


class Metadata(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """Fields of a message without an AMQP property. They travel as JSON text in one header."""

    queue: str = ""
    key: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=LOWEST_PRIORITY)] = DEFAULT_PRIORITY
    created_us: Micros = 0
    due_us: Micros = 0
    expires_us: Micros | None = None
    deliveries: Count = 0
    """Deliveries before this stay in a queue. The broker counts those during it."""
    attempts: Count = 0
    crashes: Count = 0
    """Crashes before this stay in a queue, since the last result."""
    first_attempt_us: Micros | None = None
    last_attempt_us: Micros | None = None
    wait_us: Micros = 0
    """Rest of a delay after the wait queue that the message is in. Less if it arrives later than planned."""
    headers: str | None = None
    """JSON of the publisher's headers that AMQP cannot hold unchanged."""
    failed_us: Micros | None = None
    reason: Text | None = None
    error: Text | None = None


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """A message as it is sent and received."""

    id: UUID
    payload: bytes
    native: Mapping[str, Any]
    meta: Metadata
    properties: Mapping[str, Any] = _NONE
    """Other AMQP properties, of other publishers; `message_id` if it is not the id itself."""

    def headers(self) -> Mapping[str, Any]:
        """The publisher's headers, and its AMQP properties by names that begin with `amqp-`."""
        native = {name: readable(value) for name, value in self.native.items()}
        if self.properties:
            shown = {_as_header(name): value for name, value in self.properties.items() if name != "message_id"}
            native = shown | native
        return {**native, **decode_headers(self.meta.headers)}

    def encode_properties(self, further: Mapping[str, Any] = _NONE) -> bytes:
        """The AMQP properties as bytes."""
        headers = {**self.native, **further, HEADER: msgspec.json.encode(self.meta)}
        if not self.properties:
            return encode(str(self.id), headers, _NONE)
        others = dict(self.properties)
        message_id = others.pop("message_id", None) or str(self.id)
        return encode(message_id, headers, others)

    @property
    def message_id(self) -> str:
        """The AMQP property."""
        return str(self.properties.get("message_id") or self.id) if self.properties else str(self.id)

    def rest_of_delay(self, now: int) -> int:
        """Microseconds left to wait. Never more than was planned, even if the publisher's clock is ahead."""
        rest = min(self.meta.wait_us, self.meta.due_us - now) if self.meta.wait_us else 0
        return rest if rest > _NEGLIGIBLE else 0

    def with_meta(self, **changes: Any) -> Envelope:
        for name in changes.keys() & _COUNTS:
            changes[name] = min(changes[name], LARGEST_COUNT)
        meta = msgspec.structs.replace(self.meta, **changes)
        return Envelope(self.id, self.payload, self.native, meta, self.properties)


def new_envelope(draft: Draft, now: int) -> Envelope:
    """Envelope of a message that is published for the first time."""
    native: dict[str, Any] = {}
    rest: str | None = None
    if draft.headers is not None:
        native, others = _split_headers(decode_headers(draft.headers))
        rest = msgspec.json.encode(others).decode() if others else None
    meta = Metadata(
        queue=draft.queue,
        key=draft.key,
        priority=draft.priority,
        created_us=now,
        due_us=now + draft.delay_us if draft.due_us is None else draft.due_us,
        expires_us=draft.expires_us if draft.expires_after_us is None else now + draft.expires_after_us,
        headers=rest,
    )
    return Envelope(draft.id, draft.payload, native, meta)


def replay_envelope(envelope: Envelope, name: str, queue: str, now: int) -> Envelope:
    """Envelope of a dead letter that is published again, with new counters and no expiry."""
    headers = {**envelope.native, "replay-of": str(envelope.id)}
    old = envelope.meta
    meta = Metadata(queue=queue, key=old.key, priority=old.priority, created_us=now, due_us=now, headers=old.headers)
    properties = {name: value for name, value in envelope.properties.items() if name != "message_id"}
    return Envelope(replayed_id(envelope.id, name), envelope.payload, headers, meta, properties)


def open_envelope(properties: Properties, body: bytes, queue: str, now: int, *, keep_queue: bool = False) -> Envelope:
    """Envelope of a received message, also of one whose publisher does not use Millpond. Raises `Undecodable`.

    `keep_queue`: it is a message of the queue that it names itself, if it names one.
    """
    table = properties.headers
    text = table.pop(HEADER, None)
    if text is None:
        meta = Metadata(queue=queue, created_us=now, due_us=now)
    else:
        meta = _checked_metadata(text)
        if keep_queue and meta.queue:
            check_name(meta.queue, "queue")
        elif meta.queue != queue:  # a shovel or a person has moved it
            meta = msgspec.structs.replace(meta, queue=queue)
    if not table and not properties.others:  # the usual case
        return _with_id(properties.message_id, body, table, meta, {})
    native = {name: value for name, value in table.items() if not name.startswith(_BROKERS)}
    for name in _UNSENT:
        if name in properties.others:
            native.setdefault(_as_header(name), properties.others.pop(name))
    reply_to = properties.others.get("reply_to")
    if reply_to is not None and reply_to.startswith(_DIRECT_REPLY):  # refused on other channels than its own
        native.setdefault(_as_header("reply_to"), properties.others.pop("reply_to"))
    kept = {name: readable(value) for name, value in native.items() if _is_reserved(name)}
    if kept:
        native = {name: value for name, value in native.items() if name not in kept}
        headers = msgspec.json.encode({**kept, **decode_headers(meta.headers)}).decode()
        meta = msgspec.structs.replace(meta, headers=headers)
    return _with_id(properties.message_id, body, native, meta, properties.others)


def _with_id(
    message_id: str | None, body: bytes, native: Mapping[str, Any], meta: Metadata, others: dict[str, Any]
) -> Envelope:
    if not message_id:
        return Envelope(new_id(), body, native, meta, others)
    try:
        id_ = UUID(message_id)
    except ValueError:
        id_ = id_from(message_id)
    if len(message_id) != _UUID_LENGTH or str(id_) != message_id:
        others = {**others, "message_id": message_id}
    return Envelope(id_, body, native, meta, others)


def _checked_metadata(text: Any) -> Metadata:
    """Metadata whose every field a database could hold. Any publisher can write this header."""
    if not isinstance(text, str):
        raise Undecodable(f"the header {HEADER} is not text")
    try:
        meta = _METADATA.decode(text)
        if meta.key is not None:
            check_text(meta.key, "key")
        if meta.headers is not None:
            decode_untrusted_headers(meta.headers)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise Undecodable(f"the header {HEADER} is invalid: {e}") from None
    for name in ("error", "reason"):
        value = getattr(meta, name)
        if value is not None and "\x00" in value:
            raise Undecodable(f"{name} in the header {HEADER} contains a NUL character")
    return meta


def count_deliveries(message: Delivered, table: Mapping[str, Any], meta: Metadata, counters: Sequence[str]) -> int:
    """Number of deliveries with this one. A classic queue only reports whether there was one before.

    The broker sets its counters, headers of these names, on redeliveries only. Before they are the publisher's.
    """
    if not message.redelivered:
        return min(meta.deliveries + 1, LARGEST_COUNT)
    counted = [n for name in counters if type(n := readable(table.get(name))) is int]
    return min(meta.deliveries + 1 + max(1, *counted, 1), LARGEST_COUNT)


def make_claim(
    envelope: Envelope, receipt: Receipt, queue: str, deliveries: int, crashes: int, now: int, lease: int
) -> Claim:
    meta = envelope.meta
    message = Message(
        queue=queue,
        payload=envelope.payload,
        id=envelope.id,
        key=meta.key,
        priority=meta.priority,
        headers=envelope.headers(),
    )
    return Claim(
        message,
        receipt,
        deliveries,
        meta.attempts,
        meta.created_us,
        meta.due_us,
        now,
        now + lease,
        meta.first_attempt_us,
        meta.expires_us,
        crashes=crashes,
    )


def settled_row(envelope: Envelope, state: State, *, acquired_us: int | None = None) -> Row:
    """A settled message as an operator sees it. A database that archives it sets its own `archived_us`."""
    meta = envelope.meta
    return Row(
        id=envelope.id,
        queue=meta.queue,
        key=meta.key,
        priority=meta.priority,
        state=state,
        headers=envelope.headers(),
        payload=envelope.payload,
        deliveries=meta.deliveries,
        attempts=meta.attempts,
        due_us=meta.due_us,
        created_us=meta.created_us,
        expires_us=meta.expires_us,
        first_attempt_us=meta.first_attempt_us,
        last_attempt_us=meta.last_attempt_us,
        acquired_us=acquired_us,
        archived_us=meta.failed_us or meta.created_us,
        reason=meta.reason,
        error=meta.error,
    )


_METADATA = msgspec.json.Decoder(Metadata)
_COUNTS = {"deliveries", "attempts", "crashes"}
_UUID_LENGTH = 36


def _as_header(name: str) -> str:
    """Name of a header that shows an AMQP property."""
    return "amqp-" + name.replace("_", "-")


def _split_headers(headers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(headers that AMQP holds unchanged, the others)"""
    native = {name: value for name, value in headers.items() if _fits_amqp(name, value)}
    return native, {name: value for name, value in headers.items() if name not in native}


def _is_reserved(name: str) -> bool:
    """True for names with a meaning for the broker or for us. They travel in our own header."""
    return name.startswith(("x-", HEADER)) or name.upper() in _ROUTING


def _fits_amqp(name: str, value: Any) -> bool:
    if len(name) > _NAME_LIMIT or not name.isascii() or not name or _is_reserved(name):
        return False
    if isinstance(value, str):
        return len(value) <= _TEXT_LIMIT and "\x00" not in value
    return isinstance(value, bool) or (isinstance(value, int) and -_INT_LIMIT < value < _INT_LIMIT)
