"""Many rows of PostgreSQL's as one, column by column: what travels is nearly what Arrow wants.

A row costs the same to receive however small it is, and so does each of its fields. So the server puts the rows of a
block of pages together, each column's values end to end, with their lengths beside them where they differ. What is
left to do here is done to whole columns.

Not for rows whose values the server keeps elsewhere (TOAST): a block of them might be larger than a value can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from millpond.message import State
from millpond.transports.database.fetch.columns import Column, Kind, select
from millpond.transports.database.fetch.packed import NULL, array, is_constant
from millpond.transports.database.fetch.slices import Piece

_SENT = {Kind.ID: "uuid_send({})", Kind.MOMENT: f"int8send(coalesce({{}}, ({NULL})))"}
_GATHERED = (Kind.TEXT, Kind.BYTES)
_SHIFT = 1 << 32
_STATES = pa.array(list(State), pa.string())
# By the alphabet: so the commonest comes first.
_CODES = " ".join(f"WHEN '{state}' THEN {list(State).index(state)}" for state in sorted(State))
_WHOLE = {
    Kind.NUMBER: "{}",
    Kind.STATE: f"CASE {{}} {_CODES} END",
    Kind.TEXT: "coalesce(octet_length({}), -1)",
    Kind.BYTES: "coalesce(octet_length({}), -1)",
}
"""Columns that are whole numbers, or have one: a text's is its length."""


def gathering(columns: Sequence[Column], piece: Piece) -> str:
    """The statement that reads a piece block by block."""
    named = [(column.kind, f"t.c{n}") for n, column in enumerate(columns) if not is_constant(column)]
    whole = [_WHOLE[kind].format(name) for kind, name in named if kind in _WHOLE]
    # Two by two, since each call costs more than the arithmetic.
    pairs = [f"{a} * {_SHIFT} + {b}" for a, b in zip(whole[::2], [*whole[1::2], "0"], strict=False)]
    values = [_SENT[kind].format(name) for kind, name in named if kind in _SENT]
    values += [f"int8send({pair})" for pair in pairs]
    values += [name for kind, name in named if kind in _GATHERED]
    gathered = ["count(*) AS n", *(f"string_agg({value}, NULL)" for value in values)]
    return (
        f"SELECT g.* FROM {piece.blocks} AS b, LATERAL (SELECT {', '.join(gathered)} "
        f"FROM ({select(columns, piece.rest)}) AS t) AS g WHERE g.n > 0"
    )


def scatter(blocks: pa.RecordBatch, columns: Sequence[Column], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of each block."""
    counts, *values = blocks.columns
    for place, count in enumerate(counts.to_pylist()):
        arrays = _arrays(columns, count, [_value(column, place) for column in values])
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _value(column: pa.Array, place: int) -> pa.Buffer:
    """Not copied, as a scalar would be. Null is empty: nobody had a value."""
    _, offsets, data = column.buffers()
    start, end = np.frombuffer(offsets, np.int32)[column.offset + place :][:2].tolist()
    return data.slice(start, end - start) if data is not None else pa.py_buffer(b"")


def _arrays(columns: Sequence[Column], count: int, values: Sequence[pa.Buffer]) -> list[pa.Array]:
    kinds = [column.kind for column in columns if not is_constant(column)]
    rest = iter(values)
    sent = iter([next(rest) for kind in kinds if kind in _SENT])
    whole = _whole([next(rest) for _ in range(-(-sum(kind in _WHOLE for kind in kinds) // 2))])
    arrays = []
    for column in columns:
        if is_constant(column):
            arrays.append(pa.repeat(pa.scalar(int(column.sql), column.kind.arrow), count))
        elif column.kind in _SENT:
            arrays.append(array(column.kind, np.frombuffer(next(sent), np.uint8).reshape(count, -1)))
        elif column.kind is Kind.NUMBER:
            arrays.append(pa.array(next(whole)))
        elif column.kind is Kind.STATE:
            arrays.append(_STATES.take(pa.array(next(whole))))
        else:
            arrays.append(_varying(column.kind, next(whole), next(rest)))
    return arrays


def _whole(pairs: Sequence[pa.Buffer]) -> Iterator[np.ndarray]:
    for pair in pairs:
        both = np.frombuffer(pair, ">i8").astype(np.int64)
        second = both.astype(np.int32)  # its lower half, negative or not
        yield ((both - second) >> 32).astype(np.int32)
        yield second


def _varying(kind: Kind, lengths: np.ndarray, data: pa.Buffer) -> pa.Array:
    there = lengths >= 0
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.maximum(lengths, 0), out=ends[1:])
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(kind.arrow, len(lengths), [valid, pa.py_buffer(ends), data])
