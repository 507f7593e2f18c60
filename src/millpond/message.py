"""The message and what surrounds it: pure values, the same on every transport."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any
from uuid import UUID, SafeUUID

import msgspec
import uuid_utils

from millpond import clock
from millpond.clock import Seconds
from millpond.errors import (
    BodyNotEncodable,
    BodyTooLarge,
    InvalidMessage,
    InvalidPriority,
    InvalidQueue,
    InvalidTime,
)

DEFAULT_PRIORITY = 50
LOWEST_PRIORITY = 100
NAME_LIMIT = 255
"""Characters in a queue name or key: what fits into an index on every database."""
BODY_LIMIT = 1024 * 1024
HEADERS_LIMIT = 64 * 1024
ERROR_LIMIT = 8 * 1024

_NAMESPACE = UUID("6d696c6c-706f-5e64-8000-000000000000")
_NO_HEADERS: Mapping[str, Any] = {}

_new: Any = object.__new__
# The slots themselves: a UUID refuses to be changed by its attributes.
_set_int = vars(UUID)["int"].__set__
_set_is_safe = vars(UUID)["is_safe"].__set__
_UNKNOWN = SafeUUID.unknown


class State(StrEnum):
    PENDING = "PENDING"
    PROCESSING = "PROCESSING"
    RETRYABLE = "RETRYABLE"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


LIVE = (State.PENDING, State.PROCESSING, State.RETRYABLE)
SETTLED = (State.COMPLETED, State.FAILED)


class Message(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a publisher hands over. Without an `id` one is made; with one, publishing twice is harmless.

    >>> Message(queue="orders", payload=b"{}", priority=10).queue
    'orders'
    """

    queue: str
    payload: bytes
    id: UUID | None = None
    key: str | None = None
    priority: int = DEFAULT_PRIORITY
    delay: Seconds | None = None
    due_at: datetime | None = None
    expires: Seconds | datetime | None = None
    headers: Mapping[str, Any] = _NO_HEADERS


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The token of one claim of one message. Settling and extending need it; it is of no use to others."""

    id: UUID
    token: int


class Claim(msgspec.Struct, frozen=True, gc=False):
    """A message in our hands for a while, with what is known of its past. Times are the database's."""

    message: Message
    receipt: Receipt
    deliveries: int
    attempts: int
    created_us: int
    due_us: int
    claimed_us: int
    lease_us: int
    first_attempt_us: int | None = None
    expires_us: int | None = None

    @property
    def unfinished(self) -> int:
        """Earlier deliveries that came to no result: crashes."""
        return self.deliveries - 1 - self.attempts

    @property
    def redelivered(self) -> bool:
        return self.deliveries > 1

    @property
    def created_at(self) -> datetime:
        return clock.as_datetime(self.created_us)

    @property
    def due_at(self) -> datetime:
        return clock.as_datetime(self.due_us)

    @property
    def claimed_at(self) -> datetime:
        return clock.as_datetime(self.claimed_us)

    @property
    def leased_until(self) -> datetime:
        return clock.as_datetime(self.lease_us)


