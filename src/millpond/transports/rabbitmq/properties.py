"""The properties of an AMQP message as bytes and back. Every byte is a publisher's, and none is trusted.

Other clients send types that JSON lacks. Such a value keeps its bytes, and is published again unchanged.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

PERSISTENT = 2
MAX_DEPTH = 16
"""Number of tables and arrays within each other."""
_LATEST = 253_402_300_799
"""Seconds until the end of the year 9999."""

_NAMES = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
_FLAGS = {name: 1 << (15 - n) for n, name in enumerate(_NAMES)}
_KNOWN_FLAGS = sum(_FLAGS.values())
_OCTETS = ("delivery_mode", "priority")

_U16, _U32, _U64 = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")
_I32, _I64, _F64 = struct.Struct(">i"), struct.Struct(">q"), struct.Struct(">d")


class Undecodable(ValueError):
    """Properties that do not follow the protocol, or that this library does not accept."""


class Raw(msgspec.Struct, frozen=True, gc=False):
    """A header value of a type that JSON lacks."""

    encoded: bytes
    """The octet of its type, and its value."""
    readable: Any
    """Nearest JSON value, for handlers and operators."""


class Properties(msgspec.Struct, gc=False):
    message_id: str | None
    headers: dict[str, Any]
    """Values of JSON's types, or `Raw`."""
    others: dict[str, Any]
    """All other properties, by their AMQP name."""


def decode(data: bytes) -> Properties:
    """Read flags and values. Raises `Undecodable` and nothing else."""
    try:
        return _decode(data)
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError, RecursionError) as e:
        raise Undecodable(str(e)) from None


def _decode(data: bytes) -> Properties:
    (flags,) = _U16.unpack_from(data)
    if flags & ~_KNOWN_FLAGS:
        raise Undecodable("unknown properties")
    at = _U16.size
    message_id: str | None = None
    headers: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, flag in _FLAGS.items():
        if not flags & flag:
            continue
        if name == "headers":
            headers, at = _table(data, at, len(data), 0)
        elif name == "message_id":
            message_id, at = _short_text(data, at)
        elif name in _OCTETS:
            others[name] = data[at]
            at += 1
        elif name == "timestamp":
            others[name], at = _timestamp(data, at, len(data), 0)
        else:
            others[name], at = _short_text(data, at)
    others.pop("delivery_mode", None)
    return Properties(message_id, headers, others)


