"""SQLite, through the standard module: one thread writes, another reads, WAL between them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from millpond.clock import SECOND, micros, monotonic
from millpond.errors import InvalidOption, InvalidURL, NotMigrated
from millpond.transports.database import statements as sql
from millpond.transports.database.dialect import Dialect, Trouble
from millpond.transports.database.engine import Mode
from millpond.transports.database.migrate import applied_version
from millpond.transports.database.opening import open_store
from millpond.transports.database.options import StoreOptions, parse
from millpond.transports.database.statement import Copy, Many, Query, Rows, Step, Steps, Style, drive
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url, check_parameters

T = TypeVar("T")
log = logging.getLogger("millpond")


class SqliteDialect(Dialect):
    name = "sqlite"
    style = Style.QMARK
    sole_writer = True
    tick = 0.002  # whole milliseconds are all that its clock has
    words = {
        "now": "coalesce(:now, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)",
        "key": "key",
        "id_out": "lower(substr(hex(id), 1, 8) || '-' || substr(hex(id), 9, 4) || '-' || substr(hex(id), 13, 4) "
        "|| '-' || substr(hex(id), 17, 4) || '-' || substr(hex(id), 21))",
        "ids": "IN (:*ids)",
        "queues": "IN (:*queues)",
        "states": "IN (:*states)",
        "lots": "IN (:*lots)",
        "ready": "m.state <> 'PROCESSING'",
        # One writer at a time: whoever is in a write transaction holds every row.
        "locked": "",
        "lock": "",
        "or_skip": "ON CONFLICT DO NOTHING",
        "or_leave": "ON CONFLICT DO NOTHING",
        "or_beat": "ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at, by_lock = excluded.by_lock",
        # The lock is a file's, and its session has it from the beginning.
        "session": "0",
        "take_lock": "1",
        "lock_held": "millpond_lock_held(w.id)",
        "claim_index": "INDEXED BY {prefix}message_claim",
        "lease_index": "INDEXED BY {prefix}message_lease",
        "held": "m.state = 'PROCESSING'",
        # Of itself it would search by queue, which is one of few.
        "id_index": "INDEXED BY sqlite_autoindex_{prefix}message_1",
        "archive_index": "INDEXED BY {prefix}message_archive_queue",
        "archive_id_index": "INDEXED BY {prefix}message_archive_id",
        "delete_a": "DELETE FROM",
        "or_update": "ON CONFLICT (name) DO UPDATE SET",
        "in_select": "IN (",
        "end_select": ")",
        "inner": "CROSS JOIN",
        "names": "(SELECT value AS name FROM json_each(:names)) AS n",
        # Dead rows leave an index at once, so that there is nothing to step over.
        "above_floor": "",
        "from_floor": "",
        "gaps": "(SELECT json_extract(value, '$[0]') AS low, json_extract(value, '$[1]') AS high "
        "FROM json_each(:gaps)) AS g",
    }

    def probe(self, params: dict[str, Any], gaps: Sequence[tuple[int, int]], floors: Sequence[Any]) -> Step:
        return Query(self.sql(sql.PROBE), {**params, "gaps": msgspec.json.encode(gaps).decode()})

    def trouble(self, error: BaseException) -> Trouble:
        if isinstance(error, sqlite3.OperationalError):
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return Trouble.BUSY
            if str(error).startswith(("no such table", "no such column", "no such index")):
                return Trouble.UNMIGRATED
        return Trouble.OTHER if isinstance(error, sqlite3.Error) else Trouble.FOREIGN


class SqliteEngine:
    """A writing and a reading connection, each in a thread of its own."""

    def __init__(self, dialect: SqliteDialect, path: str, *, busy_timeout: float) -> None:
        self.dialect = dialect
        self.path = path
        self._writer = _Thread(self._open_writer, "millpond-sqlite-writer")
        self._reader = _Thread(self._open, "millpond-sqlite-reader")
        self._busy_timeout = busy_timeout
        _warn_of_wal_reset_bug()

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        if mode is Mode.READ:
            return await self._reader.call(lambda connection: drive(steps(), executor(connection)))

        def transaction(connection: sqlite3.Connection) -> T:
            self._begin(connection)
            try:
                result = drive(steps(), executor(connection))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

        return await self._writer.call(transaction)

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Become the writer. IMMEDIATE: a transaction that began by reading could not become one later.

        Waiters stand in no line here, they look now and then; SQLite's own look ten times a second, and wait
        for seconds while others write without pause.
        """
        give_up_at = monotonic() + self._busy_timeout
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as e:
                if self.dialect.trouble(e) is not Trouble.BUSY or monotonic() > give_up_at:
                    raise
            time.sleep(random.random() * 0.004)

    def _open(self) -> sqlite3.Connection:
        connection = open_connection(self.path, self._busy_timeout)
        connection.create_function("millpond_lock_held", 1, self._lock_held)
        return connection

    def _open_writer(self) -> sqlite3.Connection:
        connection = self._open()
        connection.execute("PRAGMA busy_timeout = 10")  # the rest is for _begin to wait
        return connection

    async def hold(self, worker: int) -> SqliteSession:
        return SqliteSession(self, self._lock_file(worker))

    async def listen(self, channel: str, heard: Callable[[str | None], None]) -> None:
        """A file announces nothing."""

    async def discard(self, worker: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock_file(worker))

    def _lock_file(self, worker: int) -> str:
        # Beside the file itself, whatever link or folder it was opened through.
        return f"{os.path.realpath(self.path)}-worker-{worker}"

    def _lock_held(self, worker: int) -> bool:
        try:
            file = os.open(self._lock_file(worker), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # not ours to read: then not ours to judge
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()


class SqliteSession:
    """A locked file, which the kernel unlocks with the process; beats go the way of all writes.

    Not a lock on the database's own file: SQLite loses its locks there when anybody in the process closes it.
    """

    def __init__(self, engine: SqliteEngine, path: str) -> None:
        self._engine = engine
        self._path = path
        self._file = self._open()

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        if not self._is_in_place():  # somebody tidied up: what nobody can find locks nothing
            await self.close()
            self._file = self._open()
        return await self._engine.run(steps)

    async def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Others may hold it for the moment that a look takes.
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False


class _Thread:
    """One connection and the only thread that uses it."""

    def __init__(self, open_: Callable[[], sqlite3.Connection], name: str) -> None:
        self._open = open_
        self._executor = ThreadPoolExecutor(1, name)
        self._connection: sqlite3.Connection | None = None

    async def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._work, work)

    def _work(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._connection = self._open()
        return work(self._connection)

    async def close(self) -> None:
        def close() -> None:
            if self._connection is not None:
                self._connection.close()

        await asyncio.get_running_loop().run_in_executor(self._executor, close)
        self._executor.shutdown(wait=False)


def open_connection(path: str, busy_timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_timeout, isolation_level=None, cached_statements=256)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def executor(connection: sqlite3.Connection) -> Callable[[Step], Rows]:
    def execute(step: Step) -> Rows:
        match step:
            case Query(statement, params):
                text, values = statement.render(Style.QMARK, params)
                return connection.execute(text, values).fetchall()
            case Many(statement, columns, records):
                connection.executemany(*statement.render_many(Style.QMARK, columns, records))
                return ()
            case Copy():
                raise AssertionError("SQLite has no bulk load beside INSERT")

    return execute


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """SQLite 3.7.0 to 3.51.2 may corrupt a WAL file when two connections write and checkpoint at once."""
    if version >= (3, 53) or (3, 51, 3) <= version < (3, 52):
        return False
    return not ((3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45))


_warned = False


def _warn_of_wal_reset_bug() -> None:
    global _warned
    if not _warned and has_wal_reset_bug(sqlite3.sqlite_version_info):
        _warned = True
        log.warning(
            "SQLite %s has the WAL-reset bug: several processes that write one file may, rarely, corrupt it. "
            "Use a Python built with SQLite 3.51.3 or later, or let one process alone write the file.",
            sqlite3.sqlite_version,
        )


def dialect(options: StoreOptions) -> SqliteDialect:
    for name in ("schema", "pool", "tls", "pooler"):
        if getattr(options, name):
            raise InvalidOption(f"the option {name!r} means nothing to SQLite; leave it out")
    return SqliteDialect(prefix=options.table_prefix)


async def connect(url: Url, **given: Any) -> DatabaseStore:
    """A store in a SQLite file. A new file gets its tables at once; an older one is migrated by the command."""
    options = parse(given)
    words = dialect(options)
    check_parameters(url, ())
    path = url.path.removeprefix("/")
    if url.host or not path or path == ":memory:":
        raise InvalidURL(
            f"{url} names no file: write sqlite:///orders.db, or sqlite:////var/lib/orders.db for an absolute "
            "path; for a queue in memory use memory://"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise InvalidURL(f"the folder of {path} does not exist; create it first")
    if options.migrate is False and not os.path.exists(path):  # looking must not make a file
        raise NotMigrated(f"there is no file {path}; check the URL, or make it with: millpond migrate {url}")
    engine = SqliteEngine(words, path, busy_timeout=micros(options.busy_timeout, "busy_timeout") / SECOND)
    # Embedded: nobody but the program could run a command first.
    new = options.migrate is None and await applied_version(engine) == 0
    return await open_store(engine, options, url, migrate_now=new)
