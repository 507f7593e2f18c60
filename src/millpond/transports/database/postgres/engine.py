"""PostgreSQL, through asyncpg: one statement for a whole claim or settle, COPY for bulk publish."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg

from millpond.clock import micros, seconds
from millpond.errors import InvalidOption, InvalidURL
from millpond.transports.database.borrowed.pool import BorrowedEngine, pool_adapter
from millpond.transports.database.connect import open_store
from millpond.transports.database.options import IDLE_IN_TRANSACTION, StoreOptions, call_timeout, connect_timeout, parse
from millpond.transports.database.postgres.dialect import PostgresDialect
from millpond.transports.database.postgres.recent_connections import RecentConnections
from millpond.transports.database.runner import Engine, Mode
from millpond.transports.database.sql.dialect import ErrorKind
from millpond.transports.database.sql.statement import Copy, Many, Query, Rows, Step, Steps, Style, drive_async
from millpond.transports.database.store import DatabaseStore
from millpond.transports.tls import warn_if_plain
from millpond.transports.url import Url, check_parameters

T = TypeVar("T")


_LISTEN_AGAIN = 0.5
_PROBE_EVERY = 15.0


class PostgresEngine:
    """A pool of asyncpg connections."""

    def __init__(
        self,
        dialect: PostgresDialect,
        pool: Any,
        connect: Callable[[], Awaitable[Any]],
        *,
        pooler: bool,
        settings: dict[str, str],
        call_timeout: float,
    ) -> None:
        self.dialect = dialect
        self._pool = pool
        self._recent_connections = RecentConnections(pool, call_timeout)
        self._connect = connect
        # A transaction pooler may run each transaction in another session: settings and prepared statements
        # end with the transaction.
        self._pooler = pooler
        self._settings = _for_a_transaction(settings)

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        recent = self._recent_connections.take() or await self._recent_connections.acquire()
        connection = recent.pooled
        try:
            if mode is Mode.WRITE or self._pooler:
                result = await self._in_transaction(connection, steps)
            else:
                run = recent.run_alone if mode is Mode.ONE else _executor(connection)
                result = await drive_async(steps(), run)
        except BaseException as e:
            # Closed even if it seems alive: it may lead to an old primary, or its protocol is out of step. After
            # a timeout the driver cancels the statement in the server, and decides by itself.
            if self.dialect.error_kind(e) is ErrorKind.LOST and not isinstance(e, TimeoutError):
                with contextlib.suppress(asyncpg.InterfaceError):  # the pool may have it back already
                    connection.terminate()
            await self._recent_connections.release(recent)
            raise
        if not self._recent_connections.keep(recent):
            await self._recent_connections.release(recent)
        return result

    async def _in_transaction(self, connection: Any, steps: Callable[[], Steps[T]]) -> T:
        async with connection.transaction():
            if self._pooler:
                await connection.execute(self._settings)
            return await drive_async(steps(), _executor(connection))

    async def hold(self, worker: int) -> PostgresSession:
        return PostgresSession(await self._connect())

    async def listen(self, channel: str, on_queue: Callable[[str | None], None]) -> None:
        if self._pooler:
            return  # notifications to a session of the pooler do not reach us
        while True:
            with contextlib.suppress(Exception):  # a driver that loses its connection may raise anything
                await self._listen(channel, on_queue)
            await asyncio.sleep(_LISTEN_AGAIN)

    async def _listen(self, channel: str, on_queue: Callable[[str | None], None]) -> None:
        """Listen while the connection lives. It is probed, because a dead one may raise no error."""
        connection = await self._connect()
        ended = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: ended.set())
            await connection.add_listener(channel, lambda _c, _pid, _channel, queue: on_queue(queue))
            on_queue(None)
            while not ended.is_set():
                try:
                    async with asyncio.timeout(_PROBE_EVERY):
                        await ended.wait()
                except TimeoutError:
                    await connection.fetchval("SELECT 1", timeout=_PROBE_EVERY)
        finally:
            await _end(connection)

    async def discard(self, worker: int) -> None:
        """Do nothing: the server frees a lock with its session."""

    async def close(self) -> None:
        try:
            await self._recent_connections.close()
            await self._pool.close()
        except BaseException:
            self._pool.terminate()
            raise


class PostgresSession:
    """A connection outside the pool: it would use up a small pool."""

    any_loop = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        # One transaction: behind a pooler all its statements run in one session.
        async with self._connection.transaction():
            return await drive_async(steps(), _executor(self._connection))

    async def close(self) -> None:
        await _end(self._connection)


async def _end(connection: Any) -> None:
    """Close at once, without a word to the server. The socket is closed in the loop's next round."""
    connection.terminate()
    await asyncio.sleep(0)


def _executor(connection: Any) -> Callable[[Step], Awaitable[Rows]]:
    def execute(step: Step) -> Awaitable[Rows]:
        if type(step) is Query:  # most are: without another coroutine
            text, values = step.statement.render(Style.DOLLAR, step.params)
            fetching: Awaitable[Rows] = connection.fetch(text, *values)
            return fetching
        return _load(connection, step)

    return execute


async def _load(connection: Any, step: Step) -> Rows:
    match step:
        case Many(statement, columns, records):
            await connection.executemany(*statement.render_many(Style.DOLLAR, columns, records))
        case Copy(table, schema, columns, records):
            await connection.copy_records_to_table(table, schema_name=schema, columns=columns, records=records)
    return ()


