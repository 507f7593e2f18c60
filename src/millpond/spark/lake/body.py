"""Bodies as columns: the top-level fields of JSON objects in the column `body`, and all that does not fit beside it.

A field is added when it is given, or found in the sample of an export that infers fields. It is never removed, and its
type never changes. Older files without the field show null. A value that is neither a number nor a boolean nor text is
JSON in a text field. `payload` always holds the original body.

A value that does not fit the type of its field is null, and is in the column `unreadable` as JSON:
`{"sku": "seven"}`. A number beyond every type, such as 1e999, is there as text. Names that differ only in case are one
field, because most readers of tables ignore case; if a body has several spellings, the one of the column counts, and
the others are in `unreadable`. A body that is no JSON object has a null `body`, and the text of `NO_OBJECT` in
`unreadable`. No body raises an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isinf
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.errors import InvalidOption

if TYPE_CHECKING:
    import pyarrow as pa

INFER = "infer"
SAMPLE = 1000
"""Number of messages of each slice from which an export infers fields."""
NO_OBJECT = "no JSON object"
_MOST_FIELDS = 500
_MOST_WITH_RARE = 50
"""A field of few bodies is inferred only while the lake has fewer fields: a hostile body cannot take all columns."""
_RARE = 0.01
"""Share of the sampled bodies up to which a field is rare. So is a field of one body."""
_MOST_SPELLINGS = 10_000
"""Maximum number of remembered names: a hostile publisher can use a new one in each body."""
_LONGEST_VALUE = 1000
"""Characters of a value in `unreadable`."""
_ALIASES = {"int": "bigint", "integer": "bigint", "long": "bigint", "float": "double", "bool": "boolean"}
_LARGEST = 2**63
# Possessive, and with an end for an open string: otherwise time is quadratic, and memory a hundred times the body.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?', re.DOTALL)
"""A string or a number in JSON."""
# Spark and Delta refuse some of these characters in the names of columns, and others need quotes in every query.
_NAME = re.compile(r"[^\s,;{}()=.`'\"\\/\[\]<>:\x00-\x1f]{1,128}")


def _double(value: Any) -> float | None:
    try:
        return float(value) if type(value) in (int, float) else None
    except OverflowError:
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else _encode(value)


def _encode(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:  # a depth that could just be decoded
        return "…"


_FIT: Mapping[str, Callable[[Any], Any]] = {
    "boolean": lambda value: value if isinstance(value, bool) else None,
    "bigint": lambda value: value if type(value) is int and -_LARGEST <= value < _LARGEST else None,
    "double": _double,
    "string": _text,
}
TYPES = tuple(_FIT)


def fold(name: str) -> str:
    """The same text for names that Spark takes for one: it compares letter by letter, in upper and in lower case.

    >>> fold("\\u017fKU") == fold("sku"), fold("stra\\u00dfe") == fold("strasse")
    (True, False)
    """
    if name.isascii():
        return name.lower()
    # The lower case of one letter, the dotted I, has two in Python and one in Java.
    return "".join(letter.lower() if len(letter.upper()) > 1 else letter.upper().lower()[0] for letter in name)


class Decoder:
    """Makes the columns `body` and `unreadable` from the payloads of a batch."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = [(name, _FIT[type_]) for name, type_ in fields.items()]
        self._numbers = {fold(name): number for number, name in enumerate(fields)}
        self._spellings: dict[str, int | None] = {}
        """Name in a body -> number of its field; None: it has none."""
        self.fields = dict(fields)

    @property
    def type(self) -> pa.DataType:
        import pyarrow as pa

        types = {"boolean": pa.bool_(), "bigint": pa.int64(), "double": pa.float64(), "string": pa.string()}
        return pa.struct([pa.field(name, types[type_]) for name, type_ in self.fields.items()])

    def __call__(self, rows: pa.RecordBatch) -> tuple[pa.StructArray, pa.StringArray]:
        import pyarrow as pa

        payloads = rows.column("payload").to_pylist()
        columns: list[list[Any]] = [[None] * len(payloads) for _ in self._fields]
        unreadable: list[str | None] = [None] * len(payloads)
        for row, payload in enumerate(payloads):
            body = _object(payload)
            if body is None:
                unreadable[row] = NO_OBJECT
            elif rest := self._decode(body, row, columns):
                unreadable[row] = _encode(rest)
        types = list(self.type)
        arrays = [pa.array(values, type=one.type) for values, one in zip(columns, types, strict=True)]
        # A rest is a JSON object, so it never equals this text.
        no_object = pa.array([text == NO_OBJECT for text in unreadable], pa.bool_())
        return pa.StructArray.from_arrays(arrays, fields=types, mask=no_object), pa.array(unreadable, pa.string())

    def _decode(self, body: Mapping[str, Any], row: int, columns: Sequence[list[Any]]) -> dict[str, Any]:
        """Write the values that fit into the columns; returns the others."""
        rest: dict[str, Any] = {}
        taken: dict[int, str] = {}
        for name, value in body.items():
            number = self._number(name)
            if number is None or value is None:
                continue
            column, fit = self._fields[number]
            if number in taken:
                other = name if name != column else taken[number]
                rest[other] = _short(body[other])
                if other == name:
                    continue
            taken[number] = name
            columns[number][row] = fit(value)
            if columns[number][row] is None:
                rest[name] = _short(value)
        return rest

    def _number(self, name: str) -> int | None:
        try:
            return self._spellings[name]
        except KeyError:
            number = self._numbers.get(fold(name))
            if len(self._spellings) < _MOST_SPELLINGS:
                self._spellings[name] = number
            return number


