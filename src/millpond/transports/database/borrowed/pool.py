"""A store on the caller's own pool or SQLAlchemy engine.

A connection is borrowed for one transaction at READ COMMITTED. Its settings end with the transaction, and other users
of the pool find their sessions unchanged. We never close the pool.

Handlers may hold every connection of the pool while they wait for their ack. The session that a worker keeps for its
heartbeat then takes our transactions too, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from millpond.errors import InvalidOption, MillpondError, StoreBusy
from millpond.transports.database.borrowed.drivers import Asyncpg, Borrowed, SqlAlchemy, class_names, mysql_cursors
from millpond.transports.database.runner import Mode
from millpond.transports.database.sql.dialect import Dialect, ErrorKind
from millpond.transports.database.sql.statement import Copy, Rows, Step, Steps, drive_async

T = TypeVar("T")

_LEAST = 2
"""Minimum size of a pool: a worker keeps one connection."""
_ACQUIRE_BESIDE_KEPT = 1.0
"""Seconds to wait for a connection before a transaction goes to the worker's session."""

_OUT_OF_STEP = {ErrorKind.LOST, ErrorKind.FOREIGN}
"""Errors that end a connection. Foreign ones are Python's own in the driver, such as of a text it cannot decode."""


class PoolAdapter(Protocol):
    """Borrows connections, and begins and ends our transaction on one."""

    def size(self) -> int | None:
        """Maximum number of connections; None: unlimited or unknown."""

    def is_exhausted(self) -> bool:
        """Whether all connections are in use, as far as the pool knows."""

    def acquire(self) -> AbstractAsyncContextManager[Any]: ...

    async def begin(self, connection: Any) -> Borrowed: ...

    async def commit(self, connection: Any) -> None: ...

    async def rollback(self, connection: Any) -> None: ...

    async def discard(self, connection: Any) -> None:
        """End the session; the pool does not hand it out again."""