def dialect(options: StoreOptions) -> PostgresDialect:
    return PostgresDialect(schema=options.schema, prefix=options.table_prefix)


async def connect(url: Url, **given: Any) -> DatabaseStore:
    """A store on PostgreSQL."""
    options = parse(given)
    words = dialect(options)
    settings = {
        # A process that stops in the middle of a transaction must not keep its locks.
        "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION}s",
        "lock_timeout": f"{max(1, micros(options.busy_timeout, 'busy_timeout') // 1000)}ms",
        # Our statements need one plan for any number of rows. A plan that was made while a table was empty
        # must not be a sequential scan, because it is kept.
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        # The setting above makes a scan without an index look very expensive, which would start compilation.
        "jit": "off",
    }
    engine: Engine
    if options.pool is not None:
        borrowing = pool_adapter(options.pool, words.name, _for_a_transaction(settings))
        engine = BorrowedEngine(
            words, borrowing, call_timeout=call_timeout(options), busy_timeout=seconds(options.busy_timeout)
        )
    else:
        pool = await _pool(url, options, settings)
        engine = PostgresEngine(
            words,
            pool,
            _alone(url, options),
            pooler=options.pooler,
            settings=settings,
            call_timeout=call_timeout(options),
        )
    try:
        return await open_store(engine, options, url)
    except asyncpg.ClientConfigurationError as e:
        raise InvalidURL(f"{url} cannot be used: {url.hide(e)}") from None


def _for_a_transaction(settings: dict[str, str]) -> str:
    """One statement that sets all of them until the transaction ends."""
    return "SELECT " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items())


_ELSEWHERE = {"ssl": "sslmode"}
"""Names of parameters in SQLAlchemy's URLs for asyncpg."""
URL_PARAMETERS = (
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation"),
    *("ssl_min_protocol_version", "ssl_max_protocol_version", "host", "port", "user", "password", "passfile"),
    *("dbname", "service", "target_session_attrs", "krbsrvname", "gsslib", "application_name", "options"),
    "search_path",
)
"""Parameters of asyncpg, and useful settings of the server. asyncpg sends any other parameter to the server as a
setting: a misspelt sslmode would be reported late, or not at all."""


_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


def check_address(url: Url) -> None:
    check_parameters(url, URL_PARAMETERS, elsewhere=_ELSEWHERE)


def check_url(url: Url, tls: ssl.SSLContext | bool | None = None) -> None:
    """Check the parameters, and warn if a remote server is not checked. `tls`: the option."""
    check_parameters(
        url, URL_PARAMETERS, elsewhere=_ELSEWHERE, files=("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
    )
    mode = url.query.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer"
    if mode not in _MODES:
        raise InvalidURL(f"sslmode of the URL {url} must be one of {', '.join(_MODES)}, not {mode!r}")
    if isinstance(tls, ssl.SSLContext):
        checked = tls.verify_mode is ssl.CERT_REQUIRED
    else:
        # `require` encrypts without a check, but it was chosen; libpq checks then, if there is a root certificate.
        checked = tls or mode in ("require", "verify-ca", "verify-full")
    remedy = "add ?sslmode=verify-full, and sslrootcert=FILE for your own authority"
    warn_if_plain(url, url.query.get("host") or url.host, checked=checked, remedy=remedy)


def _login(url: Url, options: StoreOptions) -> dict[str, Any]:
    check_url(url, options.tls)
    if options.tls is not None and "sslmode" in url.query:
        raise InvalidOption("give either the option tls or sslmode in the URL, not both")
    return {
        "dsn": url.raw.replace("postgres://", "postgresql://", 1) if url.scheme == "postgres" else url.raw,
        "timeout": connect_timeout(options),
        "ssl": ssl.create_default_context() if options.tls is True else options.tls,
    }


def _alone(url: Url, options: StoreOptions) -> Callable[[], Awaitable[Any]]:
    """A function that makes connections outside the pool, for sessions that are held."""
    # The server probes a silent host: a power cut closes no connection.
    alive = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "2", "tcp_keepalives_count": "3"}
    settings = {"application_name": "millpond"} | ({} if options.pooler else alive)

    async def connect() -> Any:
        return await asyncpg.connect(
            **_login(url, options),
            server_settings=settings,
            statement_cache_size=0,
            command_timeout=call_timeout(options),
        )

    return connect


_IDLE = 60.0
"""Seconds after which an idle connection of the pool is closed: those of a burst would otherwise stay for minutes."""


async def _pool(url: Url, options: StoreOptions, settings: dict[str, str]) -> Any:
    return await asyncpg.create_pool(
        **_login(url, options),
        min_size=0,
        max_size=options.pool_size,
        max_inactive_connection_lifetime=_IDLE,
        command_timeout=call_timeout(options),
        # Poolers pass no settings on and drop prepared statements between transactions.
        server_settings={"application_name": "millpond"} | ({} if options.pooler else settings),
        statement_cache_size=0 if options.pooler else 256,
        # Statements are kept: planning again costs more than a stale plan, and the settings exclude bad ones.
        max_cached_statement_lifetime=0,
        reset=_keep_session,
    )


async def _keep_session(connection: Any) -> None:
    """Reset nothing: our statements leave no session state, and the default costs a round trip each time."""