class Published(msgspec.Struct, frozen=True, gc=False):
    """What came of one publish: the id, and whether the message is new (False: it was here before)."""

    id: UUID
    new: bool = True


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A message that was checked, with its times as numbers: what transports store."""

    id: UUID
    given: bool
    """The caller chose the id, so that it must be looked up before it counts as new."""
    queue: str
    key: str | None
    priority: int
    delay_us: int
    due_us: int | None
    expires_after_us: int | None
    expires_us: int | None
    headers: str | None
    payload: bytes


def new_id() -> UUID:
    """A UUIDv7; those of one process sort in the order they were made."""
    return _uuid(uuid_utils.uuid7().int)


def id_of(value: bytes) -> UUID:
    """The id whose 16 bytes these are."""
    return _uuid(int.from_bytes(value, "big"))


def _uuid(value: int) -> UUID:
    """What UUID(int=value) is, in a third of the time: ids are made and read by the thousand."""
    made: UUID = _new(UUID)
    _set_int(made, value)
    _set_is_safe(made, _UNKNOWN)
    return made


def id_from(text: str) -> UUID:
    """A stable id for a name of the caller's own, such as an order number.

    >>> id_from("order-7") == id_from("order-7")
    True
    """
    return uuid.uuid5(_NAMESPACE, text)


def replayed_id(original: UUID, replay: str) -> UUID:
    """The id that a message gets in a replay: the same however often that replay is run."""
    return uuid.uuid5(original, replay)


def replayed_headers(headers: str | None, original: UUID) -> str:
    """The headers, as they are stored, of a message that is replayed."""
    return msgspec.json.encode({**decode_headers(headers), "replay-of": str(original)}).decode()


def draft(message: Message, *, body_limit: int = BODY_LIMIT) -> Draft:
    """Check a message, or say exactly what is wrong with it."""
    given_type: type = type(message)
    if not issubclass(given_type, Message):
        raise InvalidMessage(f"publish takes Message values, not {given_type.__name__}")
    check_name(message.queue, "queue")
    if message.key is not None:
        check_text(message.key, "key")
    priority = check_priority(message.priority)
    payload: Any = message.payload  # nothing checks what callers put there
    if not isinstance(payload, bytes):
        if not isinstance(payload, bytearray | memoryview):
            raise BodyNotEncodable(
                f"Message.payload must be bytes, not {type(payload).__name__}; "
                "pond.publish() encodes text and JSON for you"
            )
        payload = bytes(payload)
    if len(payload) > body_limit:
        raise BodyTooLarge(
            f"the body for queue {message.queue!r} has {len(payload):,} bytes, the limit is {body_limit:,}; "
            "store large data elsewhere and send a reference, or raise the option body_limit"
        )
    if message.delay is not None and message.due_at is not None:
        raise InvalidTime("give either delay or due_at, not both")
    expires_after = expires = None
    if isinstance(message.expires, datetime):
        expires = clock.moment(message.expires, "expires")
    elif message.expires is not None:
        expires_after = clock.micros(message.expires, "expires")
    given = message.id is not None
    return Draft(
        check_id(message.id) if message.id is not None else new_id(),
        given,
        message.queue,
        message.key,
        priority,
        clock.micros(message.delay, "delay") if message.delay is not None else 0,
        clock.moment(message.due_at, "due_at") if message.due_at is not None else None,
        expires_after,
        expires,
        encode_headers(message.headers),
        payload,
    )


def check_id(value: Any) -> UUID:
    """A UUID, or its text; other texts are refused with the way to make one of them."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(str(value))
    except ValueError:
        raise InvalidMessage(
            f"the id {str(value)[:80]!r} is not a UUID; make a stable one with millpond.id_from(text)"
        ) from None


def check_name(name: Any, what: str) -> str:
    """A queue name: any text of 1..255 characters that every database can keep and tell apart."""
    if not isinstance(name, str):
        raise InvalidQueue(f"{what} must be text, not {type(name).__name__}")
    return _check_name(name, what)


@lru_cache(maxsize=1024)
def _check_name(name: str, what: str) -> str:
    # Remembered: there are few names, and each comes with every message.
    if not name or name != name.strip():
        raise InvalidQueue(f"{what} {name[:80]!r} must not be empty nor begin or end with white space")
    return check_text(name, what)


def check_text(text: Any, what: str) -> str:
    """Any text of at most 255 characters that every database can keep."""
    if not isinstance(text, str):
        raise InvalidQueue(f"{what} must be text, not {type(text).__name__}")
    if len(text) > NAME_LIMIT:
        raise InvalidQueue(f"{what} has {len(text):,} characters, the limit is {NAME_LIMIT}")
    if "\x00" in text:
        raise InvalidQueue(f"{what} {text[:80]!r} holds a NUL character, which databases cannot keep")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidQueue(f"{what} {text[:80]!r} holds half of a surrogate pair, which is not text") from None
    return text


def check_priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LOWEST_PRIORITY:
        raise InvalidPriority(f"priority must be a whole number from 0 (first) to 100 (last), not {value!r}")
    return value


def encode_headers(headers: Mapping[str, Any]) -> str | None:
    if not headers:
        return None
    if not all(isinstance(name, str) for name in headers):
        raise InvalidMessage("header names must be text")
    try:
        text = msgspec.json.encode(dict(headers)).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise BodyNotEncodable(f"headers must be JSON: {e}") from None
    if len(text) > HEADERS_LIMIT:
        raise BodyTooLarge(f"the headers have {len(text):,} characters, the limit is {HEADERS_LIMIT:,}")
    return text


def decode_headers(text: str | bytes | None) -> Mapping[str, Any]:
    if not text:
        return _NO_HEADERS
    headers: dict[str, Any] = msgspec.json.decode(text)
    return headers


def short_error(error: str | None) -> str | None:
    """An error text as it is kept: bounded, and without what a database cannot store."""
    if error is None:
        return None
    if error.isascii() and len(error) <= ERROR_LIMIT and "\x00" not in error:
        return error
    error = error.replace("\x00", "�").encode(errors="replace").decode()
    return error if len(error) <= ERROR_LIMIT else error[: ERROR_LIMIT - 1] + "…"
