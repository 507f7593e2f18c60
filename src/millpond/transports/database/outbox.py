"""Publish and settle on a connection that the caller already has, in the caller's own transaction.

Drivers are known by the module and name of their classes, so that none is imported that the caller does not
use. Nothing here commits, rolls back or changes a setting of the caller's session, and the driver's errors
pass unchanged. A connection that has no transaction open, and would not begin one by itself, is refused: each
statement would be committed alone, and a rollback would leave traces.

One coroutine serves both worlds: on a synchronous connection it never has to wait, so that it comes to its
end without an event loop.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from millpond.errors import WrongConnection
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Copy, Many, Query, Rows, Step, Steps, Style, drive_async

T = TypeVar("T")

ACCEPTED = (
    "a psycopg, asyncpg, sqlite3, aiosqlite, PyMySQL or asyncmy connection, an SQLAlchemy Session, AsyncSession, "
    "Connection or AsyncConnection over one of these, or Django's connection"
)


async def run(dialect: Dialect, connection: Any, steps: Steps[T]) -> T:
    """Run steps on the caller's connection, asynchronous or not."""
    return await _run(dialect, await _borrow(connection), steps)


def run_sync(dialect: Dialect, connection: Any, steps: Steps[T]) -> T:
    """Run steps on the caller's synchronous connection; needs no event loop."""
    if _found(connection, _ASYNCHRONOUS):
        raise WrongConnection(
            f"within= was given the asynchronous {_name(connection)}: use `await store.publish(...)` and "
            "`await store.settle(...)` with it, or give a synchronous connection"
        )
    return _without_waiting(_run(dialect, _without_waiting(_borrow(connection)), steps))


class Borrowed(Protocol):
    """A caller's connection, in a form that takes our steps."""

    database: str
    """The name of the dialect it speaks."""

    async def begun(self) -> bool:
        """Whether a transaction is open, or opens with the first statement."""

    async def execute(self, step: Step) -> Rows: ...


async def _run(dialect: Dialect, borrowed: Borrowed, steps: Steps[T]) -> T:
    if borrowed.database != dialect.name:
        raise WrongConnection(
            f"within= was given a connection to {borrowed.database}, and the store is in {dialect.name}: "
            "give a connection to the store's own database"
        )
    if not await borrowed.begun():
        raise WrongConnection(
            "within= was given a connection in autocommit mode with no transaction open, so that nothing could "
            "be rolled back: begin a transaction first"
        )
    return await drive_async(steps, borrowed.execute)


# --- DB-API drivers: a cursor, some with await before every call ----------------------------------------


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
                begun = _sqlite_begun(self.connection)
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
                    # Not by cursor.description, which psycopg does not know yet in a pipeline.
                    return await _now(cursor.fetchall()) if _ANSWERS.search(text) else ()
                case Many(statement, columns, rows):
                    await _now(cursor.executemany(*statement.render_many(self._style, columns, rows)))
                    return ()
                case Copy():
                    raise _no_copy()
        finally:
            await _now(cursor.close())


class Django(Cursors):
    """Django's `connection`, or one of `connections`; begins with `transaction.atomic()`."""

    def __init__(self, connection: Any) -> None:
        database = connection.vendor
        super().__init__(connection, database, Style.FORMAT, lambda c: c.cursor())

    async def begun(self) -> bool:
        return bool(self.connection.in_atomic_block or not self.connection.get_autocommit())


_ANSWERS = re.compile(r"^\(?(SELECT|WITH)\b|\bRETURNING\b")
"""The statements of ours that have rows to tell."""
_BEGIN = "BEGIN IMMEDIATE"
_IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS of the MySQL protocol
_IDLE = 0  # PQTRANS_IDLE of libpq


def _sqlite_begun(connection: Any) -> bool | None:
    """Whether a transaction is open; None: the module would begin one with the first write, so we may do it.

    We must: our first statement may be a read on which the write after it relies.
    """
    if connection.in_transaction:
        return True
    return None if connection.isolation_level is not None and _legacy(connection) else False


