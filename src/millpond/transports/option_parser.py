"""Options as texts, from a command line or an environment variable."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from millpond.checks import known_options
from millpond.errors import InvalidOption
from millpond.transports.url import Url

_TRUTH = {"true": True, "false": False}


def parse_texts(struct: type[msgspec.Struct], texts: Sequence[str]) -> dict[str, Any]:
    """Options from texts such as `call_timeout=5` and `archive_options.schema=queues`, in the types of the struct.

    >>> class Options(msgspec.Struct):
    ...     pool_size: int = 10
    ...     notify: bool = True
    ...     more: Mapping[str, Any] | None = None
    >>> parse_texts(Options, ["pool_size=3", "notify=false", "more.schema=queues", "more.limit=7"])
    {'pool_size': 3, 'notify': False, 'more': {'schema': 'queues', 'limit': 7}}
    """
    kinds = {field.name: set(_members(field.type)) for field in msgspec.structs.fields(struct)}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidOption(f"the option {name!r} has no value: write it as NAME=VALUE")
        name, dot, inner = name.partition(".")
        known_options([name], kinds, "unknown option")
        kind = kinds[name]
        is_mapping = any(typing.get_origin(one) in (Mapping, dict) for one in kind)
        if dot != ("." if is_mapping else ""):
            raise InvalidOption(f"the option {name!r} is written as {name}{'.NAME' if is_mapping else ''}=VALUE")
        if is_mapping:
            found.setdefault(name, {})[inner] = _json_or_text(value)
        else:
            found[name] = _value(name, value, kind)
    return found


def _members(kind: Any) -> Iterable[Any]:
    """The members of a union, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for part in typing.get_args(kind) for member in _members(part)]
    return [kind]


def _value(name: str, text: str, kind: set[Any]) -> Any:
    if bool in kind:
        if text.lower() not in _TRUTH:
            raise InvalidOption(f"the option {name!r} must be true or false, not {text!r}")
        return _TRUTH[text.lower()]
    if kind & {int, float, timedelta}:
        for number in (int, float) if float in kind else (int,):
            try:
                return number(text)
            except ValueError:
                continue
        raise InvalidOption(f"the option {name!r} must be a number, not {text!r}")
    if str in kind or any(typing.get_origin(one) is typing.Literal for one in kind) or Url in kind:
        return text
    raise InvalidOption(f"the option {name!r} is an object of a program and cannot be given as a text")


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
