"""The message, its claim, receipt and checks: pure values, the same on every transport."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, get_args
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
"""Maximum number of characters in a queue name or key: fits into an index on every database."""
BODY_LIMIT = 1024 * 1024
LARGEST_BODY_LIMIT = 1 << 30
"""Bytes of the largest value that every database takes in one column."""
HEADERS_LIMIT = 64 * 1024
HEADERS_DEPTH = 64
"""Maximum number of objects and arrays in headers that are inside each other."""
SUSPECT = 2
"""Number of crashes from which a message is claimed alone."""
ERROR_LIMIT = 8 * 1024
UNDECODABLE = "undecodable"
"""The header that has stored headers as text if they cannot be decoded."""
"""Maximum number of bytes of an error or a reason, in UTF-8."""

_NO_HEADERS: Mapping[str, Any] = {}
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_MORE = "…".encode()

_UNIQUE = UUID("6d696c6c-706f-5e64-8000-756e69717565")
_new: Any = object.__new__
# The slots themselves, because a UUID refuses changes of its attributes.
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
    """A message to publish. Without an `id` a new one is made. With an `id`, publishing twice is harmless.

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
    unique: Unique | None = None


OnConflict = Literal["keep", "replace", "raise", "postpone"]
While = Literal["waiting", "unfinished"]


class Unique(msgspec.Struct, frozen=True, gc=False):
    """At most one message of a queue with this value, while an earlier one waits, is unfinished, or for a time."""

    value: str
    while_: While | Seconds = "waiting"
    on_conflict: OnConflict = "keep"


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Proof of one claim of one message. Settling and extending need it, and it is stale after the next claim."""

    id: UUID
    token: int
    shard: str | None = None
    """Name of the shard that has the message, in a pond of several databases."""


class Claim(msgspec.Struct, frozen=True, gc=False):
    """A claimed message with its counters and times. Times are the database's."""

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
    unreadable: str | None = None
    """The error of decoding the headers. Such a message must not run."""
    crashes: int = 0
    """Number of deliveries since the last result that ended because their worker died or hung."""

    @property
    def suspect(self) -> bool:
        """True after two crashes; such a message is claimed alone."""
        return self.crashes >= SUSPECT

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
    """Result of one publish: the id, and whether the message is new (False: it was published before)."""

    id: UUID
    new: bool = True
    result: str = "published"
    """Of a unique message: published, kept, replaced, postponed or refused. The id is that of the message there is."""


class DraftUnique(msgspec.Struct, frozen=True, gc=False):
    """A checked `Unique`."""

    id: UUID
    """Made from the queue and the value."""
    unfinished: bool
    window_us: int | None
    on_conflict: OnConflict


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A checked message with its times as numbers, as transports store it."""

    id: UUID
    given: bool
    """True if the caller chose the id. Then a lookup decides whether the message is new."""
    queue: str
    key: str | None
    priority: int
    delay_us: int
    due_us: int | None
    expires_after_us: int | None
    expires_us: int | None
    headers: str | None
    payload: bytes
    unique: DraftUnique | None = None
    point: int | None = None
    """Its point on the ring of a shard map, once that was computed."""

    @property
    def is_plain(self) -> bool:
        """Whether the message is due now and does not expire."""
        return self.due_us is None and not self.delay_us and self.expires_after_us is None and self.expires_us is None


def new_id() -> UUID:
    """A new UUIDv7. Those of one process sort in the order of creation."""
    return _uuid(uuid_utils.uuid7().int)


def id_of(value: bytes) -> UUID:
    """The id with these 16 bytes."""
    return _uuid(int.from_bytes(value, "big"))


def _uuid(value: int) -> UUID:
    """The same as UUID(int=value) in a third of the time. Ids are made and read by the thousand."""
    made: UUID = _new(UUID)
    _set_int(made, value)
    _set_is_safe(made, _UNKNOWN)
    return made


RETRY = "retry"
"""The replay name of a retry: always the same, so a second retry is harmless."""


def replayed_id(original: UUID, replay: str) -> UUID:
    """The id of a message in a replay: the same each time that replay runs."""
    return uuid.uuid5(original, replay)


def replayed_headers(headers: str | None, original: UUID) -> str:
    """Stored headers of a replayed message. Those that cannot be decoded are kept as text."""
    try:
        kept = {**decode_headers(headers)}
    except Exception:
        kept = {UNDECODABLE: headers}
    return msgspec.json.encode({**kept, "replay-of": str(original)}).decode()


def draft(message: Message, *, body_limit: int = BODY_LIMIT) -> Draft:
    """Check a message and convert its times. The error names the wrong field."""
    given_type: type = type(message)
    if not issubclass(given_type, Message):
        raise InvalidMessage(f"publish takes Message values, not {given_type.__name__}")
    check_name(message.queue, "queue")
    if message.key is not None:
        check_text(message.key, "key")
    priority = check_priority(message.priority)
    payload: Any = message.payload  # callers may pass any type
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
        expires = clock.time_us(message.expires, "expires")
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
        clock.time_us(message.due_at, "due_at") if message.due_at is not None else None,
        expires_after,
        expires,
        encode_headers(message.headers),
        payload,
        None if message.unique is None else _draft_unique(message),
    )


def _draft_unique(message: Message) -> DraftUnique:
    unique = message.unique
    if not isinstance(unique, Unique):
        raise InvalidMessage(f"unique must be a text, not {type(unique).__name__}")
    if message.id is not None:
        raise InvalidMessage("give either id or unique, not both: each decides alone whether the message is new")
    value = check_text(unique.value, "unique")
    if unique.on_conflict not in get_args(OnConflict):
        raise InvalidMessage(f"on_conflict must be keep, replace, raise or postpone, not {unique.on_conflict!r}")
    window = None
    if isinstance(unique.while_, str):
        if unique.while_ not in get_args(While):
            raise InvalidMessage(f"while_ must be waiting, unfinished or a duration, not {unique.while_!r}")
    else:
        window = clock.micros(unique.while_, "while_")
    id_ = uuid.uuid5(_UNIQUE, f"{len(message.queue)}:{message.queue}{value}")
    return DraftUnique(id_, unique.while_ == "unfinished", window, unique.on_conflict)


def check_id(value: Any) -> UUID:
    """Return a UUID, also from its text. The error for other texts names `id_from`."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(str(value))
    except ValueError:
        raise InvalidMessage(
            f"the id {str(value)[:80]!r} is not a UUID; make a stable one with millpond.id_from(name or number)"
        ) from None


