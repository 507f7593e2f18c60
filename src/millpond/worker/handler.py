"""Handlers: decode bodies and fill parameters, according to the annotations of a function."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from millpond.codec import BINARY, CONTENT_TYPE, is_text
from millpond.codec import decode as decode_plain
from millpond.errors import BodyNotDecodable, InvalidOption
from millpond.message import Message
from millpond.worker.delivery import Delivery
from millpond.worker.subscription import handler_name

Decode = Callable[[Message], Any]
Fill = Callable[[Any, Any], Any]
_OURS = {"Delivery": Delivery, "Message": Message}


class Handler:
    """A handler as the worker calls it.

    A parameter is recognised by its annotation `Delivery` or `Message`, or by the name `headers`; the remaining one
    is the body. A batch handler (`batch=True`) takes lists of each.
    """

    def __init__(self, function: Callable[..., Any], *, batch: bool) -> None:
        self.function = function
        self.batch = batch
        called = _called_function(function)
        self.is_async = inspect.iscoroutinefunction(called)
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise InvalidOption(f"{handler_name(function)} yields: a handler must be a plain or an async function")
        self._fills, body = _plan_arguments(function, batch)
        self.decode: Decode = _decoder(body)
        """Decode the body as annotated. It may raise any exception, which concerns this body alone."""
        self.takes_only_body = self._fills == [_fill_body]
        """The body is the only argument."""

    def arguments(self, body: Any, delivery: Delivery | Sequence[Delivery]) -> list[Any]:
        return [fill(body, delivery) for fill in self._fills]


def _called_function(function: Any) -> Any:
    """The function below partials and callable objects, to inspect its kind."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _plan_arguments(function: Callable[..., Any], batch: bool) -> tuple[list[Fill], Any]:
    """One fill function per parameter, and the type of the body; None without a body."""
    called = _called_function(function)
    fill: list[Fill] = []
    body: Any = None
    has_body = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is not parameter.empty:
                continue
            raise InvalidOption(f"{handler_name(function)}: the worker cannot fill keyword-only {parameter.name!r}")
        hint = _annotation(called, parameter)
        kind = _item_type(function, parameter, hint) if batch else hint
        if kind is Delivery:
            fill.append(lambda body, delivery: list(delivery) if batch else delivery)
        elif kind is Message:
            fill.append((lambda b, ds: [d.message for d in ds]) if batch else (lambda b, d: d.message))
        elif parameter.name == "headers":
            fill.append((lambda b, ds: [d.headers for d in ds]) if batch else (lambda b, d: d.headers))
        elif not has_body:
            has_body, body = True, kind
            fill.append(_fill_body)
        elif parameter.default is parameter.empty:
            raise InvalidOption(
                f"{handler_name(function)}: parameter {parameter.name!r} is a second body; a handler takes one body, "
                "and may ask for Delivery, Message or headers"
            )
        else:
            break  # this parameter and the following ones keep their defaults
    return fill, body if has_body else None


def _fill_body(body: Any, delivery: Any) -> Any:
    return body


def _annotation(function: Any, parameter: inspect.Parameter) -> Any:
    """A parameter's annotation, resolved if it is text; Any without one."""
    hint = parameter.annotation
    if hint is parameter.empty:
        return Any
    if not isinstance(hint, str):
        return hint
    if hint.rpartition(".")[2] in _OURS:  # possibly imported for type checkers only
        return _OURS[hint.rpartition(".")[2]]
    names = {**vars(typing), **_OURS, **getattr(inspect.unwrap(function), "__globals__", {})}
    try:
        return typing.get_type_hints(type("", (), {"__annotations__": {"hint": hint}}), names)["hint"]
    except Exception as e:
        raise InvalidOption(
            f"{handler_name(function)}: the annotation {hint!r} of {parameter.name!r} cannot be resolved where the "
            f"function was defined ({type(e).__name__}: {e}); define or import it at the top of the module"
        ) from None


def _item_type(function: Any, parameter: inspect.Parameter, hint: Any) -> Any:
    """T of list[T]."""
    if hint is Any or hint is list:
        return Any
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if not (isinstance(origin, type) and issubclass(list, origin) and len(arguments) == 1):
        raise InvalidOption(
            f"{handler_name(function)}: a batch handler takes lists: annotate {parameter.name!r} as a list"
        )
    return arguments[0]


def _decoder(kind: Any) -> Decode:
    if kind is None:
        return lambda message: None
    if kind is bytes:
        return lambda message: message.payload
    if kind is str:
        return _decode_text
    if kind is Any or kind is object:
        return lambda message: decode_plain(message.payload, message.headers.get(CONTENT_TYPE))
    validate = getattr(kind, "model_validate_json", None)  # a pydantic model, without importing pydantic
    if callable(validate):
        return lambda message: validate(message.payload)
    try:
        decode = msgspec.json.Decoder(kind, dec_hook=_decode_foreign).decode
    except TypeError as e:
        raise InvalidOption(f"bodies cannot be decoded to {kind!r}: {e}") from None
    return lambda message: decode(message.payload)


def _decode_foreign(kind: Any, value: Any) -> Any:
    """Decode types that msgspec does not know: pydantic models within lists or dataclasses."""
    validate = getattr(kind, "model_validate", None)
    if callable(validate):
        return validate(value)
    raise NotImplementedError(f"cannot decode to {kind!r}")


def _decode_text(message: Message) -> str:
    content_type = message.headers.get(CONTENT_TYPE)
    plain = is_text(content_type) or content_type == BINARY
    try:
        text = message.payload.decode()
        if plain:
            return text
        value = msgspec.json.decode(message.payload)  # a text in quotes, or the JSON itself as text
        return value if isinstance(value, str) else text
    except (UnicodeDecodeError, msgspec.DecodeError) as e:
        raise BodyNotDecodable(f"the body is not text: {e}") from None