def _short_text(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    if end > len(data):
        raise Undecodable("a text is longer than its message")
    return data[at + 1 : end].decode(), end


def _table(data: bytes, at: int, end: int, depth: int) -> tuple[dict[str, Any], int]:
    table: dict[str, Any] = {}
    stop = _end(data, at, end, depth)
    at += _U32.size
    while at < stop:
        name, at = _short_text(data, at)
        value, at = _value(data, at, stop, depth)
        # The broker writes its own value of a name before those of the publisher, or over the first of them.
        table.setdefault(name, value)
    if at != stop:
        raise Undecodable("a table has another length than its values")
    return table, stop


def _array(data: bytes, at: int, end: int, depth: int) -> tuple[list[Any], int]:
    stop = _end(data, at, end, depth)
    at += _U32.size
    values = []
    while at < stop:
        value, at = _value(data, at, stop, depth)
        values.append(readable(value))
    if at != stop:
        raise Undecodable("an array has another length than its values")
    return values, stop


def _inner_table(data: bytes, at: int, end: int, depth: int) -> tuple[dict[str, Any], int]:
    table, at = _table(data, at, end, depth)
    return {name: readable(value) for name, value in table.items()}, at


def _end(data: bytes, at: int, end: int, depth: int) -> int:
    if depth > MAX_DEPTH:
        raise Undecodable(f"tables and arrays are nested deeper than {MAX_DEPTH}")
    stop = at + _U32.size + int(_U32.unpack_from(data, at)[0])
    if stop > end:
        raise Undecodable("a table or array is longer than its message")
    return stop


def _value(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    kind = data[at]
    plain = _PLAIN.get(kind)
    if plain is not None:
        value, after = plain(data, at + 1, end, depth)
    else:
        read = _OTHERS.get(kind)
        if read is None:
            raise Undecodable(f"unknown type {bytes([kind])!r} of a header value")
        value, after = read(data, at + 1, end, depth + 1)
        value = Raw(data[at:after], value)
    if after > end:
        raise Undecodable("a header value is longer than its table")
    return value, after


_Read = Callable[[bytes, int, int, int], tuple[Any, int]]


def _long_text(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
    stop = at + _U32.size + int(_U32.unpack_from(data, at)[0])
    if stop > end:
        raise Undecodable("a text is longer than its table")
    text = data[at + _U32.size : stop]
    try:
        return text.decode(), stop
    except UnicodeDecodeError:
        return Raw(data[at - 1 : stop], text.decode("latin-1")), stop


def _octets(data: bytes, at: int, end: int, depth: int) -> tuple[str, int]:
    """Octets as base64."""
    stop = at + _U32.size + int(_U32.unpack_from(data, at)[0])
    if stop > end:
        raise Undecodable("octets are longer than their table")
    return b64encode(data[at + _U32.size : stop]).decode(), stop


def _iso_time(data: bytes, at: int, end: int, depth: int) -> tuple[str, int]:
    """A timestamp as ISO 8601."""
    seconds, after = _timestamp(data, at, end, depth)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}", after


def _timestamp(data: bytes, at: int, end: int, depth: int) -> tuple[int, int]:
    seconds = int(_U64.unpack_from(data, at)[0])
    if seconds > _LATEST:
        raise Undecodable("a timestamp is after the year 9999")
    return seconds, at + _U64.size


def _decimal(data: bytes, at: int, end: int, depth: int) -> tuple[str, int]:
    return str(Decimal(int(_I32.unpack_from(data, at + 1)[0])).scaleb(-data[at])), at + 5


def _number(form: str) -> _Read:
    number = struct.Struct(form)

    def read(data: bytes, at: int, end: int, depth: int) -> tuple[Any, int]:
        return number.unpack_from(data, at)[0], at + number.size

    return read


_PLAIN: dict[int, _Read] = {
    ord("S"): _long_text,
    ord("t"): lambda data, at, end, depth: (bool(data[at]), at + 1),
    ord("I"): _number(">i"),
    ord("l"): _number(">q"),
    ord("d"): _number(">d"),
    ord("V"): lambda data, at, end, depth: (None, at),
}
_OTHERS: dict[int, _Read] = {
    ord("b"): _number(">b"),
    ord("B"): _number(">B"),
    ord("s"): _number(">h"),
    ord("u"): _number(">H"),
    ord("i"): _number(">I"),
    ord("L"): _number(">q"),
    ord("f"): _number(">f"),
    ord("D"): _decimal,
    ord("A"): _array,
    ord("F"): _inner_table,
    ord("T"): _iso_time,
    ord("x"): _octets,
}


def readable(value: Any) -> Any:
    """The value that handlers see."""
    return value.readable if type(value) is Raw else value


# --- out --------------------------------------------------------------------------------------------


def encode(message_id: str, headers: Mapping[str, Any], others: Mapping[str, Any]) -> bytes:
    """Flags and values of a persistent message."""
    if not others:
        flags = _FLAGS["headers"] | _FLAGS["delivery_mode"] | _FLAGS["message_id"]
        return b"".join((_U16.pack(flags), _encoded_table(headers), _PERSISTENT, _encoded_short(message_id)))
    values = {**others, "message_id": message_id, "headers": headers, "delivery_mode": PERSISTENT}
    flags, parts = 0, []
    for name, flag in _FLAGS.items():
        if name in values:
            flags |= flag
            parts.append(_encoded_property(name, values[name]))
    return _U16.pack(flags) + b"".join(parts)


_PERSISTENT = bytes([PERSISTENT])


def _encoded_property(name: str, value: Any) -> bytes:
    if name == "headers":
        return _encoded_table(value)
    if name in _OCTETS:
        return bytes([value])
    return _U64.pack(value) if name == "timestamp" else _encoded_short(value)


def _encoded_short(text: str) -> bytes:
    octets = text.encode()
    return bytes([len(octets)]) + octets


def _encoded_table(table: Mapping[str, Any]) -> bytes:
    parts = []
    for name, value in table.items():
        parts.append(_encoded_short(name))
        parts.append(_encoded_value(value))
    encoded = b"".join(parts)
    return _U32.pack(len(encoded)) + encoded


def _encoded_value(value: Any) -> bytes:
    if type(value) is bytes:  # text, already encoded
        return b"S" + _U32.pack(len(value)) + value
    if type(value) is str:
        text = value.encode()
        return b"S" + _U32.pack(len(text)) + text
    if type(value) is Raw:
        return value.encoded
    if type(value) is bool:
        return b"t\x01" if value else b"t\x00"
    if type(value) is int:
        return b"I" + _I32.pack(value) if -(2**31) <= value < 2**31 else b"l" + _I64.pack(value)
    if type(value) is float:
        return b"d" + _F64.pack(value)
    assert value is None
    return b"V"