class BorrowedEngine:
    """The caller's connections."""

    def __init__(self, dialect: Dialect, adapter: PoolAdapter, *, call_timeout: float, busy_timeout: float) -> None:
        size = adapter.size()
        if size is not None and size < _LEAST:
            raise InvalidOption(
                f"pool has at most {size} connection, and Millpond needs {_LEAST} or more: a worker keeps one"
            )
        self.dialect = dialect
        self._adapter = adapter
        self._call_timeout = call_timeout
        self._busy_timeout = busy_timeout
        self._kept: BorrowedSession | None = None

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        kept = self._kept if self._kept is not None and self._kept.is_open else None
        if kept is not None and self._adapter.is_exhausted():
            return await kept.run(steps)
        async with AsyncExitStack() as stack:
            try:
                connection = await self._acquire(stack, self._busy_timeout if kept is None else _ACQUIRE_BESIDE_KEPT)
            except StoreBusy:
                if kept is None:
                    raise
            else:
                return await self._transaction(connection, steps)
        return await kept.run(steps)

    async def _acquire(self, stack: AsyncExitStack, within: float) -> Any:
        try:
            async with asyncio.timeout(within) as limit:
                return await stack.enter_async_context(self._adapter.acquire())
        except TimeoutError as e:
            if not limit.expired():
                raise
            raise StoreBusy(
                f"no connection of your pool came free within {within:g} s; raise the size of the pool"
            ) from e

    async def _transaction(self, connection: Any, steps: Callable[[], Steps[T]]) -> T:
        adapter = self._adapter
        try:
            borrowed = await self._in_time(adapter.begin(connection))
            result = await drive_async(steps(), lambda step: self._in_time(borrowed.execute(step)))
            await self._in_time(adapter.commit(connection))
        except BaseException as e:
            if self._is_in_step(e):
                await self._in_time(adapter.rollback(connection))
            else:
                with suppress(Exception):  # it may be lost already
                    await adapter.discard(connection)
            raise
        return result

    def _is_in_step(self, error: BaseException) -> bool:
        """Whether a connection takes a statement after this error. Not after one in the middle of a result."""
        if isinstance(error, MillpondError):
            return True  # raised between two statements
        return isinstance(error, Exception) and self.dialect.error_kind(error) not in _OUT_OF_STEP

    async def _in_time(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(self._call_timeout):
            return await call

    async def hold(self, worker: int) -> BorrowedSession:
        stack = AsyncExitStack()
        connection = await self._acquire(stack, self._busy_timeout)
        self._kept = BorrowedSession(connection, self._transaction, stack, self._adapter)
        return self._kept

    async def listen(self, channel: str, on_queue: Callable[[str | None], None]) -> None:
        """Return at once: other users of the caller's connections may need them."""

    async def discard(self, worker: int) -> None:
        """The server frees a lock with its session and keeps no trace."""

    async def close(self) -> None:
        """The pool is the caller's."""


class BorrowedSession:
    """A connection of the pool, kept until it is closed."""

    any_loop = False

    def __init__(
        self, connection: Any, transaction: Callable[..., Awaitable[Any]], stack: AsyncExitStack, adapter: PoolAdapter
    ) -> None:
        self._connection = connection
        self._transaction = transaction
        self._stack = stack
        self._adapter = adapter
        self._one_at_a_time = asyncio.Lock()
        self.is_open = True

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        async with self._one_at_a_time:
            if not self.is_open:
                raise StoreBusy(
                    "no connection of your pool is free, and the worker's session is closed; raise the size of the pool"
                )
            result: T = await self._transaction(self._connection, steps)
            return result

    async def close(self) -> None:
        self.is_open = False
        # Not back to the pool as it is: the session's locks must end.
        async with self._stack:
            with suppress(Exception):  # it may be lost already
                await self._adapter.discard(self._connection)


def pool_adapter(pool: Any, database: str, local: str = "") -> PoolAdapter:
    """The adapter for the option `pool`. `local`: SQL that runs first in each transaction."""
    names = class_names(pool)
    if "sqlalchemy.ext.asyncio.engine.AsyncEngine" in names:
        if {"mariadb": "mysql"}.get(pool.dialect.name, pool.dialect.name) == database:
            return SqlAlchemyPool(pool, local) if database == "postgresql" else SqlAlchemyMysqlPool(pool)
    elif "asyncpg.pool.Pool" in names and database == "postgresql":
        return AsyncpgPool(pool, local)
    elif "asyncmy.pool.Pool" in names and database == "mysql":
        return AsyncmyPool(pool)
    accepted = {"postgresql": "an asyncpg pool", "mysql": "an asyncmy pool"}[database]
    raise InvalidOption(f"pool must be {accepted} or an SQLAlchemy AsyncEngine for {database}, not {names[0]}")


class AsyncpgPool:
    def __init__(self, pool: Any, local: str) -> None:
        self._pool = pool
        self._begin = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {local}"

    def size(self) -> int | None:
        return int(self._pool.get_max_size())

    def is_exhausted(self) -> bool:
        return bool(self._pool.get_idle_size() == 0 and self._pool.get_size() >= self._pool.get_max_size())

    def acquire(self) -> AbstractAsyncContextManager[Any]:
        acquired: AbstractAsyncContextManager[Any] = self._pool.acquire()
        return acquired

    async def begin(self, connection: Any) -> Borrowed:
        await connection.execute(self._begin)
        return Asyncpg(connection)

    async def commit(self, connection: Any) -> None:
        await connection.execute("COMMIT")

    async def rollback(self, connection: Any) -> None:
        await connection.execute("ROLLBACK")

    async def discard(self, connection: Any) -> None:
        connection.terminate()


class AsyncmyPool:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def size(self) -> int | None:
        return int(self._pool.maxsize) or None

    def is_exhausted(self) -> bool:
        return bool(self._pool.freesize == 0 and 0 < self._pool.maxsize <= self._pool.size)

    def acquire(self) -> AbstractAsyncContextManager[Any]:
        acquired: AbstractAsyncContextManager[Any] = self._pool.acquire()
        return acquired

    async def begin(self, connection: Any) -> Borrowed:
        # For the next transaction only. Without gap locks publishers and claimers do not meet.
        await connection.query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        await connection.begin()
        return mysql_cursors(connection)

    async def commit(self, connection: Any) -> None:
        await connection.commit()

    async def rollback(self, connection: Any) -> None:
        await connection.rollback()

    async def discard(self, connection: Any) -> None:
        connection.close()


class SqlAlchemyPool:
    """An engine to PostgreSQL."""

    def __init__(self, engine: Any, local: str = "") -> None:
        self._engine = engine
        self._local = local

    def size(self) -> int | None:
        if "sqlalchemy.pool.impl.StaticPool" in class_names(self._engine.pool):
            return 1
        size, overflow = getattr(self._engine.pool, "size", None), getattr(self._engine.pool, "_max_overflow", -1)
        if size is None or overflow < 0 or not size():  # not a queue, or one without a limit
            return None
        return int(size() + overflow)

    def is_exhausted(self) -> bool:
        size = self.size()
        return size is not None and hasattr(self._engine.pool, "checkedout") and self._engine.pool.checkedout() >= size

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self._engine.connect())
            except Exception as e:
                if "sqlalchemy.exc.TimeoutError" in class_names(e):
                    raise StoreBusy(
                        f"no connection of your engine's pool came free ({e}); raise its pool_size or max_overflow"
                    ) from e
                raise
            yield connection

    async def begin(self, connection: Any) -> Borrowed:
        # Until the engine has the connection back.
        await connection.execution_options(isolation_level="READ COMMITTED")
        await connection.begin()
        await connection.exec_driver_sql(self._local)
        return SqlAlchemyWithCopy(connection)

    async def commit(self, connection: Any) -> None:
        await connection.commit()

    async def rollback(self, connection: Any) -> None:
        await connection.rollback()

    async def discard(self, connection: Any) -> None:
        await connection.invalidate()


class SqlAlchemyMysqlPool(SqlAlchemyPool):
    """An engine to MySQL. By statements: the engine would leave READ COMMITTED on a session in autocommit mode."""

    async def begin(self, connection: Any) -> Borrowed:
        await connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        await connection.exec_driver_sql("BEGIN")
        return SqlAlchemy(connection)

    async def commit(self, connection: Any) -> None:
        await connection.exec_driver_sql("COMMIT")

    async def rollback(self, connection: Any) -> None:
        await connection.exec_driver_sql("ROLLBACK")


class SqlAlchemyWithCopy(SqlAlchemy):
    """Bulk loads go to the driver: SQLAlchemy has no COPY."""

    async def execute(self, step: Step) -> Rows:
        if not isinstance(step, Copy):
            return await super().execute(step)
        driver = (await self.connection.get_raw_connection()).driver_connection
        if "asyncpg.connection.Connection" in class_names(driver):
            return await Asyncpg(driver).execute(step)
        quote = self.connection.dialect.identifier_preparer.quote_identifier
        table = ".".join(quote(name) for name in (step.schema, step.table) if name)
        columns = ", ".join(quote(column) for column in step.columns)
        async with driver.cursor() as cursor, cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
            for record in step.records:
                await copy.write_row(record)
        return ()
