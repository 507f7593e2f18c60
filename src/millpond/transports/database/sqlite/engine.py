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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from millpond.clock import SECOND, micros, monotonic
from millpond.errors import InvalidOption, InvalidURL, NotMigrated
from millpond.transports.database.connect import open_store
from millpond.transports.database.options import StoreOptions, parse
from millpond.transports.database.runner import Mode
from millpond.transports.database.sql.dialect import ErrorKind
from millpond.transports.database.sql.statement import Copy, Many, Query, Rows, Step, Steps, Style, drive
from millpond.transports.database.sqlite.dialect import SqliteDialect
from millpond.transports.database.sqlite.examine import has_wal_reset_bug
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url, check_parameters

T = TypeVar("T")
log = logging.getLogger("millpond")


class SqliteEngine:
    """A writing and a reading connection, each in its own thread."""

    def __init__(self, dialect: SqliteDialect, path: str, *, busy_timeout: float) -> None:
        self.dialect = dialect
        self.path = path
        self._writer = _Thread(self._open_writer, "millpond-sqlite-writer")
        self._reader = _Thread(self._open, "millpond-sqlite-reader")
        self._busy_timeout = busy_timeout

    async def run(self, steps: Callable[[], Steps[T]], mode: Mode = Mode.WRITE) -> T:
        if mode is Mode.READ:
            return await self._reader.call(lambda connection: drive(steps(), executor(connection)))

        def write(connection: sqlite3.Connection) -> T:
            self._begin(connection)
            return in_transaction(connection, steps)

        return await self._writer.call(write)

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Become the writer. IMMEDIATE: a transaction that began by reading could not become one later.

        SQLite has no queue of waiters. Its own waiters retry ten times a second, and wait for seconds while others
        write without pause; this loop retries every 2 ms on average.
        """
        give_up_at = monotonic() + self._busy_timeout
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as e:
                if self.dialect.error_kind(e) is not ErrorKind.BUSY or monotonic() > give_up_at:
                    raise
            time.sleep(random.random() * 0.004)

    def _open(self) -> sqlite3.Connection:
        connection = open_connection(self.path, self._busy_timeout)
        connection.create_function("millpond_lock_held", 1, self._lock_held)
        return connection

    def _open_writer(self) -> sqlite3.Connection:
        connection = self._open()
        connection.execute("PRAGMA busy_timeout = 10")  # `_begin` waits the rest
        return connection

    async def hold(self, worker: int) -> SqliteSession:
        return SqliteSession(self, self._lock_file(worker))

    async def listen(self, channel: str, on_queue: Callable[[str | None], None]) -> None:
        """Returns at once: a file sends no notifications."""

    async def discard(self, worker: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock_file(worker))

    def _lock_file(self, worker: int) -> str:
        # Beside the real file, also if it was opened through a link.
        return f"{os.path.realpath(self.path)}-worker-{worker}"

    def _lock_held(self, worker: int) -> bool:
        try:
            file = os.open(self._lock_file(worker), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # no right to read it: assume that it is held
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    async def close(self) -> None:
        try:
            await self._reader.close()
        finally:  # also if the caller is cancelled
            await self._writer.close()


class SqliteSession:
    """A locked file, which the kernel unlocks with the process. Heartbeats are ordinary writes.

    Not a lock on the database's own file: SQLite loses its locks there when any part of the process closes it.
    """

    any_loop = True

    def __init__(self, engine: SqliteEngine, path: str) -> None:
        self._engine = engine
        self._path = path
        self._file = self._open()

    async def run(self, steps: Callable[[], Steps[T]]) -> T:
        if not self._is_in_place():  # deleted: a lock on a file without a name protects nothing
            new = self._open()  # before the old one is closed: if this fails, its number may already be another file's
            await self.close()
            self._file = new
        return await self._engine.run(steps)

    async def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(PermissionError):  # it belongs to another user
            os.fchmod(file, self._mode())
        # Others hold it briefly to check it.
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _mode(self) -> int:
        """Readable for users who may write the database, and for no others: a reader of the file could lock it."""
        database = os.stat(self._engine.path).st_mode
        return 0o600 | (0o060 if database & 0o020 else 0) | (0o006 if database & 0o002 else 0)

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

        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, close)
        finally:
            self._executor.shutdown(wait=False)


def open_connection(path: str, busy_timeout: float, *, one_thread: bool = True) -> sqlite3.Connection:
    with contextlib.suppress(FileExistsError):
        # A new file is private. SQLite gives the WAL the mode of the database.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(
        path, timeout=busy_timeout, isolation_level=None, cached_statements=256, check_same_thread=one_thread
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:  # such as of a file that is no database
        connection.close()
        raise
    return connection


def in_transaction(connection: sqlite3.Connection, steps: Callable[[], Steps[T]]) -> T:
    """Run steps in the transaction that has begun: commit at the end, roll back after an error."""
    try:
        result = drive(steps(), executor(connection))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


def _read_leniently(connection: sqlite3.Connection, text: str, values: Any) -> Rows:
    """Read again, with backslashes for bytes that are no UTF-8: another program wrote them, in one of the rows."""
    connection.text_factory = lambda value: value.decode(errors="backslashreplace")
    try:
        return connection.execute(text, values).fetchall()
    finally:
        connection.text_factory = str


def executor(connection: sqlite3.Connection) -> Callable[[Step], Rows]:
    def execute(step: Step) -> Rows:
        match step:
            case Query(statement, params):
                text, values = statement.render(Style.QMARK, params)
                try:
                    return connection.execute(text, values).fetchall()
                except sqlite3.OperationalError as e:
                    if not str(e).startswith("Could not decode to UTF-8"):
                        raise
                    return _read_leniently(connection, text, values)
            case Many(statement, columns, records):
                connection.executemany(*statement.render_many(Style.QMARK, columns, records))
                return ()
            case Copy():
                raise AssertionError("SQLite has no bulk load beside INSERT")

    return execute


def _warn_of_wal_reset_bug(path: str) -> None:
    """Called once for each file, when it gets its tables."""
    if has_wal_reset_bug(sqlite3.sqlite_version_info):
        log.warning(
            "SQLite %s has the WAL-reset bug. One process at a time is safe; several processes that write %s at once "
            "may, rarely, corrupt it. For those use a Python built with SQLite 3.51.3 or later; see "
            "docs/how-to/deployment.md",
            sqlite3.sqlite_version,
            path,
        )


def dialect(options: StoreOptions) -> SqliteDialect:
    for name in ("schema", "pool", "tls", "pooler"):
        if getattr(options, name):
            raise InvalidOption(f"the option {name!r} means nothing to SQLite; leave it out")
    return SqliteDialect(prefix=options.table_prefix)


def check_address(url: Url) -> str:
    """The path of the file."""
    check_parameters(url, ())
    path = url.path.removeprefix("/")
    if url.host or not path or path == ":memory:":
        raise InvalidURL(
            f"{url} names no file: write sqlite:///orders.db, or sqlite:////var/lib/orders.db for an absolute "
            "path; for a queue in memory use memory://"
        )
    return path


async def connect(url: Url, **given: Any) -> DatabaseStore:
    """A store in a SQLite file. A new file gets its tables at once; an older one is migrated by the command."""
    options = parse(given)
    words = dialect(options)
    path = check_address(url)
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise InvalidURL(f"the folder of {path} does not exist; create it first")
    if options.migrate is False and not os.path.exists(path):  # reading must not create a file
        raise NotMigrated(f"there is no file {path}; check the URL, or make it with: millpond migrate {url}")
    engine = SqliteEngine(words, path, busy_timeout=micros(options.busy_timeout, "busy_timeout") / SECOND)
    # Embedded: no other program could have run the command before.
    store = await open_store(engine, options, url, migrate_new=options.migrate is None)
    if any(migration.version == 1 for migration in store.migrated):
        _warn_of_wal_reset_bug(path)
    return store
