"""SQLite's rows, through the standard module."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import pyarrow as pa

from millpond.errors import NotMigrated
from millpond.transports.database.fetch import by_value
from millpond.transports.database.fetch.columns import Column, batches_of_rows, select
from millpond.transports.database.fetch.slices import Piece, Read, Slice
from millpond.transports.database.options import parse
from millpond.transports.database.running import meaning
from millpond.transports.database.sqlite import dialect, open_connection
from millpond.transports.database.statement import Rows, Style
from millpond.transports.url import Url

_CHUNK = 256
_PATIENCE = 10.0


class SqliteFetcher:
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        self.dialect = dialect(parse({"schema": schema, "table_prefix": table_prefix}))
        self._url = url
        path = url.path.removeprefix("/")
        if not os.path.exists(path):  # looking must not make a file
            raise NotMigrated(f"there is no file {path}; check the URL, or make it with: millpond migrate {url}")
        self._connection = open_connection(path, _PATIENCE)

    def rows(self, text: str, params: Mapping[str, Any]) -> Rows:
        try:
            return self._execute(text, params).fetchall()
        except sqlite3.Error as e:
            raise meaning(self._url, e, self.dialect.trouble(e)) from e

    def batches(self, text: str, params: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        try:
            cursor = self._execute(text, params)
            yield from batches_of_rows(iter(lambda: cursor.fetchmany(_CHUNK), []), columns)
        except sqlite3.Error as e:
            raise meaning(self._url, e, self.dialect.trouble(e)) from e

    def read(self, piece: Piece, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        return self.batches(select(columns, piece.rest), piece.params, columns)

    def slices(self, read: Read) -> Sequence[Slice]:
        ((size,),) = self.rows("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()", {})
        return by_value.slices(self.dialect, self.rows, read, size)

    def _execute(self, text: str, params: Mapping[str, Any]) -> sqlite3.Cursor:
        return self._connection.execute(*self.dialect.sql(text).render(Style.QMARK, params))

    def rest(self) -> None:
        """Each statement was its own."""

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_fetcher(url: Url, *, schema: str | None, table_prefix: str) -> SqliteFetcher:
    return SqliteFetcher(url, schema, table_prefix)
