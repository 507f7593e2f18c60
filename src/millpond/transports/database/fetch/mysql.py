"""MySQL's and MariaDB's rows, through asyncmy: unbuffered, so that a large answer waits in the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import pyarrow as pa
from asyncmy.cursors import SSCursor

from millpond.errors import Unreachable
from millpond.transports.database.dialect import Trouble
from millpond.transports.database.fetch import by_value
from millpond.transports.database.fetch.columns import Column, batches_of_rows, select
from millpond.transports.database.fetch.slices import Piece, Read, Slice
from millpond.transports.database.mysql import connecting, dialect
from millpond.transports.database.options import parse
from millpond.transports.database.running import meaning
from millpond.transports.database.statement import Rows, Style
from millpond.transports.url import Url

T = TypeVar("T")
_CHUNK = 256
_SIZE = "SELECT data_length FROM information_schema.tables WHERE table_schema = {database} AND table_name = :table"


class MysqlFetcher:
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        options = parse({"schema": schema, "table_prefix": table_prefix})
        self.dialect = dialect(options)
        self._url = url
        connect = connecting(url, options)
        # The driver is asynchronous and its caller is not: its loop runs only while something is awaited here.
        self._loop = asyncio.new_event_loop()
        try:
            self._connection: Any = self._wait(connect())
        except BaseException:
            self._loop.close()
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
        # Not closed here: closing reads an abandoned answer to its end, closing the connection does not.
        yield from batches_of_rows(iter(lambda: self._wait(cursor.fetchmany(_CHUNK)) or None, None), columns)

    def read(self, piece: Piece, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        return self.batches(select(columns, piece.rest), piece.params, columns)

    def slices(self, read: Read) -> Sequence[Slice]:
        table = self.dialect.table("archive" if read.table == "archive" else "message")
        found = self.rows(_SIZE, {"table": table})
        return by_value.slices(self.dialect, self.rows, read, int(found[0][0] or 0) if found else 0)

    def _rendered(self, text: str, params: Mapping[str, Any]) -> tuple[str, list[Any]]:
        return self.dialect.sql(text).render(Style.FORMAT, params)

    def _wait(self, answer: Awaitable[T]) -> T:
        try:
            return self._loop.run_until_complete(answer)
        except Exception as e:
            trouble = self.dialect.trouble(e)
            if trouble is Trouble.FOREIGN:
                raise
            if trouble is Trouble.LOST:
                raise Unreachable(f"no connection to the database at {self._url} ({type(e).__name__})") from e
            raise meaning(self._url, e, trouble) from e

    def rest(self) -> None:
        """Each statement was its own."""

    def close(self) -> None:
        self._connection.close()
        # The transport says goodbye on the loop's next turn.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_fetcher(url: Url, *, schema: str | None, table_prefix: str) -> MysqlFetcher:
    return MysqlFetcher(url, schema, table_prefix)
