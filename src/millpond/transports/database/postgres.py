"""PostgreSQL, through asyncpg: one statement for a whole claim or settle, COPY for bulk publish."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

from millpond.clock import micros
from millpond.errors import InvalidOption, InvalidURL
from millpond.transports.database import staging
from millpond.transports.database import statements as sql
from millpond.transports.database import stream_statements as streams
from millpond.transports.database.borrowed import BorrowedEngine, source
from millpond.transports.database.dialect import Dialect, Trouble
from millpond.transports.database.engine import Engine, Mode
from millpond.transports.database.login import call_timeout, connect_timeout, is_untrusted
from millpond.transports.database.opening import open_store
from millpond.transports.database.options import IDLE_IN_TRANSACTION, StoreOptions, parse
from millpond.transports.database.outbox import known_as
from millpond.transports.database.postgres_fused import FUSED
from millpond.transports.database.statement import Copy, Many, Query, Rows, Step, Steps, Style, drive_async
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url, check_parameters

T = TypeVar("T")


class PostgresDialect(Dialect):
    name = "postgresql"
    style = Style.DOLLAR
    fused = FUSED
    no_floor = (-(2**63), UUID(int=0))
    day_partitions = True
    overrides = {
        # By ctid: joined to itself by id, for which it has no index, the table might be read once for each copy.
        staging.DROP_COPIES: """DELETE FROM {staging} WHERE ctid = ANY(ARRAY(SELECT c.ctid FROM (SELECT s.ctid,
        row_number() OVER (PARTITION BY s.id ORDER BY s.lot) AS copy FROM {staging} s WHERE s.lot {lots}) c
        WHERE c.copy > 1))""",
    }
    words = {
        # As a query of its own it is asked once in a statement, not with every row.
        "now": "(SELECT coalesce(:now::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint))",
        "key": "key",
        "id_out": "id",
        "ids": "= ANY(:ids::uuid[])",
        "queues": "= ANY(:queues::text[])",
        "states": "= ANY(:states::text[])",
        "lots": "= ANY(:lots::bigint[])",
        "ready": "m.state <> 'PROCESSING'",
        "locked": "FOR UPDATE SKIP LOCKED",
        "lock": "FOR UPDATE",
        "or_skip": "ON CONFLICT DO NOTHING",
        "or_leave": "ON CONFLICT DO NOTHING",
        "or_beat": "ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at, by_lock = excluded.by_lock",
        "session": "pg_backend_pid()",
        "take_lock": "pg_try_advisory_lock(:worker::bigint)",
        # Looked at, not tried: a lock that was taken for a moment would be missing to its worker.
        "lock_held": "EXISTS (SELECT 1 FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
        "AND l.database = (SELECT b.oid FROM pg_database b WHERE b.datname = current_database()) "
        "AND (l.classid::bigint << 32 | l.objid::bigint) = w.id)",
        "claim_index": "",
        "lease_index": "",
        "held": "m.state = 'PROCESSING'",
        "id_index": "",
        "archive_index": "",
        "archive_id_index": "",
        "delete_a": "DELETE FROM",
        "or_update": "ON CONFLICT (name) DO UPDATE SET",
        # Not IN (SELECT …): planned as a join while the tables are empty, it reads all messages ever after.
        "in_select": "= ANY(ARRAY(",
        "end_select": "))",
        "names": "json_array_elements_text(:names::json) AS n(name)",
        "above_floor": "AND (m.due_at, m.id) >= (g.floor_due, g.floor_id)",
        "from_floor": "AND (m.due_at, m.id) >= (:floor_due::bigint, :floor_id::uuid)",
        "gaps": "unnest(:lows::smallint[], :highs::smallint[], :floor_dues::bigint[], :floor_ids::uuid[]) "
        "AS g(low, high, floor_due, floor_id)",
    }

    def id_in(self, value: UUID) -> Any:
        return value

    def id_out(self, value: Any) -> UUID:
        return value if isinstance(value, UUID) else UUID(value)

    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        floors = [floor or self.no_floor for floor in floors]
        arrays = {
            "lows": [low for low, _ in gaps],
            "highs": [high for _, high in gaps],
            "floor_dues": [due for due, _ in floors],
            "floor_ids": [id_ for _, id_ in floors],
        }
        return Query(self.sql(sql.PROBE), params | arrays)

    def note_outcomes(self, params: dict[str, Any], rows: Sequence[tuple[Any, str, int | None, str | None]]) -> Step:
        arrays = dict(zip(("ids", "outcomes", "delays", "reasons"), map(list, zip(*rows, strict=True)), strict=True))
        return Query(self.sql(streams.FUSED_NOTE), {**params, **arrays})

    def late(self, low: int, at: int) -> Steps[dict[str, int]]:
        # Whoever archives holds this lock on the archive until the end; one that waits for a table may be about to.
        # When it began, only its own user and monitors are told, and of a prepared transaction nobody.
        rows = yield Query(self.sql(_ARCHIVING), {})
        began = {who: low if start is None else int(start) for who, start in rows}
        return {who: start for who, start in began.items() if start < at}

    def prelude(self) -> Sequence[str]:
        create = [f"CREATE SCHEMA IF NOT EXISTS {self.quote(self.schema)}"] if self.schema else []
        return (*create, *super().prelude())

    def lock_migrations(self) -> Steps[None]:
        # Released with the transaction.
        yield Query(self.sql("SELECT pg_advisory_xact_lock(hashtext('{migration}'))"), {})

    def trouble(self, error: BaseException) -> Trouble:
        if getattr(error, "connection_invalidated", False):
            return Trouble.LOST  # as SQLAlchemy says
        error = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's
        # By SQLSTATE, so that the errors of any driver a caller's engine brings are understood.
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(state, str):
            if state in _BUSY:
                return Trouble.BUSY
            if state[:2] == "08" or state in _LOST:
                return Trouble.LOST
            if state[:2] == "28" or state == "42501":
                return Trouble.REFUSED
            if state == "3D000":
                return Trouble.NO_DATABASE
            if state in ("42P01", "42703", "3F000"):
                return Trouble.UNMIGRATED
            return Trouble.OTHER
        if isinstance(error, asyncpg.ClientConfigurationError):
            return Trouble.FOREIGN
        if isinstance(error, asyncpg.InterfaceError) and "clos" in str(error):
            return Trouble.LOST
        # Met when a server is killed: the driver's protocol lost its place. A connection of ours has one user.
        if isinstance(error, asyncpg.InternalClientError) or "another operation is in progress" in str(error):
            return Trouble.LOST
        if is_untrusted(error) or "rejected SSL upgrade" in str(error):
            return Trouble.UNTRUSTED
        if isinstance(error, OSError | EOFError | asyncio.TimeoutError):
            return Trouble.LOST
        if "psycopg.OperationalError" in known_as(error):  # without a state it is one of connecting
            return Trouble.REFUSED if "authentication failed" in str(error) else Trouble.LOST
        return Trouble.OTHER if isinstance(error, asyncpg.InterfaceError) else Trouble.FOREIGN


_ARCHIVING = """
SELECT l.virtualtransaction, (extract(epoch FROM a.xact_start) * 1000000)::bigint
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
AND l.database = (SELECT b.oid FROM pg_database b WHERE b.datname = current_database())
AND ((l.relation = '{archive}'::regclass AND l.mode = 'RowExclusiveLock')
OR (NOT l.granted AND l.relation IN ('{message}'::regclass, '{archive}'::regclass)))
"""

# Serialization, deadlock, lock wait; and a key that is taken: an earlier try of the same publish was cut off
# before its commit, which came after we had looked. The next try sees it.
_BUSY = {"40001", "40P01", "55P03", "23505"}
# Shutdown, crash, cannot connect now, too many connections, read-only (an old primary after a failover), idle in
# a transaction for too long.
_LOST = {"57P01", "57P02", "57P03", "53300", "25006", "25P03"}


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
    ) -> None:
        self.dialect = dialect
        self._pool = pool
        self._connect = connect
        # A transaction pooler may hand each transaction to another session: settings and prepared
        # statements live no longer than one.
        self._pooler = pooler
        self._settings = _for_a_transaction(settings)

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        async with self._pool.acquire() as connection:
            try:
                return await self._run(connection, steps, mode)
            except Exception as e:
                # Not kept, even if it seems alive: an old primary, or a protocol that lost its place. But after
                # a timeout the driver asks the server to stop its work, and decides then.
                if self.dialect.trouble(e) is Trouble.LOST and not isinstance(e, TimeoutError):
                    with contextlib.suppress(asyncpg.InterfaceError):  # the pool may have it back already
                        connection.terminate()
                raise

    async def _run(self, connection: Any, steps: Callable[[], Steps[T]], mode: Mode) -> T:
        execute = _executor(connection)
        if mode is not Mode.WRITE and not self._pooler:
            return await drive_async(steps(), execute)
        async with connection.transaction():
            if self._pooler:
                await connection.execute(self._settings)
            return await drive_async(steps(), execute)

    async def hold(self, worker: int) -> PostgresSession:
        return PostgresSession(await self._connect())

    async def listen(self, channel: str, heard: Callable[[str | None], None]) -> None:
        if self._pooler:
            return  # what a session of the pooler's hears never reaches us
        while True:
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                await self._listen(channel, heard)
            await asyncio.sleep(_LISTEN_AGAIN)

    async def _listen(self, channel: str, heard: Callable[[str | None], None]) -> None:
        """As long as the connection lives; looked after, since a dead one may say nothing."""
        connection = await self._connect()
        ended = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: ended.set())
            await connection.add_listener(channel, lambda _c, _pid, _channel, queue: heard(queue))
            heard(None)
            while not ended.is_set():
                try:
                    async with asyncio.timeout(_PROBE_EVERY):
                        await ended.wait()
                except TimeoutError:
                    await connection.fetchval("SELECT 1", timeout=_PROBE_EVERY)
        finally:
            connection.terminate()

    async def discard(self, worker: int) -> None:
        """The server frees a lock with its session and keeps nothing of it."""

    async def close(self) -> None:
        await self._pool.close()


class PostgresSession:
    """A connection beside the pool, so that a small pool is not used up by it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        # One transaction: what a pooler answers then comes from one session.
        async with self._connection.transaction():
            return await drive_async(steps(), _executor(self._connection))

    async def close(self) -> None:
        self._connection.terminate()


