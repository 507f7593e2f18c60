"""Ids that callers get from a publish, and ids that they make from their own names and numbers."""

from __future__ import annotations

import uuid
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID, SafeUUID

from millpond.errors import InvalidMessage

_NAMESPACE = UUID("6d696c6c-706f-5e64-8000-000000000000")


class PublishedId(UUID):
    """The id of a message that was published. Equal to the plain UUID.

    >>> published_id(UUID(int=7), False) == UUID(int=7)
    True
    """

    __slots__ = ("_result", "new")
    new: bool
    """False: a message with this id was published before, and the body of this call was dropped."""

    @property
    def result(self) -> str:
        """published, or, of a message that was there before: kept, replaced or postponed."""
        return "published" if self.new else getattr(self, "_result", "kept")

    def __reduce__(self) -> tuple[Any, ...]:
        return published_id, (UUID(int=self.int), self.new, self.result)


_new: Any = object.__new__
# The slots themselves, because a UUID refuses changes of its attributes.
_set_int = vars(UUID)["int"].__set__
_set_is_safe = vars(UUID)["is_safe"].__set__
_UNKNOWN = SafeUUID.unknown  # finding a member of an enum by name is slow
_set_new = vars(PublishedId)["new"].__set__
_set_result = vars(PublishedId)["_result"].__set__


def published_id(id_: UUID, new: bool, result: str = "kept") -> PublishedId:
    made: PublishedId = _new(PublishedId)
    _set_int(made, id_.int)
    _set_is_safe(made, _UNKNOWN)
    _set_new(made, new)
    if not new:
        _set_result(made, result)
    return made


def id_from(*parts: str | int | bytes | UUID | date) -> UUID:
    """A stable id for a name, a number or several of them, such as an order number. A UUID alone is itself.

    Values of different types are different: 7 is not "7". Datetimes need a time zone.

    >>> id_from("order-7") == id_from("order-7")
    True
    >>> id_from("invoice", 7) == id_from("invoice", "7")
    False
    """
    if not parts:
        raise InvalidMessage("id_from needs a name or a number")
    if len(parts) == 1 and isinstance(parts[0], UUID):
        return parts[0]
    text = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else "\0" + "".join(map(_encoded, parts))
    try:
        return uuid.uuid5(_NAMESPACE, text)
    except UnicodeEncodeError:
        raise InvalidMessage(f"id_from got half of a surrogate pair, which is not text: {text[:80]!r}") from None


def _encoded(part: Any) -> str:
    """Kind, length and text: no two lists of parts have the same encoding."""
    match part:
        case str():
            kind, text = "t", str(part)
        case int() if not isinstance(part, bool):
            kind, text = "i", str(int(part))
        case bytes():
            kind, text = "b", part.hex()
        case UUID():
            kind, text = "u", str(part)
        case datetime() if part.tzinfo is not None:
            kind, text = "m", part.astimezone(UTC).isoformat()
        case date() if not isinstance(part, datetime):
            kind, text = "d", part.isoformat()
        case _:
            raise InvalidMessage(
                "id_from takes text, integers, bytes, UUIDs, dates and datetimes with a time zone, not "
                f"{part!r:.80}; give it as text"
            )
    return f"{kind}{len(text)}:{text}"
