"""MySQL 8 and MariaDB 10.6+, through asyncmy, at READ COMMITTED."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import asyncmy
import asyncmy.errors

from millpond.clock import SECOND, micros, seconds
from millpond.errors import InvalidURL
from millpond.transports.database.borrowed.pool import BorrowedEngine, pool_adapter
from millpond.transports.database.connect import open_store
from millpond.transports.database.mysql.dialect import MysqlDialect
from millpond.transports.database.mysql.pool import Pool
from millpond.transports.database.options import (
    IDLE_IN_TRANSACTION,
    StoreOptions,
    call_timeout,
    connect_timeout,
    parse,
    tls_context,
)
from millpond.transports.database.runner import Engine, Mode
from millpond.transports.database.sql.dialect import ErrorKind
from millpond.transports.database.sql.statement import Copy, Many, Query, Rows, Step, Steps, Style, drive_async
from millpond.transports.database.store import DatabaseStore
from millpond.transports.tls import warn_if_plain
from millpond.transports.url import Url, check_parameters

T = TypeVar("T")


class MysqlEngine:
    """A pool of asyncmy connections."""

    def __init__(
        self, dialect: MysqlDialect, pool: Pool, connect: Callable[[], Awaitable[Any]], *, call_timeout: float
    ) -> None:
        self.dialect = dialect
        self._pool = pool
        self._connect = connect
        self._call_timeout = call_timeout

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        async with self._pool.connection() as connection:
            if mode in (Mode.READ, Mode.ONE):
                return await drive_async(steps(), self._executor(connection))
            return await self._transaction(connection, steps)

    async def _transaction(self, connection: Any, steps: Callable[[], Steps[T]]) -> T:
        await self._in_time(connection.begin())
        try:
            result = await drive_async(steps(), self._executor(connection))
        except Exception as e:
            kind = self.dialect.error_kind(e)
            if kind is ErrorKind.FOREIGN:
                # The driver stops in the middle of a result if it cannot decode a text: its own error would hide this
                # one, and look like an outage. The pool closes the connection.
                with contextlib.suppress(Exception):
                    await self._in_time(connection.rollback())
            elif kind is not ErrorKind.LOST:
                await self._in_time(connection.rollback())
            raise
        await self._in_time(connection.commit())
        return result

    def _executor(self, connection: Any) -> Callable[[Step], Any]:
        execute = executor(connection)
        return lambda step: self._in_time(execute(step))

    async def _in_time(self, answer: Awaitable[T]) -> T:
        # The driver's timeout covers reads only: a network that drops all packets stops a large write too.
        async with asyncio.timeout(self._call_timeout):
            return await answer

    async def hold(self, worker: int) -> MysqlSession:
        connection = await self._connect()
        async with connection.cursor() as cursor:
            # A power cut closes no connection: the server ends a session that is silent for a minute.
            await cursor.execute("SET wait_timeout = 60")
        return MysqlSession(connection, self._transaction)

    async def listen(self, channel: str, on_queue: Callable[[str | None], None]) -> None:
        """Return at once: the server has no notifications."""

    async def discard(self, worker: int) -> None:
        """Do nothing: the server frees a lock with its session."""

    async def close(self) -> None:
        await self._pool.close()


class MysqlSession:
    """A connection outside the pool: it would use up a small pool."""

    any_loop = False

    def __init__(self, connection: Any, transaction: Callable[..., Awaitable[Any]]) -> None:
        self._connection = connection
        self._transaction = transaction

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        result: T = await self._transaction(self._connection, steps)
        return result

    async def close(self) -> None:
        await _close(self._connection)


def executor(connection: Any) -> Callable[[Step], Any]:
    async def execute(step: Step) -> Rows:
        async with connection.cursor() as cursor:
            match step:
                case Query(statement, params):
                    text, values = statement.render(Style.FORMAT, params)
                    await cursor.execute(text, values)
                    rows: Rows = await cursor.fetchall()
                    return rows
                case Many(statement, columns, records):
                    await cursor.executemany(*statement.render_many(Style.FORMAT, columns, records))
                case Copy():
                    raise AssertionError("MySQL takes bulk loads as INSERT with many rows")
        return ()

    return execute


def dialect(options: StoreOptions) -> MysqlDialect:
    return MysqlDialect(schema=options.schema, prefix=options.table_prefix)


URL_PARAMETERS = ("ssl", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket")


async def connect(url: Url, **given: Any) -> DatabaseStore:
    """A store on MySQL 8 or MariaDB 10.6+."""
    options = parse(given)
    words = dialect(options)
    engine: Engine
    if options.pool is not None:
        engine = BorrowedEngine(
            words,
            pool_adapter(options.pool, words.name),
            call_timeout=call_timeout(options),
            busy_timeout=seconds(options.busy_timeout),
        )
    else:
        connection = make_connector(url, options)
        pool = Pool(connection, _close, options.pool_size, words.error_kind)
        engine = MysqlEngine(words, pool, connection, call_timeout=call_timeout(options))
    store = await open_store(engine, options, url)
    try:
        await store.runner.read(partial(words.read_packet, options.body_limit))
    except BaseException:
        await store.close()
        raise
    return store


def check_address(url: Url) -> str:
    """The name of the database."""
    database = url.path.removeprefix("/")
    if not url.host or not database or "/" in database:
        raise InvalidURL(f"{url} names no database: write {url.scheme}://user:password@host:3306/database")
    if "charset" in url.query:  # usual in URLs of SQLAlchemy
        raise InvalidURL(f"leave charset out of the URL {url}: Millpond always uses utf8mb4")
    check_parameters(url, URL_PARAMETERS)
    return database


def make_connector(url: Url, options: StoreOptions) -> Callable[[], Awaitable[Any]]:
    """A function that makes connections. An error in the URL is raised at once."""
    database = check_address(url)
    check_parameters(url, URL_PARAMETERS, files=("ssl_ca", "ssl_cert", "ssl_key"))
    tls = tls_context(url, options)
    checked = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
    warn_if_plain(url, url.host, checked=checked, remedy="add ?ssl_ca=FILE, or ?ssl=true for the system's authorities")

    async def connection() -> Any:
        async with asyncio.timeout(connect_timeout(options)):
            return await _connect(url, database, options, tls)

    return connection


async def _connect(url: Url, database: str, options: StoreOptions, tls: ssl.SSLContext | None) -> Any:
    connection = await asyncmy.connect(
        host=url.host,
        port=url.port or 3306,
        unix_socket=url.query.get("unix_socket"),
        user=url.user or "",
        password=(url.password or "").encode(),  # as text it would have to be Latin-1
        db=database,
        autocommit=True,
        charset="utf8mb4",
        ssl=tls,
    )
    lock_wait = max(1, micros(options.busy_timeout, "busy_timeout") // SECOND)
    async with connection.cursor() as cursor:
        # Without gap locks publishers and claims do not block each other.
        await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        # A process that stops in the middle of a transaction must not keep its locks. MySQL has no such limit.
        idle = f"/*M! , idle_transaction_timeout = {IDLE_IN_TRANSACTION} */"
        await cursor.execute(f"SET innodb_lock_wait_timeout = {lock_wait}, sql_mode = 'STRICT_ALL_TABLES' {idle}")
    return connection


async def _close(connection: Any) -> None:
    connection.close()
