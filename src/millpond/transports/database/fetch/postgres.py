"""PostgreSQL's rows, through ADBC: COPY in binary straight to Arrow, no Python value per row.

COPY takes no parameters, and with parameters ADBC leaves COPY: half as fast, and the whole answer in memory at
once. So whole numbers and ids become literals, made here of checked values, and text is set as a setting of the
transaction (itself by a bound value), which the statement reads by `current_setting`: no text of a user's is ever
part of a statement, and indexes are used as ever.

Not through ADBC's DB-API module: importing that takes a second in every fresh process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from millpond.errors import StoreError, Unreachable
from millpond.transports.database.dialect import Trouble
from millpond.transports.database.fetch import by_page, by_value
from millpond.transports.database.fetch.blocks import gathering, scatter
from millpond.transports.database.fetch.columns import Column, arrow_schema, select
from millpond.transports.database.fetch.packed import packing, unpack
from millpond.transports.database.fetch.slices import Piece, Read, Slice
from millpond.transports.database.options import parse
from millpond.transports.database.postgres import check_url, dialect
from millpond.transports.database.running import meaning
from millpond.transports.database.statement import Rows, Style
from millpond.transports.url import Url

_PLACEHOLDER = re.compile(r"\$(\d+)")
_LARGEST = 2**63
_LARGE = {"adbc.postgresql.batch_size_hint_bytes": str(4 << 20)}
_SMALL = {"adbc.postgresql.use_copy": "false"}


class PostgresFetcher:
    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        check_url(url)
        self.dialect = dialect(parse({"schema": schema, "table_prefix": table_prefix}))
        self._url = url
        try:
            self._database = adbc_driver_postgresql.connect(libpq_uri(url))
            self._connection = adbc.AdbcConnection(self._database)
            # In a transaction from the first statement on: behind a pooler the next one could be in another session.
            self._connection.set_autocommit(False)
        except adbc.Error as e:
            raise self._meaning(e, connecting=True) from None

    def rows(self, text: str, params: Mapping[str, Any]) -> Rows:
        found = [batch.columns for batch in self._batches(text, params, copy=False)]
        return [row for columns in found for row in zip(*(c.to_pylist() for c in columns), strict=True)]

    def batches(self, text: str, params: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(columns)
        for batch in self._batches(packing(columns, text), params):
            yield unpack(batch, columns, schema)

    def read(self, piece: Piece, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        if piece.blocks is None:
            yield from self.batches(select(columns, piece.rest), piece.params, columns)
            return
        schema = arrow_schema(columns)
        for blocks in self._batches(gathering(columns, piece), piece.params):
            yield scatter(blocks, columns, schema)

    def slices(self, read: Read) -> Sequence[Slice]:
        if read.table == "archive":
            return by_page.slices(self.dialect, self.rows, read)
        # The rows of live messages move from page to page.
        ((size,),) = self.rows("SELECT pg_relation_size('{message}'::regclass)", {})
        return by_value.slices(self.dialect, self.rows, read, size)

    def _batches(self, text: str, params: Mapping[str, Any], *, copy: bool = True) -> Iterator[pa.RecordBatch]:
        literal = Literals()
        rendered, values = self.dialect.sql(text).render(Style.DOLLAR, params)
        sql = _PLACEHOLDER.sub(lambda match: literal(values[int(match[1]) - 1]), rendered)
        try:
            # To compile a large statement takes longer than it saves.
            self._set({**literal.settings, "jit": "off"} if copy else literal.settings)
            statement = adbc.AdbcStatement(self._connection)
            try:
                statement.set_sql_query(sql)
                # COPY is the fast way of a large answer, and of EXPLAIN no way at all.
                statement.set_options(**(_LARGE if copy else _SMALL))
                stream, _ = statement.execute_query()
                yield from pa.RecordBatchReader._import_from_c(stream.address)
            finally:
                statement.close()
        except adbc.Error as e:
            raise self._meaning(e) from None
        except (pa.ArrowException, OSError) as e:  # what happens in the middle of a stream comes through Arrow
            raise Unreachable(f"the answer of {self._url} broke off: {self._hidden(e)}") from None

    def _set(self, settings: Mapping[str, str]) -> None:
        for name, value in settings.items():
            statement = adbc.AdbcStatement(self._connection)
            try:
                statement.set_sql_query(f"SELECT set_config('{name}', $1, true)")
                row = pa.record_batch([pa.array([value])], names=["value"])
                statement.bind(row)
                stream, _ = statement.execute_query()
                pa.RecordBatchReader._import_from_c(stream.address).read_all()
            finally:
                statement.close()

    def _meaning(self, error: Exception, *, connecting: bool = False) -> Exception:
        trouble = self.dialect.trouble(error)
        if connecting and trouble is Trouble.FOREIGN:
            text = str(error)
            if "authentication failed" in text or "no password supplied" in text:
                trouble = Trouble.REFUSED
            elif "does not exist" in text and "database" in text:
                trouble = Trouble.NO_DATABASE
            else:
                return Unreachable(f"no connection to {self._url}: {self._hidden(error)}")
        elif getattr(error, "status_code", None) is adbc.AdbcStatusCode.IO and not getattr(error, "sqlstate", None):
            # What the server says has a state; the driver's word of a connection that broke has none.
            trouble = Trouble.LOST
        if trouble is Trouble.LOST:
            return Unreachable(f"no connection to {self._url}: {self._hidden(error)}")
        if trouble in (Trouble.OTHER, Trouble.FOREIGN):
            return StoreError(f"the database at {self._url} answered: {self._hidden(error)}")
        return meaning(self._url, error, trouble)

    def _hidden(self, error: Exception) -> str:
        """What the driver says, without the password that it might repeat from the URL."""
        text = str(error).strip()
        password = self._url.password
        return text.replace(password, "***").replace(quote(password, safe=""), "***") if password else text

    def rest(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Literals:
    """Values as they stand in a statement without parameters, and the settings that hold the texts among them."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}

    def __call__(self, value: Any) -> str:
        match value:
            case None:
                return "NULL"
            case int() if type(value) is int and -_LARGEST <= value < _LARGEST:
                return f"({value})"
            case UUID():
                return f"'{value.hex}'::uuid"
            case str():
                name = f"millpond.v{len(self.settings)}"
                self.settings[name] = value
                return f"current_setting('{name}')"
            case list() | tuple():
                return ", ".join(map(self, value))
        raise TypeError(f"{type(value).__name__} is no value for a fetch")


def libpq_uri(url: Url) -> str:
    """As libpq reads it: `search_path`, which asyncpg takes as it is, is one of the server's options there."""
    if "search_path" not in url.query:
        return url.raw
    query = dict(url.query)
    setting = f"-c search_path={query.pop('search_path')}"
    query["options"] = f"{query['options']} {setting}" if "options" in query else setting
    return urlsplit(url.raw)._replace(query=urlencode(query, quote_via=quote)).geturl()


def open_fetcher(url: Url, *, schema: str | None, table_prefix: str) -> PostgresFetcher:
    return PostgresFetcher(url, schema, table_prefix)