def check_name(name: Any, what: str) -> str:
    """Return a queue name: 1 to 255 characters that every database can store and distinguish."""
    if not isinstance(name, str):
        raise InvalidQueue(f"{what} must be text, not {type(name).__name__}")
    return _check_name(name, what)


@lru_cache(maxsize=1024)
def _check_name(name: str, what: str) -> str:
    # Cached: there are few names, and each message has one.
    if not name or name != name.strip():
        raise InvalidQueue(f"{what} {name[:80]!r} must not be empty nor begin or end with white space")
    return check_text(name, what)


def check_text(text: Any, what: str) -> str:
    """Return a text of at most 255 characters that every database can store."""
    if not isinstance(text, str):
        raise InvalidQueue(f"{what} must be text, not {type(text).__name__}")
    if len(text) > NAME_LIMIT:
        raise InvalidQueue(f"{what} has {len(text):,} characters, the limit is {NAME_LIMIT}")
    if "\x00" in text:
        raise InvalidQueue(f"{what} {text[:80]!r} contains a NUL character, which databases cannot store")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidQueue(f"{what} {text[:80]!r} contains half of a surrogate pair, which is not text") from None
    return text


def check_priority(value: Any) -> int:
    # The usual case first: each message has one.
    if type(value) is int and 0 <= value <= LOWEST_PRIORITY:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LOWEST_PRIORITY:
        raise InvalidPriority(f"priority must be an integer from 0 (first) to 100 (last), not {value!r}")
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
    try:
        _check_depth(text)
    except msgspec.ValidationError as e:
        raise BodyNotEncodable(str(e)) from None
    return text


def decode_headers(text: str | bytes | None) -> Mapping[str, Any]:
    if not text:
        return _NO_HEADERS
    headers: dict[str, Any] = msgspec.json.decode(text)
    return headers


def decode_untrusted_headers(text: str | bytes) -> dict[str, Any]:
    """Headers that any program may have written. Raises an error if they are no object, or too deep to be passed on."""
    headers = _decode_object(text)
    _check_depth(text)
    return headers


def _check_depth(text: str | bytes) -> None:
    if isinstance(text, bytes):
        text = text.decode()
    if text.count("{") + text.count("[") <= HEADERS_DEPTH:
        return
    level: list[Any] = [msgspec.json.decode(text)]
    for _ in range(HEADERS_DEPTH):
        inner = [value for outer in level for value in (outer.values() if isinstance(outer, dict) else outer)]
        level = [value for value in inner if isinstance(value, dict | list)]
    if level:
        raise msgspec.ValidationError(f"the headers are nested more than {HEADERS_DEPTH} levels deep")


def short_error(error: str | None) -> str | None:
    """An error text for storage: bounded, without characters that databases cannot store."""
    if error is None:
        return None
    if error.isascii() and len(error) <= ERROR_LIMIT and "\x00" not in error:
        return error
    encoded = error.replace("\x00", "�").encode(errors="replace")
    if len(encoded) <= ERROR_LIMIT:
        return encoded.decode()
    return encoded[: ERROR_LIMIT - len(_MORE)].decode(errors="ignore") + _MORE.decode()
