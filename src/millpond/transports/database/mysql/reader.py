"""Rows of MySQL and MariaDB, through asyncmy. They are unbuffered: a large result waits in the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from asyncmy.cursors import SSCursor

from millpond.errors import Unreachable
from millpond.seam.arrow import Column, Read, Slice
from millpond.transports.database.arrow import by_value, closed
from millpond.transports.database.arrow.batches import batches_of_rows
from millpond.transports.database.arrow.reader import DatabaseReader
from millpond.transports.database.mysql.engine import dialect, make_connector
from millpond.transports.database.options import parse
from millpond.transports.database.runner import translated
from millpond.transports.database.sql.dialect import ErrorKind
from millpond.transports.database.sql.statement import Rows, Style
from millpond.transports.url import Url

T = TypeVar("T")
_CHUNK = 256
_SIZE = "SELECT data_length FROM information_schema.tables WHERE table_schema = {database} AND table_name = :table"


class MysqlReader(DatabaseReader):
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        options = parse({"schema": schema, "table_prefix": table_prefix})
        super().__init__(url, dialect(options))
        connect = make_connector(url, options)
        # The driver is asynchronous and its caller is not: the loop runs only while something is awaited here.
        self._loop = asyncio.new_event_loop()
        self._connection: Any = None
        try:
            self._connection = self._wait(connect())
            self._wait(self._connection.query("SET character_set_results = binary"))
        except BaseException:
            self.close()
            raise

    def rows(self, text: str, params: Mapping[str, Any]) -> Rows:
        cursor = self._connection.cursor()
        try:
            self._wait(cursor.execute(*self._rendered(text, params)))
            rows: Rows = self._wait(cursor.fetchall())
            return rows
        finally:
            self._loop.run_until_complete(cursor.close())

    def batches(self, text: str, params: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        cursor = self._connection.cursor(SSCursor)
        self._wait(cursor.execute(*self._rendered(text, params)))
        # Not closed here: closing a cursor reads an abandoned result to its end, closing the connection does not.
        yield from batches_of_rows(iter(lambda: self._wait(cursor.fetchmany(_CHUNK)) or None, None), columns)

    def slices(self, read: Read) -> Sequence[Slice]:
        table = self.dialect.table("archive" if read.table == "archive" else "message")
        found = self.rows(_SIZE, {"table": table})
        return by_value.slices(self.dialect, self.rows, read, int(found[0][0] or 0) if found else 0)

    def closed_slices(self, since: int | None, until: int, at_least: int) -> Sequence[Slice]:
        if since is None:
            return self.slices(closed.by_table(since, until, at_least))
        return closed.by_time(self.dialect, since, until, at_least)

    def _rendered(self, text: str, params: Mapping[str, Any]) -> tuple[str, list[Any]]:
        # Not cached: the texts of Spark's filters and columns have no end.
        return self.dialect.statement(text).render(Style.FORMAT, params)

    def _wait(self, answer: Awaitable[T]) -> T:
        try:
            return self._loop.run_until_complete(answer)
        except Exception as e:
            kind = self.dialect.error_kind(e)
            if kind is ErrorKind.FOREIGN:
                raise
            if kind is ErrorKind.LOST:
                raise Unreachable(f"no connection to the database at {self._url} ({type(e).__name__})") from e
            raise translated(self._url, e, kind) from e

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        # The transport ends the connection on the next iteration of the loop.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
