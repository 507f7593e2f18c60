"""PostgreSQL sends many rows as one, column by column, nearly in Arrow's layout.

Receiving a row has a fixed cost, and so has each of its fields. So the server concatenates the values of each column
over a block of pages, with their lengths where these differ. This module then works on whole columns.

Most messages have equal values in certain pairs of columns, or NULL in certain columns. A bit per row marks the
exceptions, and only those are sent.

Rows with values outside the table (TOAST) are not read this way: a block could exceed the largest value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from millpond.message import State
from millpond.seam.arrow import Column, Kind, Piece
from millpond.transports.database.arrow.batches import select
from millpond.transports.database.postgres.packed import NULL, constant, ids, is_constant, times

_USUAL: Mapping[str, str | None] = {
    "due_at": "created_at",
    "first_attempt_at": "acquired_at",
    "last_attempt_at": "archived_at",
    "attempts": "deliveries",
    "expires_at": None,
    "headers": None,
    "reason": None,
    "error": None,
}
"""Column -> the column with the same value, or None for NULL, in a message that was due at once and ran once."""

_GATHERED = (Kind.TEXT, Kind.BYTES)
_LENGTH = "octet_length({})"
_SENT = {Kind.ID: "uuid_send({})", Kind.TIME: f"int8send(coalesce({{}}, ({NULL})))"}
_WHOLE = {Kind.NUMBER: "{}", Kind.TEXT: f"coalesce({_LENGTH}, -1)", Kind.BYTES: f"coalesce({_LENGTH}, -1)"}
"""Columns that are integers or send one: a text sends its length."""
_SENT_ALONE = {Kind.TIME: _SENT[Kind.TIME], Kind.NUMBER: "int4send({})", Kind.TEXT: f"int4send({_LENGTH})"}
_NOTHING = {Kind.TIME: (NULL, np.int64), Kind.TEXT: (-1, np.int32)}
_SHIFT = 1 << 32
_STATES = pa.array(list(State), pa.string())
# In alphabetical order: COMPLETED, the most frequent, comes first.
_CODES = " ".join(f"WHEN '{state}' THEN {list(State).index(state)}" for state in sorted(State))
_MARK = 8
"""The lowest mark of a column; the lower bits hold the code of the state."""


def gather_statement(columns: Sequence[Column], piece: Piece) -> str:
    """The statement that reads a piece block by block."""
    always, seldom = _travelling(columns)
    values = [_SENT[kind].format(f"t.c{n}") for n, kind in always.items() if kind in _SENT]
    whole = [_WHOLE[kind].format(f"t.c{n}") for n, kind in always.items() if kind in _WHOLE]
    marks = [f"CASE t.c{n} {_CODES} END" for n, kind in always.items() if kind is Kind.STATE]
    conditions = [
        f"t.c{n} IS DISTINCT FROM {'NULL' if usual is None else f't.c{usual}'}" for n, usual in seldom.items()
    ]
    marks += [f"CASE WHEN {differs} THEN {_MARK << bit} ELSE 0 END" for bit, differs in enumerate(conditions)]
    whole += [f"({' + '.join(marks)})"] if marks else []
    # Two numbers in one call: the call costs more than the arithmetic.
    pairs = [f"{a} * {_SHIFT} + {b}" for a, b in zip(whole[::2], [*whole[1::2], "0"], strict=False)]
    values += [f"int8send({pair})" for pair in pairs]
    values += [f"t.c{n}" for n, kind in always.items() if kind in _GATHERED]
    gathered = ["count(*) AS n", *(f"string_agg({value}, NULL)" for value in values)]
    for n, differs in zip(seldom, conditions, strict=True):
        gathered.append(f"string_agg({_SENT_ALONE[columns[n].kind].format(f't.c{n}')}, NULL) FILTER (WHERE {differs})")
        gathered += [f"string_agg(t.c{n}, NULL)"] if columns[n].kind in _GATHERED else []
    return (
        f"SELECT g.* FROM {piece.blocks} AS b, LATERAL (SELECT {', '.join(gathered)} "
        f"FROM ({select(columns, piece.rest)}) AS t) AS g WHERE g.n > 0"
    )


def scatter(blocks: pa.RecordBatch, columns: Sequence[Column], schema: pa.Schema) -> pa.RecordBatch:
    """The rows of blocks as a batch of the requested columns."""
    always, seldom = _travelling(columns)
    counts, *values = blocks.columns
    count = sum(counts.to_pylist())
    rest = map(_end_to_end, values)
    arrays = {n: constant(column, count) for n, column in enumerate(columns) if is_constant(column)}
    numbers: dict[int, np.ndarray] = {}  # also times, and lengths of texts
    for n, kind in always.items():
        if kind is Kind.ID:
            arrays[n] = ids(np.frombuffer(next(rest), np.uint8))
        elif kind is Kind.TIME:
            numbers[n] = np.frombuffer(next(rest), ">i8").astype(np.int64)
    with_whole = [n for n, kind in always.items() if kind in _WHOLE]
    has_marks = bool(seldom) or Kind.STATE in always.values()
    halves = _halves([next(rest) for _ in range(-(-(len(with_whole) + has_marks) // 2))])
    numbers |= {n: next(halves) for n in with_whole}
    marks = next(halves) if has_marks else np.empty(0, np.int32)
    for n, kind in always.items():
        if kind is Kind.STATE:
            arrays[n] = _STATES.take(pa.array(marks & (_MARK - 1)))
        elif n in numbers:
            arrays[n] = _array(kind, numbers[n], next(rest) if kind in _GATHERED else None)
    for bit, (n, usual) in enumerate(seldom.items()):
        kind = columns[n].kind
        sent = np.frombuffer(next(rest), ">i8" if kind is Kind.TIME else ">i4")
        data = next(rest) if kind in _GATHERED else None
        if not len(sent):
            arrays[n] = pa.nulls(count, kind.arrow) if usual is None else arrays[usual]
            continue
        found = numbers[usual].copy() if usual is not None else np.full(count, *_NOTHING[kind])
        found[(marks & (_MARK << bit)) != 0] = sent
        arrays[n] = _array(kind, found, data)
    return pa.RecordBatch.from_arrays([arrays[n] for n in range(len(columns))], schema=schema)


def _travelling(columns: Sequence[Column]) -> tuple[dict[int, Kind], dict[int, int | None]]:
    """Columns that are sent always (index -> kind), and only if unusual (index -> index of the usual value)."""
    places = {column.name: n for n, column in enumerate(columns)}
    seldom = {
        places[name]: None if usual is None else places[usual]
        for name, usual in _USUAL.items()
        if name in places and (usual is None or usual in places)
    }
    always = {n: column.kind for n, column in enumerate(columns) if n not in seldom and not is_constant(column)}
    return always, seldom


def _end_to_end(values: pa.Array) -> pa.Buffer:
    """The concatenated bytes, not copied. A null, where no row had a value, has no bytes."""
    _, offsets, data = values.buffers()
    start, end = np.frombuffer(offsets, np.int32)[[values.offset, values.offset + len(values)]].tolist()
    return data.slice(start, end - start) if data is not None else pa.py_buffer(b"")


def _halves(pairs: Sequence[pa.Buffer]) -> Iterator[np.ndarray]:
    for pair in pairs:
        both = np.frombuffer(pair, ">i4").reshape(-1, 2).astype(np.int32)
        yield both[:, 0] - (both[:, 1] >> 31)  # a negative second number had borrowed one from the first
        yield np.ascontiguousarray(both[:, 1])


def _array(kind: Kind, numbers: np.ndarray, data: pa.Buffer | None) -> pa.Array:
    if kind is Kind.TIME:
        return times(numbers)
    return pa.array(numbers) if data is None else _varying(kind, numbers, data)


def _varying(kind: Kind, lengths: np.ndarray, data: pa.Buffer) -> pa.Array:
    there = lengths >= 0
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.maximum(lengths, 0), out=ends[1:])
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(kind.arrow, len(lengths), [valid, pa.py_buffer(ends), data])
