"""From a function with annotations to one that takes deliveries: bodies decoded, what it asks for supplied."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millpond.codec import BINARY, CONTENT_TYPE, TEXT
from millpond.codec import decode as decode_plain
from millpond.errors import BodyNotDecodable, InvalidOption
from millpond.message import Message
from millpond.worker.delivery import Delivery

Decode = Callable[[Message], Any]


class Handler:
    """A handler as the worker calls it.

    Parameters are told by annotation or name: `Delivery`, `Message`, one called `headers`; the one left is
    the body. A batch handler (`batch=True`) takes lists of each.
    """

    def __init__(self, function: Callable[..., Any], *, batch: bool) -> None:
        self.function = function
        self.batch = batch
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - the method itself is asked for, not callability
        )
        self._fill, body = _plan(function, batch)
        self._decode = _decoder(body)

    def decode(self, delivery: Delivery) -> Any:
        """The body, as annotated; raises BodyNotDecodable."""
        try:
            return self._decode(delivery.message)
        except BodyNotDecodable:
            raise
        except Exception as e:  # a decoder of the user's types may raise anything; it concerns this body alone
            raise BodyNotDecodable(f"{type(e).__name__}: {e}") from e

    def arguments(self, body: Any, delivery: Delivery | Sequence[Delivery]) -> tuple[Any, ...]:
        return tuple([fill(body, delivery) for fill in self._fill])


def _plan(function: Callable[..., Any], batch: bool) -> tuple[list[Callable[[Any, Any], Any]], Any]:
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # annotations that name what only type checkers import
        hints = dict(getattr(function, "__annotations__", {}))
    fill: list[Callable[[Any, Any], Any]] = []
    body: Any = None
    has_body = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            if parameter.default is not parameter.empty or parameter.kind is not parameter.KEYWORD_ONLY:
                continue
            raise InvalidOption(f"{function.__qualname__}: the worker cannot fill keyword-only {parameter.name!r}")
        hint = hints.get(parameter.name, Any)
        kind = _item(hint) if batch else hint
        if kind is Delivery or kind == "Delivery":
            fill.append(lambda body, delivery: delivery)
        elif kind is Message:
            fill.append((lambda b, ds: [d.message for d in ds]) if batch else (lambda b, d: d.message))
        elif parameter.name == "headers":
            fill.append((lambda b, ds: [d.headers for d in ds]) if batch else (lambda b, d: d.headers))
        elif not has_body:
            has_body, body = True, kind
            fill.append(lambda body, delivery: body)
        elif parameter.default is parameter.empty:
            raise InvalidOption(
                f"{function.__qualname__}: parameter {parameter.name!r} is a second body; a handler takes one body, "
                "and may ask for Delivery, Message or headers"
            )
    return fill, body if has_body else None


def _item(hint: Any) -> Any:
    """T of list[T]."""
    arguments = typing.get_args(hint)
    return arguments[0] if arguments else Any


def _decoder(kind: Any) -> Decode:
    if kind is None:
        return lambda message: None
    if kind is bytes:
        return lambda message: message.payload
    if kind is str:
        return _text
    if kind is Any or kind is inspect.Parameter.empty:
        return lambda message: decode_plain(message.payload, message.headers.get(CONTENT_TYPE))
    validate = getattr(kind, "model_validate_json", None)  # a pydantic model, without importing pydantic
    if callable(validate):
        return lambda message: validate(_json(message))
    try:
        decode = msgspec.json.Decoder(kind).decode
    except TypeError as e:
        raise InvalidOption(f"bodies cannot be decoded to {kind!r}: {e}") from None
    return lambda message: decode(_json(message))


def _json(message: Message) -> bytes:
    kind = message.headers.get(CONTENT_TYPE)
    if kind in (TEXT, BINARY):
        raise BodyNotDecodable(f"the body is {kind}, and the handler wants JSON")
    return message.payload


def _text(message: Message) -> str:
    headers: Mapping[str, Any] = message.headers
    kind = headers.get(CONTENT_TYPE)
    try:
        if kind is None:  # JSON: a text in quotes, or the JSON itself as text
            value = msgspec.json.decode(message.payload)
            return value if isinstance(value, str) else message.payload.decode()
        return message.payload.decode()
    except (UnicodeDecodeError, msgspec.DecodeError) as e:
        raise BodyNotDecodable(f"the body is not text: {e}") from None
