"""An adapter for each driver whose connections callers may pass.

Drivers are recognised by the module and name of their classes; none is imported that the caller does not use.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Protocol

from millpond.errors import WrongConnection
from millpond.transports.database.sql.statement import Copy, Many, Query, Rows, Step, Style

ACCEPTED = (
    "a psycopg, asyncpg, sqlite3, aiosqlite, PyMySQL or asyncmy connection, an SQLAlchemy Session, AsyncSession, "
    "Connection or AsyncConnection over one of these, or Django's connection"
)


class Borrowed(Protocol):
    """A caller's connection that takes our steps."""

    database: str
    """The name of the dialect it speaks."""
    connection: Any

    async def begun(self) -> bool:
        """True if a transaction is open, or opens with the first statement."""

    async def execute(self, step: Step) -> Rows: ...

    def is_busy(self, error: Exception) -> bool:
        """True if the driver refused a statement because another one was under way."""


# --- DB-API drivers: cursors, some of them awaited ----------------------------------------


class Cursors:
    """A connection that works by cursors."""

    def __init__(self, connection: Any, database: str, style: Style, cursor: Callable[[Any], Any]) -> None:
        self.connection = connection
        self.database = database
        self._style = style
        self._cursor = cursor

    async def begun(self) -> bool:
        match self.database:
            case "sqlite":
                begun = await _sqlite_begun(self.connection)
                if begun is None:
                    await _now(self.connection.execute(_BEGIN))
                return begun is not False
            case "mysql":
                return not self.connection.get_autocommit() or bool(self.connection.server_status & _IN_TRANSACTION)
            case _:
                return not self.connection.autocommit or self.connection.info.transaction_status != _IDLE

    async def execute(self, step: Step) -> Rows:
        cursor = await _now(self._cursor(self.connection))
        try:
            match step:
                case Query(statement, params):
                    text, values = statement.render(self._style, params)
                    await _now(cursor.execute(text, values))
                    # Not by cursor.description: in a pipeline psycopg does not know it yet.
                    return await _now(cursor.fetchall()) if _ANSWERS.search(text) else ()
                case Many(statement, columns, rows):
                    await _now(cursor.executemany(*statement.render_many(self._style, columns, rows)))
                    return ()
                case Copy():
                    raise _no_copy()
        finally:
            await _now(cursor.close())

    def is_busy(self, error: Exception) -> bool:
        return False  # these drivers do not refuse it


class Django(Cursors):
    """Django's `connection`, or one of `connections`; begins with `transaction.atomic()`."""

    def __init__(self, connection: Any) -> None:
        database = connection.vendor
        super().__init__(connection, database, Style.FORMAT, lambda c: c.cursor())

    async def begun(self) -> bool:
        return bool(self.connection.in_atomic_block or not self.connection.get_autocommit())


_ANSWERS = re.compile(r"^\(?(SELECT|WITH)\b|\bRETURNING\b")
"""Our statements that return rows."""
_BEGIN = "BEGIN IMMEDIATE"
_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS of the MySQL protocol
_IDLE = 0  # PQTRANS_IDLE of libpq


async def _sqlite_begun(connection: Any) -> bool | None:
    """True if a transaction is open. None if the module would begin one with the first write, so we may do it.

    We must, because our first statement may be a read on which the write after it relies.
    """
    if connection.in_transaction:
        return True
    return None if connection.isolation_level is not None and await _legacy(connection) else False


async def _legacy(connection: Any) -> bool:
    """True if sqlite3 manages transactions by isolation_level; Python 3.12 added another way."""
    if inner := getattr(connection, "_conn", None):  # aiosqlite: the attribute can be read in its thread only
        mode = await connection._execute(getattr, inner, "autocommit", -1)
    else:
        mode = getattr(connection, "autocommit", -1)
    return mode is not True and mode is not False


# --- asyncpg ---------------------------------------------------------------------------------------------


class Asyncpg:
    database = "postgresql"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def begun(self) -> bool:
        return bool(self.connection.is_in_transaction())

    async def execute(self, step: Step) -> Rows:
        match step:
            case Query(statement, params):
                text, values = statement.render(Style.DOLLAR, params)
                rows: Rows = await self.connection.fetch(text, *values)
                return rows
            case Many(statement, columns, records):
                await self.connection.executemany(*statement.render_many(Style.DOLLAR, columns, records))
                return ()
            case Copy(table, schema, columns, records):
                await self.connection.copy_records_to_table(table, schema_name=schema, columns=columns, records=records)
                return ()

    def is_busy(self, error: Exception) -> bool:
        return type(error).__name__ == "InterfaceError" and "another operation is in progress" in str(error)


# --- SQLAlchemy ------------------------------------------------------------------------------------------


