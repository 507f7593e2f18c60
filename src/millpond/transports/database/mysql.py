"""MySQL 8 and MariaDB 10.6+, through asyncmy, at READ COMMITTED."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import asyncmy
import asyncmy.errors
import msgspec

from millpond.clock import SECOND, micros
from millpond.errors import InvalidURL, StoreBusy
from millpond.transports.database import mysql_exports, mysql_streams, staging
from millpond.transports.database import statements as sql
from millpond.transports.database import stream_statements as streams
from millpond.transports.database.borrowed import BorrowedEngine, source
from millpond.transports.database.dialect import Dialect, Trouble
from millpond.transports.database.engine import Mode
from millpond.transports.database.login import (
    call_timeout,
    connect_timeout,
    is_untrusted,
    tls_context,
)
from millpond.transports.database.opening import open_store
from millpond.transports.database.options import IDLE_IN_TRANSACTION, StoreOptions, parse
from millpond.transports.database.pool import Pool
from millpond.transports.database.statement import Copy, Many, Query, Rows, Step, Steps, Style, drive_async
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url, check_parameters

T = TypeVar("T")

# One row per statement would be one round trip each. STRAIGHT_JOIN: the rows first, then the table by key.
_REQUEUE = f"""
UPDATE JSON_TABLE(:rows, '$[*]' COLUMNS (id CHAR(32) PATH '$[0]', delay BIGINT PATH '$[1]',
error LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$[2]')) AS r
STRAIGHT_JOIN {{message}} m ON m.id = UNHEX(r.id)
SET m.state = :state, m.attempts = m.attempts + :attempts, m.deliveries = m.deliveries + :deliveries,
m.due_at = CASE WHEN r.delay IS NULL THEN m.due_at ELSE {{now}} + r.delay END,
m.first_attempt_at = CASE WHEN :attempts = 1 THEN coalesce(m.first_attempt_at, m.acquired_at)
                     ELSE m.first_attempt_at END,
m.last_attempt_at = CASE WHEN :attempts = 1 THEN {{now}} ELSE m.last_attempt_at END,
m.last_error = coalesce(r.error, m.last_error), m.worker = NULL, m.lease_until = NULL,
m.lane = {sql.LANE_GIVEN_BACK}
"""

_KEEP_EACH = f"""
INSERT INTO {{archive}} ({sql.ARCHIVED_COLUMNS})
SELECT m.id, m.queue, m.{{key}}, m.priority, m.due_at, m.expires_at, m.headers, m.payload, m.deliveries,
m.attempts + :attempts, m.created_at,
CASE WHEN :attempts = 1 THEN coalesce(m.first_attempt_at, m.acquired_at) ELSE m.first_attempt_at END,
CASE WHEN :attempts = 1 THEN {{now}} ELSE m.last_attempt_at END,
m.acquired_at, m.token, :state, r.reason, coalesce(r.error, m.last_error), {{now}}
FROM JSON_TABLE(:rows, '$[*]' COLUMNS (id CHAR(32) PATH '$[0]',
reason LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$[1]',
error LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PATH '$[2]')) AS r
STRAIGHT_JOIN {{message}} m ON m.id = UNHEX(r.id)
"""

_PROBE_LANE = """
(SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready} AND m.lane = :low_#
AND m.due_at <= {now} AND m.due_at >= :floor_due_# AND (m.due_at > :floor_due_# OR m.id >= :floor_id_#)
ORDER BY m.due_at, m.id LIMIT 1)
"""
_PROBE_GAP = """
(SELECT m.lane FROM {message} m {claim_index} WHERE m.queue = :queue AND {ready}
AND m.lane >= :low_# AND m.lane <= :high_# ORDER BY m.lane LIMIT 1)
"""


# The publisher first: a later assignment sees what an earlier one has changed.
_REMEMBER = (
    staging.REMEMBER.partition("ON CONFLICT")[0].replace(" AS d", "")
    + """
ON DUPLICATE KEY UPDATE publisher = IF(expires_at <= :at, VALUES(publisher), publisher),
expires_at = IF(expires_at <= :at, VALUES(expires_at), expires_at)
"""
)


def _numbered(part: str, n: int) -> str:
    return part.replace("#", str(n))


class MysqlDialect(Dialect):
    name = "mysql"
    style = Style.FORMAT
    no_floor = (-(2**63), bytes(16))
    grace = 5.0  # until it has written its first row
    archive_by_time = True
    overrides = {
        sql.REQUEUE: _REQUEUE,
        sql.KEEP_EACH: _KEEP_EACH,
        staging.REMEMBER: _REMEMBER,
        **mysql_streams.OVERRIDES,
        # One at a time: in a recursive query the server finds no place in the index, and DISTINCT may read it all.
        sql.ARCHIVED_QUEUES: "SELECT min(a.queue) FROM {archive} a {archive_index} WHERE a.queue > :after",
    }
    words = {
        # Not UNIX_TIMESTAMP: that goes through the session's time zone, where one hour a year is ambiguous.
        "now": "coalesce(:now, timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)))",
        "key": "`key`",
        "id_out": "lower(insert(insert(insert(insert(hex(id), 21, 0, '-'), 17, 0, '-'), 13, 0, '-'), 9, 0, '-'))",
        "ids": "IN (:*ids)",
        "queues": "IN (:*queues)",
        "states": "IN (:*states)",
        "lots": "IN (:*lots)",
        "ready": "m.ready = 1",
        "locked": "FOR UPDATE SKIP LOCKED",
        "lock": "FOR UPDATE",
        # Not INSERT IGNORE, which hides other errors too.
        "or_skip": "ON DUPLICATE KEY UPDATE id = id",
        "or_leave": "ON DUPLICATE KEY UPDATE part = part",
        "or_beat": "ON DUPLICATE KEY UPDATE beat_at = VALUES(beat_at), by_lock = VALUES(by_lock)",
        "session": "connection_id()",
        # Such locks are the whole server's, so that the database's name is in theirs, of 64 characters at most.
        "take_lock": "GET_LOCK(concat(left({database}, 40), '.', :worker), 0)",
        "lock_held": "IS_USED_LOCK(concat(left({database}, 40), '.', w.id)) IS NOT NULL",
        "claim_index": "FORCE INDEX ({prefix}message_claim)",
        "lease_index": "FORCE INDEX ({prefix}message_lease)",
        # Whoever holds a message has a lease; the state alone is in no index.
        "held": "m.lease_until IS NOT NULL AND m.state = 'PROCESSING'",
        # By statistics of a moment ago, when the table was small, the server would read all of it.
        "id_index": "FORCE INDEX (PRIMARY)",
        "archive_index": "FORCE INDEX ({prefix}message_archive_queue)",
        "archive_id_index": "FORCE INDEX ({prefix}message_archive_id)",
        # Only a DELETE in this form takes an index by name.
        "delete_a": "DELETE a FROM",
        "or_update": "ON DUPLICATE KEY UPDATE",
        "inner": "STRAIGHT_JOIN",
        "names": "JSON_TABLE(:names, '$[*]' COLUMNS (name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin "
        "PATH '$')) AS n",
        # Spelled out: a comparison of rows, (due_at, id) >= (…), finds no place in an index here.
        "from_floor": "AND m.due_at >= :floor_due AND (m.due_at > :floor_due OR m.id >= :floor_id)",
    }

    def quote(self, identifier: str) -> str:
        return f"`{identifier}`"

    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        # A subquery that depends on an outer row searches no range of an index here, so that each gap is a
        # query of its own, with its bounds as values.
        parts, values = [], params
        for n, ((low, high), floor) in enumerate(zip(gaps, floors, strict=True)):
            parts.append(_PROBE_LANE if low == high else _PROBE_GAP)
            due, id_ = floor or self.no_floor
            values = values | {f"low_{n}": low, f"high_{n}": high, f"floor_due_{n}": due, f"floor_id_{n}": id_}
        return Query(self.sql(" UNION ALL ".join(_numbered(part, n) for n, part in enumerate(parts))), values)

    def requeue(self, params: dict[str, Any], rows: Sequence[tuple[Any, int | None, str | None]]) -> Step:
        values = [(id_.hex(), delay, error) for id_, delay, error in rows]
        return Query(self.sql(sql.REQUEUE), {**params, "rows": msgspec.json.encode(values).decode()})

    def keep_each(self, params: dict[str, Any], rows: Sequence[tuple[Any, str | None, str | None]]) -> Step:
        values = [(id_.hex(), reason, error) for id_, reason, error in rows]
        return Query(self.sql(sql.KEEP_EACH), {**params, "rows": msgspec.json.encode(values).decode()})

    def note_outcomes(self, params: dict[str, Any], rows: Sequence[tuple[Any, str, int | None, str | None]]) -> Step:
        values = [(id_.hex(), *rest) for id_, *rest in rows]
        return Query(self.sql(streams.NOTE), {**params, "rows": msgspec.json.encode(values).decode()})

    def late(self, low: int, at: int) -> Steps[dict[str, int]]:
        first = yield from mysql_exports.first_uncommitted(self, low, at)
        return {} if first is None else {"uncommitted": first}

    def lock_migrations(self) -> Steps[None]:
        # By name and database, since such locks are the whole server's.
        rows = yield Query(self.sql("SELECT GET_LOCK(concat(left({database}, 24), '.{prefix}migrate'), 60)"), {})
        if rows[0][0] != 1:
            raise StoreBusy("another process has been migrating this database for a minute; run it again later")

    def unlock_migrations(self) -> Steps[None]:
        yield Query(self.sql("SELECT RELEASE_LOCK(concat(left({database}, 24), '.{prefix}migrate'))"), {})

    def trouble(self, error: BaseException) -> Trouble:
        if getattr(error, "connection_invalidated", False):
            return Trouble.LOST  # as SQLAlchemy says
        error = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        # Lock wait, deadlock, nowait; and a key that is taken: an earlier try of the same publish was cut off
        # before its commit, which came after we had looked. The next try sees it.
        if code in (1205, 1213, 3572, 1062):
            return Trouble.BUSY
        if code in (1044, 1045, 1698, 1142):
            return Trouble.REFUSED
        if code == 1049:
            return Trouble.NO_DATABASE
        if code in (1146, 1054):
            return Trouble.UNMIGRATED
        if is_untrusted(error.__cause__):
            return Trouble.UNTRUSTED
        if code in _LOST or isinstance(error, OSError | EOFError | asyncio.TimeoutError):
            return Trouble.LOST
        if isinstance(error, asyncmy.errors.InterfaceError | asyncmy.errors.InternalError) and code == 0:
            return Trouble.LOST  # "Cancelled during execution", "Packet sequence number wrong": unusable
        return Trouble.OTHER if isinstance(error, asyncmy.errors.MySQLError) else Trouble.FOREIGN


# Cannot connect, gone away, lost, shutdown, killed, too many connections, read-only (an old primary), idle for long.
_LOST = {
    2002,
    2003,
    2006,
    2013,
    2014,
    2055,
    1053,
    1040,
    1077,
    1079,
    1152,
    1158,
    1159,
    1160,
    1161,
    1290,
    1927,
    3169,
    4031,
}


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
            if self.dialect.trouble(e) is not Trouble.LOST:
                await self._in_time(connection.rollback())
            raise
        await self._in_time(connection.commit())
        return result

    def _executor(self, connection: Any) -> Callable[[Step], Any]:
        execute = executor(connection)
        return lambda step: self._in_time(execute(step))

    async def _in_time(self, answer: Awaitable[T]) -> T:
        # The driver's own timeout is for reading only: a network that swallows all stops a large write too.
        async with asyncio.timeout(self._call_timeout):
            return await answer

    async def hold(self, worker: int) -> MysqlSession:
        connection = await self._connect()
        async with connection.cursor() as cursor:
            # A power cut closes no connection: a session that is silent for so long is over.
            await cursor.execute("SET wait_timeout = 60")
        return MysqlSession(connection, self._transaction)

    async def listen(self, channel: str, heard: Callable[[str | None], None]) -> None:
        """The server has no notices."""

    async def discard(self, worker: int) -> None:
        """The server frees a lock with its session and keeps nothing of it."""

    async def close(self) -> None:
        await self._pool.close()


class MysqlSession:
    """A connection beside the pool, so that a small pool is not used up by it."""

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


URL_PARAMETERS = ("ssl", "ssl_ca", "ssl_cert", "ssl_key")


async def connect(url: Url, **given: Any) -> DatabaseStore:
    """A store on MySQL 8 or MariaDB 10.6+."""
    options = parse(given)
    words = dialect(options)
    if options.pool is not None:
        borrowing = source(options.pool, words.name)
        return await open_store(BorrowedEngine(words, borrowing, call_timeout=call_timeout(options)), options, url)
    connection = connecting(url, options)
    pool = Pool(connection, _close, options.pool_size, words.trouble)
    engine = MysqlEngine(words, pool, connection, call_timeout=call_timeout(options))
    return await open_store(engine, options, url)


def connecting(url: Url, options: StoreOptions) -> Callable[[], Awaitable[Any]]:
    """What makes a connection; whatever is wrong with the URL is said at once."""
    database = url.path.removeprefix("/")
    if not url.host or not database or "/" in database:
        raise InvalidURL(f"{url} names no database: write {url.scheme}://user:password@host:3306/database")
    check_parameters(url, URL_PARAMETERS, files=("ssl_ca", "ssl_cert", "ssl_key"))
    tls = tls_context(url, options)

    async def connection() -> Any:
        async with asyncio.timeout(connect_timeout(options)):
            return await _connect(url, database, options, tls)

    return connection


async def _connect(url: Url, database: str, options: StoreOptions, tls: ssl.SSLContext | None) -> Any:
    connection = await asyncmy.connect(
        host=url.host,
        port=url.port or 3306,
        user=url.user or "",
        password=(url.password or "").encode(),  # as text it would have to be Latin-1
        db=database,
        autocommit=True,
        charset="utf8mb4",
        ssl=tls,
    )
    lock_wait = max(1, micros(options.busy_timeout, "busy_timeout") // SECOND)
    async with connection.cursor() as cursor:
        # Without gap locks publishers and claimers do not meet.
        await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        # A process that stands still in the middle of a transaction must not keep its locks. MySQL has no such limit.
        idle = f"/*M! , idle_transaction_timeout = {IDLE_IN_TRANSACTION} */"
        await cursor.execute(f"SET innodb_lock_wait_timeout = {lock_wait}, sql_mode = 'STRICT_ALL_TABLES' {idle}")
    return connection


async def _close(connection: Any) -> None:
    connection.close()
