"""Rows of a DataFrame as messages. Columns are checked once, values in whole Arrow batches.

The columns `id`, `queue`, `key`, `priority`, `due_at`, `headers` and `payload` have the meaning of their names. Without
`payload` all other columns together are the body, as a JSON object.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from millpond.clock import SystemClock
from millpond.errors import BodyNotEncodable, BodyTooLarge, InvalidMessage, InvalidPriority, InvalidQueue
from millpond.message import (
    DEFAULT_PRIORITY,
    LOWEST_PRIORITY,
    NAME_LIMIT,
    check_id,
    check_name,
    check_text,
    decode_headers,
    encode_headers,
)

MESSAGE_COLUMNS = ("id", "queue", "key", "priority", "due_at", "headers", "payload")
_TYPES = {
    "id": ("string", "binary"),
    "queue": ("string",),
    "key": ("string",),
    "priority": ("tinyint", "smallint", "int", "bigint"),
    "due_at": ("timestamp",),
    "headers": ("map<string,string>", "string"),
    "payload": ("binary", "string"),
}
_ADVICE = {
    "due_at": "; a time without a time zone is ambiguous: cast it to timestamp in the session's time zone",
    "headers": " (of JSON)",
    "payload": "; leave the name away to publish columns as JSON, or use to_json",
}


class Layout(NamedTuple):
    """The meaning of the DataFrame's columns."""

    places: dict[str, int]
    """Column of a message -> its index in the DataFrame."""
    body: tuple[int, ...]
    """Indexes of the columns that form the body; empty if there is a payload."""
    queue: str | None
    """The queue of all rows if there is no column for it."""

    @property
    def given(self) -> bool:
        """Whether the rows have ids."""
        return "id" in self.places


def layout(schema: StructType, queue: str | None) -> Layout:
    """Check the columns of a DataFrame; errors name the column and the remedy."""
    places: dict[str, int] = {}
    others: list[str] = []
    for place, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in MESSAGE_COLUMNS:
            others.append(field.name)
            continue
        found, allowed = field.dataType.simpleString(), _TYPES[name]
        if name in places:
            raise InvalidMessage(f"the DataFrame has two columns {name!r}; drop one")
        if found not in allowed:
            raise InvalidMessage(
                f"the column {name!r} must be {' or '.join(allowed)}{_ADVICE.get(name, '')}; it is {found}"
            )
        places[name] = place
    if ("queue" in places) == (queue is not None):
        which = "there are both" if queue is not None else "there is neither"
        raise InvalidQueue(f"a write needs the option 'queue' or a column 'queue'; {which}")
    if "payload" in places and others:
        raise InvalidMessage(
            f"beside 'payload' the columns {', '.join(map(repr, others))} have no meaning: drop them, or put them "
            "into the payload with to_json(struct(...))"
        )
    kafka = [schema[name] for name in others if name.lower() == "value"]
    if "payload" not in places and len(others) == 1 and kafka and kafka[0].dataType.simpleString() in _TYPES["payload"]:
        raise InvalidMessage(
            "the DataFrame has the one column 'value', as Kafka and text files do: rename it to 'payload' to publish "
            "it as the body, or make a JSON object of it with to_json(struct(value)) AS payload"
        )
    if "payload" not in places and not others:
        raise InvalidMessage("the DataFrame has no column for the body: name one 'payload', or add columns of your own")
    body = () if "payload" in places else tuple(schema.fieldNames().index(name) for name in others)
    return Layout(places, body, None if queue is None else check_name(queue, "queue"))


SCHEMA = pa.schema(
    [
        pa.field("id", pa.binary()),
        pa.field("due_at", pa.int64()),
        pa.field("priority", pa.int16()),
        pa.field("queue", pa.string()),
        pa.field("key", pa.string()),
        pa.field("headers", pa.string()),
        pa.field("payload", pa.binary()),
    ]
)
"""The columns that are staged: times as microseconds, ids as bytes."""


def messages(layout: Layout, batch: pa.RecordBatch, body_limit: int) -> pa.RecordBatch:
    """The rows of a batch as messages, with the checks of `publish`; one invalid row raises for all."""
    count = batch.num_rows

    def column(name: str) -> Any:
        return batch.column(layout.places[name]) if name in layout.places else None

    arrays = [
        _ids(column("id"), count),
        _due(column("due_at"), count),
        _priorities(column("priority"), count),
        pa.repeat(layout.queue, count) if layout.queue is not None else _queues(column("queue")),
        _keys(column("key"), count),
        _headers(column("headers"), count),
        _payloads(column("payload") if not layout.body else _json(layout, batch), body_limit),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _ids(column: Any, count: int) -> Any:
    if column is None or column.null_count == count:
        return new_ids(count)
    if column.null_count:
        return pc.if_else(column.is_valid(), _ids(column.fill_null(_SOME_ID[column.type]), count), new_ids(count))
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        if pc.any(pc.not_equal(pc.binary_length(column), 16)).as_py():
            raise InvalidMessage("an id in the column 'id' does not have the 16 bytes of a UUID")
        return column.cast(pa.binary())
    values = column.to_pylist()
    try:
        return binary16(bytes.fromhex("".join(map(_hexadecimal, values))))
    except ValueError:
        return pa.array([check_id(value).bytes for value in values], pa.binary())


_SOME_ID = {pa.string(): "0" * 32, pa.large_string(): "0" * 32, pa.binary(): bytes(16), pa.large_binary(): bytes(16)}


def _hexadecimal(text: str) -> str:
    digits = text.replace("-", "")
    if len(digits) != 32:
        raise ValueError(text)
    return digits


def _due(column: Any, count: int) -> Any:
    return pa.nulls(count, pa.int64()) if column is None else column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())