def _legacy(connection: Any) -> bool:
    """Whether sqlite3 manages transactions by isolation_level; from Python 3.12 on there is another way."""
    connection = getattr(connection, "_conn", connection)  # aiosqlite's own one inside
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
        begun = _sqlite_begun(raw.connection.driver_connection)
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


_STYLES = {
    "numeric_dollar": Style.DOLLAR,
    "format": Style.FORMAT,
    "pyformat": Style.FORMAT,
    "qmark": Style.QMARK,
}


async def _of_session(session: Any) -> Borrowed:
    return SqlAlchemy(await _now(session.connection()))


# --- which is which --------------------------------------------------------------------------------------


def _psycopg(connection: Any) -> Borrowed:
    # Not connection.cursor(): the caller may have chosen another cursor class, or rows that are no tuples.
    psycopg = sys.modules["psycopg"]
    cls = psycopg.AsyncCursor if _found(connection, _ASYNCHRONOUS) else psycopg.Cursor
    return Cursors(
        connection, "postgresql", Style.FORMAT, lambda c: cls(c, row_factory=sys.modules["psycopg.rows"].tuple_row)
    )


def _sqlite(connection: Any) -> Borrowed:
    async def cursor(c: Any) -> Any:
        plain = await _now(c.cursor())
        plain.row_factory = None  # the caller's may make rows that are no tuples
        return plain

    return Cursors(connection, "sqlite", Style.QMARK, cursor)


def of_mysql(connection: Any) -> Borrowed:
    package = "asyncmy" if _found(connection, _ASYNCHRONOUS) else "pymysql"
    return Cursors(connection, "mysql", Style.FORMAT, lambda c: c.cursor(sys.modules[f"{package}.cursors"].Cursor))


_SYNCHRONOUS: dict[str, Callable[[Any], Any]] = {
    "psycopg.Connection": _psycopg,
    "sqlite3.Connection": _sqlite,
    "pymysql.connections.Connection": of_mysql,
    "sqlalchemy.engine.base.Connection": SqlAlchemy,
    "sqlalchemy.orm.session.Session": _of_session,
    "sqlalchemy.orm.scoping.scoped_session": _of_session,
    "django.db.backends.base.base.BaseDatabaseWrapper": Django,
    "django.utils.connection.ConnectionProxy": Django,
}
_ASYNCHRONOUS: dict[str, Callable[[Any], Any]] = {
    "psycopg.AsyncConnection": _psycopg,
    "asyncpg.connection.Connection": Asyncpg,
    "asyncpg.pool.PoolConnectionProxy": Asyncpg,
    "aiosqlite.core.Connection": _sqlite,
    "asyncmy.connection.Connection": of_mysql,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": SqlAlchemy,
    "sqlalchemy.ext.asyncio.session.AsyncSession": _of_session,
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": _of_session,
}


async def _borrow(connection: Any) -> Borrowed:
    make = _found(connection, _SYNCHRONOUS) or _found(connection, _ASYNCHRONOUS)
    if make is None:
        raise _wrong(connection)
    borrowed: Borrowed = await _now(make(connection))
    return borrowed


def known_as(thing: Any) -> list[str]:
    """The full names of a thing's class and of those it comes from."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(thing).__mro__]


def _found(connection: Any, table: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any] | None:
    return next((table[name] for name in known_as(connection) if name in table), None)


def _name(connection: Any) -> str:
    return known_as(connection)[0]


def _wrong(connection: Any, more: str = "") -> WrongConnection:
    return WrongConnection(f"within= takes {ACCEPTED}; not {_name(connection)}{more}")


def _no_copy() -> AssertionError:
    return AssertionError("bulk loads are for connections of our own")


async def _now(value: Any) -> Any:
    """The value, whether it has to be awaited or not."""
    return await value if inspect.isawaitable(value) else value


def _without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise AssertionError("a synchronous connection made us wait")
