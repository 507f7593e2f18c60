"""Bodies as columns: the top-level fields of JSON objects, in one column `body` of the lake.

How it evolves: a field is added when it is given, or found in the sample of an export that infers; it is never
removed, and its type never changes. Files from before have no such field and show null. A value that does not fit its
field's type is null there, and so is the whole `body` of a message that is no JSON object; `payload` always holds the
body as it was. What is neither a number nor a truth value nor text stands in a text field as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.errors import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa

INFER = "infer"
SAMPLE = 1000
"""Messages of each slice that an export looks at when it infers."""
_MOST_FIELDS = 500
_ALIASES = {"int": "bigint", "integer": "bigint", "long": "bigint", "float": "double", "bool": "boolean"}
_LARGEST = 2**63


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


_FIT: Mapping[str, Callable[[Any], Any]] = {
    "boolean": lambda value: value if isinstance(value, bool) else None,
    "bigint": lambda value: value if type(value) is int and -_LARGEST <= value < _LARGEST else None,
    "double": lambda value: float(value) if type(value) in (int, float) else None,
    "string": _text,
}
TYPES = tuple(_FIT)


@dataclass(frozen=True)
class Decoder:
    """Makes the column `body` of the payloads of a batch."""

    fields: Mapping[str, str]

    @property
    def type(self) -> pa.DataType:
        import pyarrow as pa

        types = {"boolean": pa.bool_(), "bigint": pa.int64(), "double": pa.float64(), "string": pa.string()}
        return pa.struct([pa.field(name, types[type_]) for name, type_ in self.fields.items()])

    def __call__(self, rows: pa.RecordBatch) -> pa.StructArray:
        import pyarrow as pa

        bodies = [_object(payload) for payload in rows.column("payload").to_pylist()]
        arrays = [
            pa.array([None if body is None else _FIT[type_](body.get(name)) for body in bodies], type=field.type)
            for (name, type_), field in zip(self.fields.items(), self.type, strict=True)
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(self.type), mask=pa.array([b is None for b in bodies]))


def _object(payload: bytes | None) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(payload or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def given(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """The fields of `sku bigint, price double` that a lake does not have yet.

    >>> given("sku long, note string", {"note": "string"})
    {'sku': 'bigint'}
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        words = part.split()
        type_ = _ALIASES.get(words[-1].lower(), words[-1].lower()) if words else ""
        if len(words) != 2 or type_ not in TYPES:
            raise InvalidOption(
                f"bodies are decoded by fields like 'sku bigint, price double', of the types {', '.join(TYPES)}, or by "
                f"{INFER!r}; not by {part.strip()!r}"
            )
        name = words[0].strip("`")
        if known.get(name, type_) != type_:
            raise InvalidOption(f"the lake has the field {name!r} as {known[name]}; a field's type never changes")
        if name not in known:
            found[name] = type_
    return found


def inferred(payloads: Iterable[bytes], known: Mapping[str, str]) -> dict[str, str]:
    """The fields of some bodies that a lake does not have yet, each of the narrowest type that fits all its values."""
    found: dict[str, set[str]] = {}
    for payload in payloads:
        for name, value in (_object(payload) or {}).items():
            if value is not None and name not in known:
                found.setdefault(name, set()).add(_type(value))
    return {name: _common(types) for name, types in sorted(found.items())[: max(0, _MOST_FIELDS - len(known))]}


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) and -_LARGEST <= value < _LARGEST:
        return "bigint"
    return "double" if isinstance(value, int | float) else "string"


def _common(types: set[str]) -> str:
    if types == {"bigint", "double"}:
        return "double"
    return next(iter(types)) if len(types) == 1 else "string"
