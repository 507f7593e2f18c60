"""The base of readers: rows of a database as Arrow record batches, in memory bounded by one batch.

    columns = [Column("id", Kind.ID, "{id_out}"), Column("due_at", Kind.TIME, "m.due_at")]
    with open_reader(url) as reader:
        text = select(columns, "FROM {message} m WHERE m.queue = :queue AND m.id >= :low")
        for batch in reader.batches(text, {"queue": "orders", "low": reader.dialect.id_in(id)}, columns):
            ...

A text is in the words of our statements. Its values are bound: text, integers, ids from `dialect.id_in`, None, and
lists of these after `IN (:*names)`. One call of `batches` is one statement and sees the database at one time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millpond.errors import NotMigrated, StoreError
from millpond.seam.arrow import ArrowReader, Column, Piece, Slice
from millpond.seam.streams import ClaimSlice
from millpond.transports.database.arrow.batches import select
from millpond.transports.database.arrow.slices import claim_piece
from millpond.transports.database.migration.migrate import APPLIED, judge
from millpond.transports.database.sql.dialect import NOW, Dialect
from millpond.transports.database.sql.statement import Rows
from millpond.transports.url import Url

if TYPE_CHECKING:
    import pyarrow


class DatabaseReader(ArrowReader):
    """The part of a reader that is the same for every database."""

    def __init__(self, url: Url, dialect: Dialect) -> None:
        self.dialect = dialect
        self._url = url

    @abstractmethod
    def rows(self, text: str, params: Mapping[str, Any]) -> Rows:
        """All rows of a small result."""

    @abstractmethod
    def batches(self, text: str, params: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[pyarrow.RecordBatch]:
        """The rows of one statement that selects exactly these columns, as they arrive."""

    def rest(self) -> None:
        """Do nothing where each statement is its own transaction."""

    def check(self) -> None:
        try:
            version = self.rows(APPLIED, {})[0][0] or 0
        except NotMigrated:
            version = 0
        judge(version, self.dialect, str(self._url))

    def now(self) -> int:
        return int(self.rows(NOW, {"now": None})[0][0])

    def is_alive(self) -> bool:
        try:
            self.rows("SELECT 1", {})
        except StoreError:
            return False
        return True

    def read(self, slice_: Slice, columns: Sequence[Column]) -> Iterator[pyarrow.RecordBatch]:
        for piece in slice_:
            yield from self._read_piece(piece, columns)
            if piece.rewritten is not None and self.rows(piece.rewritten, {})[0][0]:
                raise StoreError(
                    f"a partition of the archive at {self._url} was rewritten (VACUUM FULL, CLUSTER) or emptied "
                    "while it was read: read it again, or export again; an export has added nothing to its lake"
                )

    def read_claim(
        self, stream: int, seq: int, slice_: ClaimSlice, columns: Sequence[Column]
    ) -> Iterator[pyarrow.RecordBatch]:
        return self._read_piece(claim_piece(self.dialect, stream, seq, slice_), columns)

    def _read_piece(self, piece: Piece, columns: Sequence[Column]) -> Iterator[pyarrow.RecordBatch]:
        return self.batches(select(columns, piece.rest), piece.params, columns)
