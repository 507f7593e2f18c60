"""A value within a JSON body, written as `customer.id=7`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from millpond.errors import InvalidOption


class BodyPath(msgspec.Struct, frozen=True):
    """Names of fields, or positions in lists, and the value that is there."""

    names: tuple[str, ...]
    text: str
    value: Any

    def matches(self, payload: bytes) -> bool:
        """Whether the body is JSON and has this value there. A text may be written without quotes."""
        try:
            found = msgspec.json.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return False
        for name in self.names:
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and (at := _position(name)) is not None and at < len(found):
                found = found[at]
            else:
                return False
        if isinstance(found, str):
            return found in (self.text, self.value)
        return bool(isinstance(found, bool) == isinstance(self.value, bool) and found == self.value)


@lru_cache(maxsize=100)
def parsed(text: str) -> BodyPath:
    """Read `customer.id=7`. The value is JSON, or else text."""
    path, equals, value = text.partition("=")
    names = tuple(path.strip().split("."))
    if not equals or not all(names):
        raise InvalidOption(f"{text!r} is no path with a value: write one such as customer.id=7")
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        decoded = value
    return BodyPath(names, value, decoded)


def _position(name: str) -> int | None:
    """A place in a list. Python refuses to read numbers with thousands of digits."""
    return int(name) if name.isdecimal() and len(name) < 20 else None
