"""Rows of PostgreSQL, through ADBC: binary COPY straight to Arrow, no Python value per row.

COPY takes no parameters. With parameters ADBC does not use COPY: it is half as fast and holds the whole result in
memory. So integers and ids become literals, made here from checked values. Text is bound to a setting of the
transaction, which the statement reads with `current_setting`. No user's text is ever part of a statement, and indexes
are used as usual.

ADBC's DB-API module is not used: importing it takes a second in every new process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit
from uuid import UUID

import adbc_driver_manager as adbc
import adbc_driver_postgresql
import pyarrow as pa

from millpond.clock import SECOND
from millpond.errors import StoreError, Unreachable
from millpond.seam.arrow import Column, Piece, Read, Slice, arrow_schema
from millpond.transports.database.arrow import by_value, closed
from millpond.transports.database.arrow.batches import select
from millpond.transports.database.arrow.reader import DatabaseReader
from millpond.transports.database.options import parse
from millpond.transports.database.postgres import pages
from millpond.transports.database.postgres.blocks import gather_statement, scatter
from millpond.transports.database.postgres.engine import check_url, dialect
from millpond.transports.database.postgres.packed import packed_statement, unpack
from millpond.transports.database.runner import translated
from millpond.transports.database.sql.dialect import ErrorKind
from millpond.transports.database.sql.statement import Rows, Style
from millpond.transports.url import Url

_PLACEHOLDER = re.compile(r"\$(\d+)")
_LARGEST = 2**63
_LARGE = {"adbc.postgresql.batch_size_hint_bytes": str(4 << 20)}
_SMALL = {"adbc.postgresql.use_copy": "false"}


class PostgresReader(DatabaseReader):
    short = 6 * 3600 * SECOND
    """A closed range below this length is read by the index, a longer one by the pages of its days' partitions."""

    def __init__(self, url: Url, schema: str | None, table_prefix: str) -> None:
        check_url(url)
        super().__init__(url, dialect(parse({"schema": schema, "table_prefix": table_prefix})))
        try:
            self._database = adbc_driver_postgresql.connect(libpq_uri(url))
            self._connection = adbc.AdbcConnection(self._database)
            # In a transaction from the first statement on: behind a pooler the next one could use another session.
            self._connection.set_autocommit(False)
        except adbc.Error as e:
            raise self._translated(e, connecting=True) from None

    def rows(self, text: str, params: Mapping[str, Any]) -> Rows:
        found = [batch.columns for batch in self._batches(text, params, copy=False)]
        return [row for columns in found for row in zip(*(c.to_pylist() for c in columns), strict=True)]

    def batches(self, text: str, params: Mapping[str, Any], columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(columns)
        for batch in self._batches(packed_statement(columns, text), params):
            yield unpack(batch, columns, schema)

    def _read_piece(self, piece: Piece, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        if piece.blocks is None:
            if piece.by_index:
                self._set({"enable_seqscan": "off"})
            yield from self.batches(select(columns, piece.rest), piece.params, columns)
            return
        schema = arrow_schema(columns)
        for blocks in self._batches(gather_statement(columns, piece), piece.params):
            yield scatter(blocks, columns, schema)

    def slices(self, read: Read) -> Sequence[Slice]:
        if read.table == "archive":
            return pages.slices(self.dialect, self.rows, read)
        # Not by pages: the rows of live messages move from page to page.
        ((size,),) = self.rows("SELECT pg_relation_size('{message}'::regclass)", {})
        return by_value.slices(self.dialect, self.rows, read, size)

    def closed_slices(self, since: int | None, until: int, at_least: int) -> Sequence[Slice]:
        if since is not None and until - since < self.short:
            return closed.by_time(self.dialect, since, until, at_least)
        return self.slices(closed.by_table(since, until, at_least))

    def _batches(self, text: str, params: Mapping[str, Any], *, copy: bool = True) -> Iterator[pa.RecordBatch]:
        literal = Literals()
        rendered, values = self.dialect.statement(text).render(Style.DOLLAR, params)
        sql = _PLACEHOLDER.sub(lambda match: literal(values[int(match[1]) - 1]), rendered)
        try:
            # JIT compilation of a large statement takes longer than it saves.
            self._set({**literal.settings, "jit": "off"} if copy else literal.settings)
            with adbc.AdbcStatement(self._connection) as statement:
                statement.set_sql_query(sql)
                # COPY is the fast way for a large result, but cannot run EXPLAIN.
                statement.set_options(**(_LARGE if copy else _SMALL))
                stream, _ = statement.execute_query()
                yield from pa.RecordBatchReader._import_from_c(stream.address)
        except adbc.Error as e:
            raise self._translated(e) from None
        except (pa.ArrowException, OSError) as e:  # errors in the middle of a stream come through Arrow
            raise Unreachable(f"the result from {self._url} was interrupted: {self._url.hide(e)}") from None

    def _set(self, settings: Mapping[str, str]) -> None:
        for name, value in settings.items():
            with adbc.AdbcStatement(self._connection) as statement:
                statement.set_sql_query(f"SELECT set_config('{name}', $1, true)")
                statement.bind(pa.record_batch([pa.array([value])], names=["value"]))
                stream, _ = statement.execute_query()
                pa.RecordBatchReader._import_from_c(stream.address).read_all()

    def _translated(self, error: Exception, *, connecting: bool = False) -> Exception:
        kind = self.dialect.error_kind(error)
        if connecting and kind is ErrorKind.FOREIGN:
            text = str(error)
            if "authentication failed" in text or "no password supplied" in text:
                kind = ErrorKind.REFUSED
            elif "does not exist" in text and "database" in text:
                kind = ErrorKind.NO_DATABASE
            else:
                kind = ErrorKind.LOST
        elif getattr(error, "status_code", None) is adbc.AdbcStatusCode.IO and not getattr(error, "sqlstate", None):
            # An error of the server has an SQLSTATE; the driver's error for a broken connection has none.
            kind = ErrorKind.LOST
        if kind is ErrorKind.LOST:
            return Unreachable(f"no connection to {self._url}: {self._url.hide(error)}")
        if kind in (ErrorKind.OTHER, ErrorKind.FOREIGN):
            return StoreError(f"the database at {self._url} answered: {self._url.hide(error)}")
        return translated(self._url, error, kind)

    def rest(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        self._connection.close()
        self._database.close()


class Literals:
    """Turns values into literals of a statement without parameters. `settings` holds the texts among them."""

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
        raise TypeError(f"{type(value).__name__} cannot be a parameter of a read")


def libpq_uri(url: Url) -> str:
    """The URL in libpq's form: `search_path`, a parameter for asyncpg, becomes part of `options`."""
    if "search_path" not in url.query:
        return url.raw
    query = dict(url.query)
    setting = f"-c search_path={query.pop('search_path')}"
    query["options"] = f"{query['options']} {setting}" if "options" in query else setting
    return urlsplit(url.raw)._replace(query=urlencode(query, quote_via=quote)).geturl()
