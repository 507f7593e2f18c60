"""Options of a publish, and publish middleware: functions around each publish of a pond.

A publish middleware is a generator with one `yield`: it yields the headers to add. The `yield` returns the error of the
publish, or None.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Generic, Literal, TypedDict, TypeVar
from uuid import UUID

import msgspec

from millpond.checks import known_options, unknown_option
from millpond.clock import Seconds
from millpond.codec import CONTENT_TYPE, encode
from millpond.errors import InvalidMessage, InvalidOption, MillpondError
from millpond.message import DEFAULT_PRIORITY, Message, OnConflict, Unique, While

log = logging.getLogger("millpond")

Headers = Mapping[str, Any] | None
PublishMiddleware = Callable[["Publication"], Generator[Headers, BaseException | None, None]]


B = TypeVar("B")


class PublishManyOptions(TypedDict, total=False):
    """Options of `publish_many` and `publish_many_sync`, for all bodies."""

    ids: Sequence[UUID] | None
    """An id for each body, in their order."""
    key: str | None
    """Groups messages, such as by customer; over shards it decides where they are."""
    priority: int
    """0 to 100, lower is first; default 50."""
    delay: Seconds | None
    """Time until it is due."""
    due_at: datetime | None
    """The time at which it is due, with a time zone; not together with `delay`."""
    expires: Seconds | datetime | None
    """Time after which it is not run any more: from the publish, or with a time zone."""
    headers: Mapping[str, Any] | None
    """Texts with JSON values."""
    within: Any
    """Your connection or session: the messages are published when your transaction commits."""


class PublishOptions(TypedDict, total=False):
    """Options of `publish` and `publish_sync`."""

    id: UUID | None
    """Publish with an id that was published before: the body is dropped."""
    key: str | None
    """Groups messages, such as by customer; over shards it decides where they are."""
    priority: int
    """0 to 100, lower is first; default 50."""
    delay: Seconds | None
    """Time until it is due."""
    due_at: datetime | None
    """The time at which it is due, with a time zone; not together with `delay`."""
    expires: Seconds | datetime | None
    """Time after which it is not run any more: from the publish, or with a time zone."""
    headers: Mapping[str, Any] | None
    """Texts with JSON values."""
    unique: str | None
    """At most one message of the queue has this value."""
    while_: While | Seconds
    """How long a unique value is taken; default `waiting`."""
    on_conflict: OnConflict
    """Effect if a unique value is taken; default `keep`."""
    within: Any
    """Your connection or session: the message is published when your transaction commits."""


_OPTIONS = tuple(PublishOptions.__annotations__)
_MANY_OPTIONS = tuple(PublishManyOptions.__annotations__)


class Publish(msgspec.Struct, Generic[B], frozen=True):
    """A body for `publish_many` with options of its own; those it does not set are the call's.

    >>> Publish({"sku": 7}, key="customer-7", delay=5).options()
    {'key': 'customer-7', 'delay': 5}
    """

    body: B
    id: UUID | msgspec.UnsetType | None = msgspec.UNSET
    key: str | msgspec.UnsetType | None = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    delay: Seconds | msgspec.UnsetType | None = msgspec.UNSET
    due_at: datetime | msgspec.UnsetType | None = msgspec.UNSET
    expires: Seconds | datetime | msgspec.UnsetType | None = msgspec.UNSET
    headers: Mapping[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    unique: str | msgspec.UnsetType | None = msgspec.UNSET
    while_: While | Seconds | msgspec.UnsetType = msgspec.UNSET
    on_conflict: Literal["keep", "replace", "postpone"] | msgspec.UnsetType = msgspec.UNSET
    """Not `raise`: the other messages of the call are stored. `result` of each returned id has the effect."""

    def options(self) -> dict[str, Any]:
        """The options that were set."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "body"}
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}


def message_of(
    queue: str,
    body: Any,
    *,
    id: UUID | None = None,
    key: str | None = None,
    priority: int = DEFAULT_PRIORITY,
    delay: Seconds | None = None,
    due_at: datetime | None = None,
    expires: Seconds | datetime | None = None,
    headers: Mapping[str, Any] | None = None,
    unique: str | None = None,
    while_: While | Seconds = "waiting",
    on_conflict: OnConflict = "keep",
) -> Message:
    """Encode a body."""
    if unique is None and (while_ != "waiting" or on_conflict != "keep"):
        raise InvalidMessage("while_ and on_conflict are rules of unique messages; give unique, too")
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers must be a mapping of names to JSON values, not {type(headers).__name__}")
    payload, content_type = encode(body)
    headers = headers or {}
    if content_type is not None and CONTENT_TYPE not in headers:
        headers = {CONTENT_TYPE: content_type, **headers}
    return Message(
        queue=queue,
        payload=payload,
        id=id,
        key=key,
        priority=priority,
        delay=delay,
        due_at=due_at,
        expires=expires,
        headers=headers,
        unique=None if unique is None else Unique(unique, while_, on_conflict),
    )


