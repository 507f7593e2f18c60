"""What a fetched column is called, of which kind it is, and how a database says it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Spark asks for names and types in processes that need no more
    import pyarrow as pa


class Kind(Enum):
    """The kinds of columns, the same from every database."""

    ID = auto()
    """As `{id_out}` gives it; text in Arrow."""
    TEXT = auto()
    STATE = auto()
    """One of `State`; text in Arrow."""
    NUMBER = auto()
    """Of 32 bits."""
    BYTES = auto()
    MOMENT = auto()
    """Microseconds since 1970 in the database, a timestamp in UTC in Arrow."""

    @property
    def arrow(self) -> pa.DataType:
        import pyarrow as pa

        match self:
            case Kind.ID | Kind.TEXT | Kind.STATE:
                return pa.string()
            case Kind.NUMBER:
                return pa.int32()
            case Kind.BYTES:
                return pa.binary()
            case Kind.MOMENT:
                return pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind
    sql: str
    """In the words of `statements`, such as `m.queue`; our own text, never a user's."""


def select(columns: Sequence[Column], rest: str) -> str:
    """The text that fetches the columns: `rest` begins with FROM."""
    return f"SELECT {', '.join(f'{column.sql} AS c{n}' for n, column in enumerate(columns))} {rest}"


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([pa.field(column.name, column.kind.arrow) for column in columns])


_ROWS = 8192
_BYTES = 8 << 20


def batches_of_rows(chunks: Iterable[Sequence[Any]], columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
    """Record batches from small chunks of rows, for drivers that give Python values.

    A batch ends by its rows or by its bytes: a thousand large payloads are as much as many small ones.
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

    arrays = [
        # Through whole numbers: of a timestamp's type Arrow would take them one by one, ten times slower.
        pa.array(values, pa.int64()).cast(column.kind.arrow)
        if column.kind is Kind.MOMENT
        else pa.array(values, column.kind.arrow)
        for column, values in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