def _executor(connection: Any) -> Callable[[Step], Any]:
    async def execute(step: Step) -> Rows:
        match step:
            case Query(statement, params):
                text, values = statement.render(Style.DOLLAR, params)
                rows: Rows = await connection.fetch(text, *values)
                return rows
            case Many(statement, columns, records):
                await connection.executemany(*statement.render_many(Style.DOLLAR, columns, records))
            case Copy(table, schema, columns, records):
                await connection.copy_records_to_table(table, schema_name=schema, columns=columns, records=records)
        return ()

    return execute


def dialect(options: StoreOptions) -> PostgresDialect:
    return PostgresDialect(schema=options.schema, prefix=options.table_prefix)


async def connect(url: Url, **given: Any) -> DatabaseStore:
    """A store on PostgreSQL."""
    options = parse(given)
    words = dialect(options)
    settings = {
        # A process that stands still in the middle of a transaction must not keep its locks.
        "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION}s",
        "lock_timeout": f"{max(1, micros(options.busy_timeout, 'busy_timeout') // 1000)}ms",
        # Our statements take one plan however many rows there are; a plan made while a table is empty must
        # not be a sequential scan that is kept.
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        # That makes the cost of a scan without an index look enormous, which would bring on compilation.
        "jit": "off",
    }
    engine: Engine
    if options.pool is not None:
        borrowing = source(options.pool, words.name, _for_a_transaction(settings))
        engine = BorrowedEngine(words, borrowing, call_timeout=call_timeout(options))
    else:
        pool = await _pool(url, options, settings)
        engine = PostgresEngine(words, pool, _alone(url, options), pooler=options.pooler, settings=settings)
    try:
        return await open_store(engine, options, url)
    except asyncpg.ClientConfigurationError as e:
        raise InvalidURL(f"{url} cannot be used: {e}") from None