def one_message(queue: str, body: Any, options: PublishOptions) -> tuple[list[Message], Any]:
    """The message of `publish` in a list, and `within`."""
    own: dict[str, Any] = {**options}
    known_options(own, _OPTIONS, "publish has no option")
    within = own.pop("within", None)
    return [message_of(queue, body, **own)], within


def many_messages(queue: str, bodies: Iterable[Any], options: PublishManyOptions) -> tuple[list[Message], Any]:
    """The messages of `publish_many`, and `within`. A `Publish` has options of its own.

    Its own time replaces both times of the call.
    """
    common: dict[str, Any] = {**options}
    for name in common:
        if name not in _MANY_OPTIONS:
            text = unknown_option(name, _MANY_OPTIONS, "publish_many has no option")
            raise InvalidOption(f"{text}; Publish(body, …) has the options of one body" if name in _OPTIONS else text)
    within, ids, bodies = common.pop("within", None), common.pop("ids", None), list(bodies)
    if ids is not None and len(ids) != len(bodies):
        raise InvalidMessage(f"there are {len(bodies)} bodies and {len(ids)} ids; give one id for each, or none")
    each = ids if ids is not None else [None] * len(bodies)
    return [_one_of_many(queue, body, id_, common) for body, id_ in zip(bodies, each, strict=True)], within


def _one_of_many(queue: str, body: Any, id_: UUID | None, common: dict[str, Any]) -> Message:
    if not isinstance(body, Publish):
        return message_of(queue, body, id=id_, **common)
    own = body.options()
    if own.get("on_conflict") == "raise":
        raise InvalidMessage('on_conflict="raise" is for publish; with publish_many read `result` of each returned id')
    if not own.keys().isdisjoint(("delay", "due_at")):
        common = {**common, "delay": None, "due_at": None}
    return message_of(queue, body.body, **{"id": id_, **common, **own})


class Publication(msgspec.Struct):
    """One call of `publish`, `publish_many` or their synchronous forms."""

    messages: Sequence[Message]
    transactional: bool
    """The call is in the caller's transaction, which may still be rolled back."""
    ids: Sequence[UUID] = ()
    """The ids, after the messages were stored."""

    @property
    def queue(self) -> str:
        return self.messages[0].queue

    @property
    def count(self) -> int:
        return len(self.messages)


def check_publish_middleware(function: Any) -> None:
    if not inspect.isgeneratorfunction(function):
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise InvalidOption(f"{name} is no generator: a publish middleware yields the headers to add, or None")


@contextmanager
def around(
    middleware: Sequence[PublishMiddleware], messages: Sequence[Message], transactional: bool
) -> Iterator[Publication]:
    """Add the headers of all middleware to the messages; headers of the caller win. Errors of tear-downs are logged."""
    publication = Publication(messages, transactional)
    entered: list[Generator[Headers, BaseException | None, None]] = []
    error: BaseException | None = None
    interruption: BaseException | None = None
    try:
        for function in middleware if messages else ():
            made = function(publication)
            try:
                headers = next(made)
            except StopIteration:
                text = f"the publish middleware {_name(made)} ended without a yield; nothing was published"
                raise MillpondError(text) from None
            entered.append(made)
            if headers:
                publication.messages = _with_headers(publication.messages, headers)
        yield publication
    except BaseException as e:
        error = e
        raise
    finally:
        for made in reversed(entered):
            try:
                _end(made, error)
            except BaseException as e:  # such as a KeyboardInterrupt: the others end too
                interruption, error = interruption or e, e
        if interruption is not None:
            raise interruption


def _with_headers(messages: Sequence[Message], headers: Any) -> list[Message]:
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"a publish middleware must yield a mapping of headers, not {type(headers).__name__}")
    replace = msgspec.structs.replace
    return [replace(message, headers={**headers, **message.headers}) for message in messages]


def _name(made: Any) -> str:
    return str(getattr(made, "__qualname__", made))


def _end(made: Generator[Headers, BaseException | None, None], error: BaseException | None) -> None:
    try:
        made.send(error)
    except StopIteration:
        return
    except (Exception, GeneratorExit) as e:
        if e is not error:
            log.exception("the publish middleware %s failed after the publish", _name(made))
        return
    made.close()
