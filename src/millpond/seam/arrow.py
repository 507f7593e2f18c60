"""Blocking Arrow access to a database: the values of a read, and the protocols of readers and writers.

Open them with `millpond.transports.open_reader`, `open_writer` and `open_part_writer`. Each has one connection and
serves one thread. It needs no event loop, and none may be running in that thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:  # processes that only ask for names and types do not load Arrow
    import pyarrow as pa

    from millpond.seam.bulk import Batch, Written
    from millpond.seam.streams import ClaimSlice
    from millpond.transports.shard_map import ShardRecord


class Kind(Enum):
    """The kind of a column, the same for every database."""

    ID = auto()
    """Text in Arrow."""
    TEXT = auto()
    STATE = auto()
    """One of `State`; text in Arrow."""
    NUMBER = auto()
    """A 32-bit integer."""
    BYTES = auto()
    TIME = auto()
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
            case Kind.TIME:
                return pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind
    sql: str
    """The expression in the words of our statements, such as `{id_out}`; never a user's text."""


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([pa.field(column.name, column.kind.arrow) for column in columns])


class Operator(Enum):
    EQUAL = "="
    BELOW = "<"
    AT_MOST = "<="
    ABOVE = ">"
    AT_LEAST = ">="
    AMONG = "IN"
    IS_NULL = "IS NULL"
    IS_NOT_NULL = "IS NOT NULL"


@dataclass(frozen=True)
class Condition:
    """One comparison. `column` is one of our names; the value is text, an integer or a UUID, or a list of them."""

    column: str
    operator: Operator
    value: Any = None


@dataclass(frozen=True)
class Read:
    """A read of one table, `messages` or `archive`."""

    table: str
    conditions: Sequence[Condition] = ()
    at_least: int = 1
    """Minimum number of slices, if the table is large enough."""
    snapshot: bool = True
    """All slices show the database at one time. A database that can do so only within one statement gives one slice."""

    @property
    def source(self) -> str:
        return "{archive}" if self.table == "archive" else "{message}"


@dataclass(frozen=True)
class Piece:
    """One statement of a read. Callers pass it on unread."""

    rest: str
    """The statement after its select list."""
    params: Mapping[str, Any] = field(default_factory=dict)
    blocks: str | None = None
    """A table `b` to which `rest` refers. The rows found for each row of it may travel as one."""
    rewritten: str | None = None
    """A query to run after the rows, in their transaction; a result other than 0 means that rows were moved."""
    by_index: bool = False
    """Read by an index even if the server knows too little of the table to choose it."""


Slice = Sequence[Piece]
"""The part of a read that one task reads, piece by piece."""


class Closing(Protocol):
    """A value that a `with` block closes at its end."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ArrowReader(Closing, Protocol):
    """One connection for reading. Errors are those of `millpond.errors`."""

    def check(self) -> None:
        """Raise an error with the remedy unless the database has our tables. For the driver, before it plans."""

    def now(self) -> int:
        """The database's time in microseconds."""

    def is_alive(self) -> bool:
        """Whether the connection still works; the server may have been restarted."""

    def slices(self, read: Read) -> Sequence[Slice]:
        """The parts of a table that can be read in parallel. Each row is in exactly one of them."""

    def closed_slices(self, since: int | None, until: int, at_least: int) -> Sequence[Slice]:
        """Slices of the archived rows in [since, until), a range that never changes again (`exports.close_archive`)."""

    def read(self, slice_: Slice, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        """The rows of a slice in batches as they arrive. Raises if the table was rewritten during the read."""

    def read_claim(
        self, stream: int, seq: int, slice_: ClaimSlice, columns: Sequence[Column]
    ) -> Iterator[pa.RecordBatch]:
        """The rows of one slice of a stream's claim, in batches as they arrive."""

    def rest(self) -> None:
        """End the transaction, if there is one: nothing is read for a while."""


class ArrowWriter(Closing, Protocol):
    """One connection for writing into the staging tables."""

    def load(self, batch: Batch, rows: pa.Table) -> int:
        """Stage a table of rows in one transaction; returns the number of its lot."""


class PartWriter(Closing, Protocol):
    """One transaction that publishes one part of a batch, unless it was published before."""

    def load(self, rows: pa.Table) -> None:
        """Write rows with new ids. They stay invisible until the commit."""

    def commit(self, queues: Collection[str], *, routed: ShardRecord | None = None) -> Written:
        """Publish, and wake workers that wait for these queues. `routed`: as for `Bulk.publish`."""

    def close(self) -> None:
        """Close the connection. Without a commit nothing is left behind."""
