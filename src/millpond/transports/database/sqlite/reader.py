"""Rows of SQLite, through the standard module."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from millpond.errors import NotMigrated
from millpond.seam.arrow import Column, Read, Slice
from millpond.transports.database.arrow import by_value, closed
from millpond.transports.database.arrow.batches import batches_of_rows
from millpond.transports.database.arrow.reader import DatabaseReader
from millpond.transports.database.options import parse
from millpond.transports.database.runner import translated
from millpond.transports.database.sql.statement import Rows, Style
from millpond.transports.database.sqlite.engine import dialect, open_connection
from millpond.transports.url import Url

_CHUNK = 256
_PATIENCE = 10.0


class SqliteReader(DatabaseReader):
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        super().__init__(url, dialect(parse({"schema": schema, "table_prefix": table_prefix})))
        path = url.path.removeprefix("/")
        if not os.path.exists(path):  # a read must not create the file
            raise NotMigrated(f"there is no file {path}; check the URL, or make it with: millpond migrate {url}")
        # Cached readers pass from thread to thread, and one at a time has them.
        self._connection = open_connection(path, _PATIENCE, one_thread=False)
        self._connection.text_factory = bytes

    def rows(self, text: str, params: Mapping[str, Any]) -> Rows:
        try:
            return self._execute(text, params).fetchall()
        except sqlite3.Error as e:
            raise translated(self._url, e, self.dialect.error_kind(e)) from e

    def batches(self, text: str, params: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        try:
            cursor = self._execute(text, params)
            yield from batches_of_rows(iter(lambda: cursor.fetchmany(_CHUNK), []), columns)
        except sqlite3.Error as e:
            raise translated(self._url, e, self.dialect.error_kind(e)) from e

    def slices(self, read: Read) -> Sequence[Slice]:
        ((size,),) = self.rows("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()", {})
        return by_value.slices(self.dialect, self.rows, read, size)

    def closed_slices(self, since: int | None, until: int, at_least: int) -> Sequence[Slice]:
        if since is None:
            return self.slices(closed.by_table(since, until, at_least))
        return closed.by_time(self.dialect, since, until, at_least)

    def _execute(self, text: str, params: Mapping[str, Any]) -> sqlite3.Cursor:
        # Not cached: the texts of Spark's filters and columns have no end.
        return self._connection.execute(*self.dialect.statement(text).render(Style.QMARK, params))

    def close(self) -> None:
        self._connection.close()
