"""PostgreSQL sends the columns of fixed width (ids, numbers, times) packed into one value per row.

Each column has the same cost to send and receive however narrow it is, and most of our columns are narrow. The server
packs them, and this module unpacks whole batches. An archived message then costs a quarter less in all.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from millpond.seam.arrow import Column, Kind

NULL = -(2**63)
"""Stands for NULL; none of our bigint columns has this value."""
_WIDTH = {Kind.ID: 16, Kind.TIME: 8, Kind.NUMBER: 4}
_PARTS, _FORMATS = list("abcdef"), ["u8", "u4", "u4", "u4", "u8", "u4"]
"""Groups of the digits of an id; the last group of twelve is two parts."""
_DIGITS = np.dtype({"names": _PARTS, "formats": _FORMATS, "offsets": [0, 8, 12, 16, 20, 28], "itemsize": 32})
_DASHED = np.dtype({"names": _PARTS, "formats": _FORMATS, "offsets": [0, 9, 14, 19, 24, 32], "itemsize": 36})


def packed_statement(columns: Sequence[Column], text: str) -> str:
    """A statement around `text` that packs the fixed-width columns into one, the last."""
    loose = [f"t.c{n}" for n, column in enumerate(columns) if column.kind not in _WIDTH]
    fixed = _fixed(columns)
    parts = [f"uuid_send(t.c{n})" for n in fixed if columns[n].kind is Kind.ID]
    parts += [f"int8send(coalesce(t.c{n}, ({NULL})))" for n in fixed if columns[n].kind is Kind.TIME]
    numbers = [f"t.c{n}::bigint" for n in fixed if columns[n].kind is Kind.NUMBER]
    # Two numbers in one call: the call costs more than the arithmetic.
    parts += [f"int8send(({a} << 32) | ({b} & 4294967295))" for a, b in zip(numbers[::2], numbers[1::2], strict=False)]
    parts += [f"int4send({numbers[-1]}::integer)"] if len(numbers) % 2 else []
    return f"SELECT {', '.join([*loose, *([' || '.join(parts)] if parts else [])])} FROM ({text}) AS t"


def unpack(batch: pa.RecordBatch, columns: Sequence[Column], schema: pa.Schema) -> pa.RecordBatch:
    """The requested columns of a packed batch."""
    loose = iter(batch.columns)
    arrays = [
        constant(column, batch.num_rows) if is_constant(column) else next(loose) if column.kind not in _WIDTH else None
        for column in columns
    ]
    fixed = _fixed(columns)
    widths = [_WIDTH[columns[n].kind] for n in fixed]
    at = 0
    for n, width in zip(fixed, widths, strict=True):
        part = _matrix(batch.columns[-1], sum(widths))[:, at : at + width]
        arrays[n] = _array(columns[n].kind, np.ascontiguousarray(part))
        at += width
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _fixed(columns: Sequence[Column]) -> list[int]:
    """Indexes of the packed columns, in the order of packing."""
    return [n for kind in _WIDTH for n, column in enumerate(columns) if column.kind is kind and not is_constant(column)]


def is_constant(column: Column) -> bool:
    """A number that is a literal of the statement need not be sent."""
    return column.kind is Kind.NUMBER and column.sql.isdigit()


def _matrix(array: pa.BinaryArray, width: int) -> np.ndarray:
    _, offsets, data = array.buffers()
    first = np.frombuffer(offsets, np.int32)[array.offset]
    return np.frombuffer(data, np.uint8)[first : first + len(array) * width].reshape(len(array), width)


def constant(column: Column, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(int(column.sql), column.kind.arrow), count)


def _array(kind: Kind, part: np.ndarray) -> pa.Array:
    if kind is Kind.ID:
        return ids(part)
    if kind is Kind.NUMBER:
        return pa.array(part.view(">i4").ravel().astype(np.int32))
    return times(part.view(">i8").ravel().astype(np.int64))


def times(values: np.ndarray) -> pa.Array:
    missing = values == NULL
    return pa.array(values, mask=missing if missing.any() else None).view(Kind.TIME.arrow)


def ids(part: np.ndarray) -> pa.Array:
    """16-byte ids as an Arrow string array."""
    digits = np.frombuffer(hexlify(part.data), _DIGITS)
    text = np.full(36 * len(digits), ord("-"), np.uint8)
    for name in _PARTS:
        text.view(_DASHED)[name] = digits[name]
    offsets = np.arange(0, 36 * (len(digits) + 1), 36, dtype=np.int32)
    return pa.StringArray.from_buffers(len(digits), pa.py_buffer(offsets), pa.py_buffer(text))