class SqlAlchemy:
    """A Connection or AsyncConnection, in the parameter style of the driver below it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.database = {"mariadb": "mysql"}.get(connection.dialect.name, connection.dialect.name)
        try:
            self._style = _STYLES[connection.dialect.paramstyle]
        except KeyError:
            raise _wrong(connection, f" over the driver {connection.dialect.driver!r}") from None

    async def begun(self) -> bool:
        if self._autocommit():
            return False
        if self.database != "sqlite":
            return True  # with the first statement
        raw = getattr(self.connection, "sync_connection", self.connection)
        begun = await _sqlite_begun(raw.connection.driver_connection)
        if begun is None:
            await _now(self.connection.exec_driver_sql(_BEGIN))
        return begun is not False

    def _autocommit(self) -> bool:
        raw = getattr(self.connection, "sync_connection", self.connection)
        level = raw.get_execution_options().get("isolation_level") or raw.dialect._on_connect_isolation_level
        return bool(level == "AUTOCOMMIT")

    async def execute(self, step: Step) -> Rows:
        match step:
            case Query(statement, params):
                text, values = statement.render(self._style, params)
                result = await _now(self.connection.exec_driver_sql(text, tuple(values)))
                return result.fetchall() if result.returns_rows else ()
            case Many(statement, columns, rows):
                text, records = statement.render_many(self._style, columns, rows)
                await _now(self.connection.exec_driver_sql(text, list(map(tuple, records))))
                return ()
            case Copy():
                raise _no_copy()

    def is_busy(self, error: Exception) -> bool:
        return False  # these drivers do not refuse it


_STYLES = {
    "numeric_dollar": Style.DOLLAR,
    "format": Style.FORMAT,
    "pyformat": Style.FORMAT,
    "qmark": Style.QMARK,
}


async def _session_connection(session: Any) -> Borrowed:
    return SqlAlchemy(await _now(session.connection()))


# --- which adapter for which class -----------------------------------------------------------------------


def _psycopg(connection: Any) -> Borrowed:
    # Not connection.cursor(): the caller may have chosen another cursor class, or rows that are no tuples.
    psycopg = sys.modules["psycopg"]
    cls = psycopg.AsyncCursor if is_asynchronous(connection) else psycopg.Cursor
    return Cursors(
        connection, "postgresql", Style.FORMAT, lambda c: cls(c, row_factory=sys.modules["psycopg.rows"].tuple_row)
    )


def _sqlite(connection: Any) -> Borrowed:
    async def cursor(c: Any) -> Any:
        plain = await _now(c.cursor())
        plain.row_factory = None  # the caller's may make rows that are no tuples
        return plain

    return Cursors(connection, "sqlite", Style.QMARK, cursor)


def mysql_cursors(connection: Any) -> Borrowed:
    package = "asyncmy" if is_asynchronous(connection) else "pymysql"
    return Cursors(connection, "mysql", Style.FORMAT, lambda c: c.cursor(sys.modules[f"{package}.cursors"].Cursor))


_SYNCHRONOUS: dict[str, Callable[[Any], Any]] = {
    "psycopg.Connection": _psycopg,
    "sqlite3.Connection": _sqlite,
    "pymysql.connections.Connection": mysql_cursors,
    "sqlalchemy.engine.base.Connection": SqlAlchemy,
    "sqlalchemy.orm.session.Session": _session_connection,
    "sqlalchemy.orm.scoping.scoped_session": _session_connection,
    "django.db.backends.base.base.BaseDatabaseWrapper": Django,
    "django.utils.connection.ConnectionProxy": Django,
}
_ASYNCHRONOUS: dict[str, Callable[[Any], Any]] = {
    "psycopg.AsyncConnection": _psycopg,
    "asyncpg.connection.Connection": Asyncpg,
    "asyncpg.pool.PoolConnectionProxy": Asyncpg,
    "aiosqlite.core.Connection": _sqlite,
    "asyncmy.connection.Connection": mysql_cursors,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": SqlAlchemy,
    "sqlalchemy.ext.asyncio.session.AsyncSession": _session_connection,
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": _session_connection,
}


async def adapt(connection: Any) -> Borrowed:
    """The adapter for a caller's connection."""
    make = _found(connection, _SYNCHRONOUS) or _found(connection, _ASYNCHRONOUS)
    if make is None:
        raise _wrong(connection)
    borrowed: Borrowed = await _now(make(connection))
    return borrowed


def driver_connection(borrowed: Borrowed) -> Any:
    """The driver's own connection, which a library keeps in its pool."""
    connection: Any = borrowed.connection
    if isinstance(borrowed, SqlAlchemy):
        return getattr(connection, "sync_connection", connection).connection.driver_connection
    return connection.connection if isinstance(borrowed, Django) else connection


def class_names(thing: Any) -> list[str]:
    """The full names of an object's class and its base classes."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(thing).__mro__]


def is_asynchronous(connection: Any) -> bool:
    return _found(connection, _ASYNCHRONOUS) is not None


def _found(connection: Any, table: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    return next((table[name] for name in class_names(connection) if name in table), None)


def _wrong(connection: Any, more: str = "") -> WrongConnection:
    return WrongConnection(f"within= takes {ACCEPTED}; not {class_names(connection)[0]}{more}")


def _no_copy() -> AssertionError:
    return AssertionError("bulk loads run on our own connections only")


async def _now(value: Any) -> Any:
    """The value, awaited if necessary."""
    return await value if inspect.isawaitable(value) else value
