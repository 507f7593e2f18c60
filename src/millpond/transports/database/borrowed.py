"""A store on the caller's own pool or SQLAlchemy engine.

A connection is borrowed for one transaction at READ COMMITTED, with settings that end with it, so that the
pool's other users find their sessions as they left them. The pool itself is never closed by us.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from millpond.errors import InvalidOption, StoreBusy
from millpond.transports.database.dialect import Dialect, Trouble
from millpond.transports.database.engine import Mode
from millpond.transports.database.outbox import Asyncpg, Borrowed, SqlAlchemy, known_as, of_mysql
from millpond.transports.database.statement import Copy, Rows, Step, Steps, drive_async

T = TypeVar("T")


class Source(Protocol):
    """Where connections are borrowed, and how a transaction of ours begins and ends on one."""

    def acquire(self) -> AbstractAsyncContextManager[Any]: ...

    async def begin(self, connection: Any) -> Borrowed: ...

    async def commit(self, connection: Any) -> None: ...

    async def rollback(self, connection: Any) -> None: ...

    async def discard(self, connection: Any) -> None:
        """End the session, so that the pool will not hand it out again."""


class BorrowedEngine:
    """Connections of the caller's."""

    def __init__(self, dialect: Dialect, source: Source, *, call_timeout: float) -> None:
        self.dialect = dialect
        self._source = source
        self._call_timeout = call_timeout

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        async with self._source.acquire() as connection:
            return await self._transaction(connection, steps)

    async def _transaction(self, connection: Any, steps: Callable[[], Steps[T]]) -> T:
        source = self._source
        try:
            borrowed = await self._in_time(source.begin(connection))
            result = await drive_async(steps(), lambda step: self._in_time(borrowed.execute(step)))
            await self._in_time(source.commit(connection))
        except BaseException as e:
            if isinstance(e, Exception) and self.dialect.trouble(e) is not Trouble.LOST:
                await self._in_time(source.rollback(connection))
            else:
                with suppress(Exception):  # it is lost already
                    await source.discard(connection)
            raise
        return result

    async def _in_time(self, answer: Awaitable[T]) -> T:
        async with asyncio.timeout(self._call_timeout):
            return await answer

    async def hold(self, worker: int) -> BorrowedSession:
        stack = AsyncExitStack()
        connection = await stack.enter_async_context(self._source.acquire())
        return BorrowedSession(connection, self._transaction, stack, self._source)

    async def listen(self, channel: str, heard: Callable[[str | None], None]) -> None:
        """Not on connections of the caller's, which the others may need."""

    async def discard(self, worker: int) -> None:
        """The server frees a lock with its session and keeps nothing of it."""

    async def close(self) -> None:
        """The pool is the caller's."""


class BorrowedSession:
    """A connection of the pool, kept until it is closed; the pool should have one to spare."""

    def __init__(
        self, connection: Any, transaction: Callable[..., Awaitable[Any]], stack: AsyncExitStack, source: Source
    ) -> None:
        self._connection = connection
        self._transaction = transaction
        self._stack = stack
        self._source = source

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        result: T = await self._transaction(self._connection, steps)
        return result

    async def close(self) -> None:
        # Not back to the pool as it is: the session's locks must end.
        async with self._stack:
            with suppress(Exception):  # it may be lost already
                await self._source.discard(self._connection)


def source(pool: Any, database: str, local: str = "") -> Source:
    """What the option `pool` was given, or an error that says what it takes. `local`: run first in each
    transaction."""
    names = known_as(pool)
    if "sqlalchemy.ext.asyncio.engine.AsyncEngine" in names:
        if {"mariadb": "mysql"}.get(pool.dialect.name, pool.dialect.name) == database:
            return SqlAlchemySource(pool, local) if database == "postgresql" else SqlAlchemyMysqlSource(pool)
    elif "asyncpg.pool.Pool" in names and database == "postgresql":
        return AsyncpgSource(pool, local)
    elif "asyncmy.pool.Pool" in names and database == "mysql":
        return AsyncmySource(pool)
    accepted = {"postgresql": "an asyncpg pool", "mysql": "an asyncmy pool"}[database]
    raise InvalidOption(f"pool must be {accepted} or an SQLAlchemy AsyncEngine for {database}, not {names[0]}")


class AsyncpgSource:
    def __init__(self, pool: Any, local: str) -> None:
        self._pool = pool
        self._begin = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {local}"

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


class AsyncmySource:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def acquire(self) -> AbstractAsyncContextManager[Any]:
        acquired: AbstractAsyncContextManager[Any] = self._pool.acquire()
        return acquired

    async def begin(self, connection: Any) -> Borrowed:
        # For the next transaction only. Without gap locks publishers and claimers do not meet.
        await connection.query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        await connection.begin()
        return of_mysql(connection)

    async def commit(self, connection: Any) -> None:
        await connection.commit()

    async def rollback(self, connection: Any) -> None:
        await connection.rollback()

    async def discard(self, connection: Any) -> None:
        connection.close()


class SqlAlchemySource:
    """An engine to PostgreSQL."""

    def __init__(self, engine: Any, local: str = "") -> None:
        self._engine = engine
        self._local = local

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self._engine.connect())
            except Exception as e:
                if "sqlalchemy.exc.TimeoutError" in known_as(e):
                    raise StoreBusy(f"no connection of your engine's pool came free: {e}") from e
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


class SqlAlchemyMysqlSource(SqlAlchemySource):
    """An engine to MySQL. By statements, since the engine would leave READ COMMITTED behind on a session in
    autocommit mode."""

    async def begin(self, connection: Any) -> Borrowed:
        await connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        await connection.exec_driver_sql("BEGIN")
        return SqlAlchemy(connection)

    async def commit(self, connection: Any) -> None:
        await connection.exec_driver_sql("COMMIT")

    async def rollback(self, connection: Any) -> None:
        await connection.exec_driver_sql("ROLLBACK")


class SqlAlchemyWithCopy(SqlAlchemy):
    """Bulk loads go to the driver below, which alone knows them."""

    async def execute(self, step: Step) -> Rows:
        if not isinstance(step, Copy):
            return await super().execute(step)
        driver = (await self.connection.get_raw_connection()).driver_connection
        if "asyncpg.connection.Connection" in known_as(driver):
            return await Asyncpg(driver).execute(step)
        quote = self.connection.dialect.identifier_preparer.quote_identifier
        table = ".".join(quote(name) for name in (step.schema, step.table) if name)
        columns = ", ".join(quote(column) for column in step.columns)
        async with driver.cursor() as cursor, cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as copy:
            for record in step.records:
                await copy.write_row(record)
        return ()