def _for_a_transaction(settings: dict[str, str]) -> str:
    """One statement that sets all until the transaction ends."""
    return "SELECT " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in settings.items())


URL_PARAMETERS = (
    *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl", "sslnegotiation"),
    *("ssl_min_protocol_version", "ssl_max_protocol_version", "host", "port", "user", "password", "passfile"),
    *("dbname", "service", "target_session_attrs", "krbsrvname", "gsslib", "application_name", "options"),
    "search_path",
)
"""What asyncpg understands, and the server's settings that are of use. Others would be sent to the server as
settings, so that a misspelt sslmode would be no error before the server says so, or none at all."""


def check_url(url: Url) -> None:
    check_parameters(url, URL_PARAMETERS, files=("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile"))


def _login(url: Url, options: StoreOptions) -> dict[str, Any]:
    check_url(url)
    if options.tls is not None and "sslmode" in url.query:
        raise InvalidOption("give either the option tls or sslmode in the URL, not both")
    return {
        "dsn": url.raw.replace("postgres://", "postgresql://", 1) if url.scheme == "postgres" else url.raw,
        "timeout": connect_timeout(options),
        "ssl": ssl.create_default_context() if options.tls is True else options.tls,
    }


def _alone(url: Url, options: StoreOptions) -> Callable[[], Awaitable[Any]]:
    """Connections beside the pool, for sessions that are held."""
    # The server asks a silent host whether it is still there: a power cut closes no connection.
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


async def _pool(url: Url, options: StoreOptions, settings: dict[str, str]) -> Any:
    return await asyncpg.create_pool(
        **_login(url, options),
        min_size=0,
        max_size=options.pool_size,
        command_timeout=call_timeout(options),
        # Poolers pass no settings on, and forget statements between transactions.
        server_settings={"application_name": "millpond"} | ({} if options.pooler else settings),
        statement_cache_size=0 if options.pooler else 256,
        # Statements stay: replanning would cost more than a stale plan, which these settings exclude.
        max_cached_statement_lifetime=0,
        reset=_keep_session,
    )


async def _keep_session(connection: Any) -> None:
    """Nothing to reset: we leave no session state behind, and the default costs a round trip each time."""
