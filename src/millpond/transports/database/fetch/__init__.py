"""Rows of a database as Arrow record batches, in memory bounded by a batch: what Spark's executors read.

    columns = [Column("id", Kind.ID, "{id_out}"), Column("due_at", Kind.MOMENT, "m.due_at")]
    with open_fetcher(url, schema=None, table_prefix="") as fetcher:
        text = select(columns, "FROM {message} m WHERE m.queue = :queue AND m.id >= :low")
        for batch in fetcher.batches(text, {"queue": "orders", "low": fetcher.dialect.id_in(id)}, columns):
            ...

A text is in the words of `statements`, its values are bound: text, whole numbers, ids as `dialect.id_in` gives
them, None, and lists of these behind `IN (:*names)`. One call of `batches` is one statement, so that it sees one
moment of the database. Blocking and for one thread: no event loop is needed, or may be running.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from millpond.errors import MissingDriver, NotMigrated, UnknownScheme
from millpond.transports.database.fetch.columns import Column, Kind, select
from millpond.transports.database.fetch.slices import Piece, Read, Slice
from millpond.transports.database.migrate import APPLIED, judge
from millpond.transports.database.statement import Rows
from millpond.transports.database.statements import NOW

if TYPE_CHECKING:
    import pyarrow

    from millpond.transports.database.dialect import Dialect
    from millpond.transports.url import Url

__all__ = ["Column", "Fetcher", "Kind", "Piece", "Read", "Slice", "check", "now", "open_fetcher", "select"]


class Fetcher(Protocol):
    """One connection, for reading only. Errors are those of `millpond.errors`."""

    dialect: Dialect

    def rows(self, text: str, params: Mapping[str, Any]) -> Rows:
        """All rows of a small answer."""

    def batches(self, text: str, params: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[pyarrow.RecordBatch]:
        """The rows of one statement that selects exactly these columns, as they arrive."""

    def read(self, piece: Piece, columns: Sequence[Column]) -> Iterator[pyarrow.RecordBatch]:
        """The rows of a piece of `slices`, as they arrive."""

    def slices(self, read: Read) -> Sequence[Slice]:
        """The parts of a table that can be read side by side, sized by what the database knows of it."""

    def rest(self) -> None:
        """End the transaction, if there is one: nothing is read for a while."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


_MODULES = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}


def open_fetcher(url: Url, *, schema: str | None = None, table_prefix: str = "") -> Fetcher:
    """Connect."""
    if url.scheme not in _MODULES:
        raise UnknownScheme(
            f"no database for {url.scheme}:// URLs; there are {', '.join(f'{name}://' for name in _MODULES)}"
        )
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[url.scheme]}")
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("millpond"):
            raise
        extra = _MODULES[url.scheme]
        raise MissingDriver(
            f"reading {url.scheme}:// with Spark needs the package {e.name}; install it with: "
            f'pip install "millpond[spark,{extra}]"'
        ) from e
    fetcher: Fetcher = module.open_fetcher(url, schema=schema, table_prefix=table_prefix)
    return fetcher


def check(fetcher: Fetcher, url: Url) -> None:
    """Raise what to do unless the database has our tables. For the driver, before it plans."""
    try:
        version = fetcher.rows(APPLIED, {})[0][0] or 0
    except NotMigrated:
        version = 0
    judge(version, fetcher.dialect, str(url))


def now(fetcher: Fetcher) -> int:
    """The database's own moment, in microseconds."""
    moment: int = fetcher.rows(NOW, {"now": None})[0][0]
    return moment
