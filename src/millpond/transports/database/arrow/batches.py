"""The select list of an Arrow read, and record batches from the rows of drivers that return Python values.

Readers leave texts as bytes, because a driver refuses all rows if the text of one is no UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from millpond.seam.arrow import Column, Kind, arrow_schema
from millpond.transports.database.sql.columns import as_text

if TYPE_CHECKING:  # the driver of a Spark job plans without Arrow
    import pyarrow as pa

_ROWS = 8192
_BYTES = 8 << 20


def select(columns: Sequence[Column], rest: str) -> str:
    """A SELECT of these columns; `rest` begins with FROM."""
    return f"SELECT {', '.join(f'{column.sql} AS c{n}' for n, column in enumerate(columns))} {rest}"


def batches_of_rows(chunks: Iterable[Sequence[Any]], columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
    """Record batches from small chunks of rows.

    A batch is limited by rows and by bytes: a thousand large payloads need as much memory as many small ones.
    """
    schema = arrow_schema(columns)
    heavy = [n for n, column in enumerate(columns) if column.kind in (Kind.BYTES, Kind.TEXT)]
    rows: list[Any] = []
    size = 0
    for chunk in chunks:
        rows += chunk
        size += sum(len(row[n]) for row in chunk for n in heavy if row[n] is not None)
        if len(rows) >= _ROWS or size >= _BYTES:
            yield _batch(rows, columns, schema)
            rows, size = [], 0
    if rows:
        yield _batch(rows, columns, schema)


def _batch(rows: Sequence[Any], columns: Sequence[Column], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [_array(values, column.kind) for column, values in zip(columns, zip(*rows, strict=True), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], kind: Kind) -> pa.Array:
    import pyarrow as pa

    if kind is Kind.TIME:
        # Through int64: Arrow converts integers to a timestamp type one by one, ten times slower.
        return pa.array(values, pa.int64()).cast(kind.arrow)
    try:
        return pa.array(values, kind.arrow)
    except pa.ArrowInvalid:
        if kind is not Kind.TEXT:
            raise
        return pa.array([as_text(value) for value in values], kind.arrow)