def _priorities(column: Any, count: int) -> Any:
    if column is None:
        return pa.array(np.full(count, DEFAULT_PRIORITY, np.int16))
    column = column.fill_null(DEFAULT_PRIORITY)
    ends = pc.min_max(column).as_py()
    for value in (ends["min"], ends["max"]):
        if value is not None and not 0 <= value <= LOWEST_PRIORITY:
            raise InvalidPriority(f"priority must be from 0 (first) to 100 (last); the column 'priority' holds {value}")
    return column.cast(pa.int16())


def _queues(column: Any) -> Any:
    for name in _checked_text(column, "queue").unique().to_pylist():
        if name is None:
            raise InvalidQueue(
                "a row has no queue: fill the column 'queue', or give all rows one by the option 'queue'"
            )
        check_name(name, "queue")
    return column.cast(pa.string())


def _keys(column: Any, count: int) -> Any:
    if column is None:
        return pa.nulls(count, pa.string())
    _checked_text(column, "key")
    bad = pc.or_(pc.greater(pc.utf8_length(column), NAME_LIMIT), pc.match_substring(column, "\x00"))
    for value in column.filter(pc.fill_null(bad, False)).slice(0, 1).to_pylist():
        check_text(value, "key")  # raises with the reason
    return column.cast(pa.string())


def _checked_text(column: Any, what: str) -> Any:
    """Raise if a string is not UTF-8: Spark does not check that."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidQueue(f"the column {what!r} holds bytes that are not UTF-8 text") from None
    return column


def _headers(column: Any, count: int) -> Any:
    if column is None or column.null_count == count:
        return pa.nulls(count, pa.string())
    values = _checked_text(column, "headers").to_pylist()
    return pa.array([None if value is None else _header(value) for value in values], pa.string())


def _header(value: str | Sequence[tuple[str, str]]) -> str | None:
    if not isinstance(value, str):
        return encode_headers(dict(value))
    try:
        headers = decode_headers(value)
    except msgspec.DecodeError as e:
        raise BodyNotEncodable(f"the column 'headers' holds text that is not JSON: {e}") from None
    if not isinstance(headers, dict):
        raise BodyNotEncodable(f"headers must be a JSON object, not {value[:80]!r}")
    return encode_headers(headers)


def _payloads(column: Any, limit: int) -> Any:
    if column.null_count:
        raise BodyNotEncodable("a row has no payload: the column 'payload' must not be null")
    column = column.cast(pa.binary())
    longest = pc.max(pc.binary_length(column)).as_py()
    if longest is not None and longest > limit:
        raise BodyTooLarge(f"a payload has {longest:,} bytes, the limit is {limit:,}; keep large data elsewhere")
    return column


def _json(layout: Layout, batch: pa.RecordBatch) -> Any:
    """Row by row, so slower than a payload that Spark makes with to_json."""
    rows = batch.select(list(layout.body)).to_pylist(maps_as_pydicts="strict")
    try:
        return pa.array([msgspec.json.encode(row) for row in rows], pa.binary())
    except (TypeError, ValueError, msgspec.MsgspecError) as e:
        raise BodyNotEncodable(f"a row cannot be written as JSON: {e}; make the payload with to_json") from None


def without_copies(rows: pa.Table) -> pa.Table:
    """The first row of each id."""
    ids = np.frombuffer(b"".join(rows.column("id").to_pylist()), dtype="V16")
    first = np.unique(ids, return_index=True)[1]
    return rows if len(first) == len(ids) else rows.take(pa.array(np.sort(first)))


_LOW = np.uint64((1 << 52) - 1)


def new_ids(count: int) -> Any:
    """Ids as of `millpond.message.new_id`, ascending: 48 bits of time, 74 random bits around version and variant."""
    # Sorted: then the indexes of the table grow at their end.
    random = np.sort(np.frombuffer(os.urandom(8 * count), np.uint64))
    rest = np.frombuffer(os.urandom(2 * count), np.uint16).astype(np.uint64) & np.uint64(1023)
    time = np.uint64(SystemClock().now() // 1000)
    ids = np.empty((count, 2), ">u8")
    ids[:, 0] = time << np.uint64(16) | np.uint64(7 << 12) | random >> np.uint64(52)
    ids[:, 1] = np.uint64(1 << 63) | (random & _LOW) << np.uint64(10) | rest
    return binary16(ids.tobytes())


def binary16(data: bytes) -> Any:
    """An Arrow array of 16-byte values."""
    count = len(data) // 16
    ends = np.arange(0, 16 * (count + 1), 16, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(data)])