def _short(value: Any) -> Any:
    """The value, or the beginning of a long one as text: `payload` has all of it."""
    text = _encode(value)
    return value if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "…"


def _object(payload: bytes | None) -> dict[str, Any] | None:
    try:
        try:
            value = msgspec.json.decode(payload or b"")
        except msgspec.ValidationError:  # a number that is out of range: 1e999, or thousands of digits
            value = msgspec.json.decode(_TOKEN.sub(_as_text_if_huge, payload or b""))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _as_text_if_huge(token: re.Match[bytes]) -> bytes:
    """The number as JSON text if it is out of range: it then fits a text field only. Strings stay as they are."""
    text = token[0]
    return b'"%s"' % text if text[:1] != b'"' and isinf(float(text)) else text


def parse_fields(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """The fields of `sku bigint, price double` that a lake does not have yet.

    >>> parse_fields("sku long, note string", {"note": "string"})
    {'sku': 'bigint'}
    """
    found: dict[str, str] = {}
    spellings = {fold(name): name for name in known}
    for part in text.split(","):
        words = part.split()
        type_ = _ALIASES.get(words[-1].lower(), words[-1].lower()) if words else ""
        if len(words) != 2 or type_ not in TYPES:
            raise InvalidOption(
                f"decode takes fields like 'sku bigint, price double', of the types {', '.join(TYPES)}, or "
                f"{INFER!r}; not {part.strip()!r}"
            )
        name = words[0].strip("`")
        if not _NAME.fullmatch(name):
            raise InvalidOption(f"decode: {name!r} cannot be the name of a column in every reader of the lake")
        same = spellings.setdefault(fold(name), name)
        if {**known, **found}.get(same, type_) != type_:
            raise InvalidOption(f"the lake has the field {same!r} as {known[same]}; a field's type never changes")
        if same not in known:
            found[same] = type_
    return found


def usable_fields(fields: Mapping[str, str]) -> dict[str, str]:
    """The fields whose names every reader takes; of several spellings of a name the first one."""
    found: dict[str, str] = {}
    for name, type_ in fields.items():
        if _NAME.fullmatch(name) and fold(name) not in {fold(known) for known in found}:
            found[name] = type_
    return found


def infer_fields(payloads: Iterable[bytes], known: Mapping[str, str]) -> dict[str, str]:
    """The fields of some bodies that a lake does not have yet, each of the narrowest type that fits all its values.

    The fields of most bodies come first, because a lake has a maximum of them. Of several spellings of a name the first
    one counts. Left out are names that many readers refuse, and bodies with more fields than a lake may have.
    """
    lower = {fold(name) for name in known}
    found: dict[str, set[str]] = {}
    spellings: dict[str, str] = {}
    bodies: Counter[str] = Counter()
    sampled = 0
    for payload in payloads:
        sampled += 1
        body = _object(payload) or {}
        if len(body) > _MOST_FIELDS:
            continue
        here: set[str] = set()
        for name, value in body.items():
            if value is not None and fold(name) not in lower and _NAME.fullmatch(name):
                field = spellings.setdefault(fold(name), name)
                found.setdefault(field, set()).add(_type(value))
                here.add(field)
        bodies.update(here)
    chosen: dict[str, str] = {}
    for name in sorted(found, key=lambda name: (-bodies[name], name)):
        rare = bodies[name] <= max(1, sampled * _RARE)
        if len(known) + len(chosen) < (_MOST_WITH_RARE if rare else _MOST_FIELDS):
            chosen[name] = _common(found[name])
    return chosen


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) and -_LARGEST <= value < _LARGEST:
        return "bigint"
    return "double" if _double(value) is not None else "string"


def _common(types: set[str]) -> str:
    if types == {"bigint", "double"}:
        return "double"
    return next(iter(types)) if len(types) == 1 else "string"
